//! `/tokenize` and `/detokenize`: text to ids as generation requests would have it, and back. The
//! JSON is the one that other servers use; nothing reaches the engine.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::body::read_body;
use super::fields::Fields;
use super::json::parse_object;
use super::prepare::{encode, render};
use super::validate::{check_model, messages, token_ids};
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::state::AppState;
use crate::text::{Detokenizer, SpecialTokens};

#[derive(Debug, Serialize)]
struct Encoded {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    /// With `return_token_strs`.
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
struct Decoded {
    prompt: String,
}

/// `POST /tokenize`.
pub async fn tokenize(State(state): State<AppState>, request: Request) -> Result<Response, ApiError> {
    work(state, request, tokens).await
}

/// `POST /detokenize`.
pub async fn detokenize(State(state): State<AppState>, request: Request) -> Result<Response, ApiError> {
    work(state, request, text).await
}

async fn work<T: Serialize + Send + 'static>(
    state: AppState,
    request: Request,
    answer: fn(Fields, &ServedModel) -> Result<T, ApiError>,
) -> Result<Response, ApiError> {
    let admitted = state.admission.admit(&state.lifecycle, &state.metrics)?;
    let body = read_body(request.into_body(), &state.config.limits).await?;
    let model = state.model()?;
    let answer = state
        .off_thread(move || {
            let mut fields = Fields::new(parse_object(body)?);
            if fields.get("model").is_some() {
                check_model(&mut fields, &model)?;
            }
            answer(fields, &model)
        })
        .await?;
    Ok(admitted.hold(Json(answer).into_response()))
}

fn tokens(mut fields: Fields, model: &ServedModel) -> Result<Encoded, ApiError> {
    let is_chat = fields.get("messages").is_some();
    let special_tokens = if fields.flag_or("add_special_tokens", !is_chat)? {
        SpecialTokens::Add
    } else {
        SpecialTokens::Omit
    };
    let tokens = if is_chat {
        let prompt = render(model, &messages(&mut fields)?, fields.flag_or("add_generation_prompt", true)?)?;
        encode(model, &prompt, special_tokens, "messages")?
    } else {
        let message = "prompt is missing: a string, or messages in its place, is needed.";
        let prompt = fields.string("prompt")?.ok_or_else(|| ApiError::invalid("prompt", message))?;
        encode(model, &prompt, special_tokens, "prompt")?
    };
    let vocabulary = model.tokenizer.vocabulary();
    let text_of = |id: &u32| String::from_utf8_lossy(vocabulary.bytes(*id)).into_owned();
    Ok(Encoded {
        count: tokens.len(),
        max_model_len: model.facts.max_model_len,
        token_strs: fields.flag("return_token_strs")?.then(|| tokens.iter().map(text_of).collect()),
        tokens,
    })
}

fn text(mut fields: Fields, model: &ServedModel) -> Result<Decoded, ApiError> {
    let Some(serde_json::Value::Array(items)) = fields.take("tokens") else {
        return Err(ApiError::invalid("tokens", "tokens must be a list of token ids."));
    };
    let ids = token_ids("tokens", &items, model.facts.vocab_size)?;
    let mut detokenizer = Detokenizer::new(model.tokenizer.leading_space());
    let mut prompt = String::new();
    for id in ids {
        detokenizer.push(model.tokenizer.vocabulary().bytes(id), &mut prompt);
    }
    detokenizer.finish(&mut prompt);
    Ok(Decoded { prompt })
}
