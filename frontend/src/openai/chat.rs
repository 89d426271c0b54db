//! `/v1/chat/completions`: events to chat chunks, or folded to a chat completion.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};

use super::answer::{ChoiceEvent, Finish};
use super::endpoint::{Endpoint, FoldedChoice, StageWatch, head, serve};
use super::logprobs::{chat_logprobs, prompt_logprobs};
use super::prepare::{Prepared, prepare_chat};
use super::sse::Frame;
use super::types::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprobs, ChatMessage, Document, Head, Usage, UsageField,
};
use super::validate::chat_request;
use crate::config::Limits;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::state::AppState;
use crate::text::{TextDelta, TokenEntry};

const ROLE: &str = "assistant";

/// The handler.
pub async fn chat_completions(State(state): State<AppState>, request: Request) -> Result<Response, ApiError> {
    serve::<Chat>(state, request).await
}

struct Chat {
    head: Head,
    model: Arc<ServedModel>,
    /// Whether each choice's role went out.
    begun: Vec<bool>,
    include_usage: bool,
    logprobs: bool,
    prompt_logprobs: Option<u32>,
    returns_ids: bool,
    prompt_ids: Arc<[u32]>,
    /// Those that are to go out with the first chunk.
    unsent_prompt_ids: Option<Arc<[u32]>>,
}

impl Chat {
    fn logprobs(&self, entries: &[TokenEntry]) -> Option<ChatLogprobs> {
        self.logprobs.then(|| chat_logprobs(entries, self.model.tokenizer.vocabulary()))
    }

    fn write_chunk(&mut self, choice: ChatChunkChoice<'_>, frame: &mut Frame) {
        let prompt_ids = self.unsent_prompt_ids.take();
        frame.json(&self.document(
            "chat.completion.chunk",
            &[choice],
            UsageField::of_chunk(self.include_usage),
            prompt_ids.as_deref(),
        ));
    }

    fn document<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: UsageField<'a>,
        prompt_token_ids: Option<&'a [u32]>,
    ) -> Document<'a, C> {
        let Head { id, created, model } = &self.head;
        let prompt_logprobs = None;
        Document { id, object, created: *created, model, choices, usage, prompt_token_ids, prompt_logprobs }
    }
}

impl Endpoint for Chat {
    fn prepare(
        fields: Map<String, Value>,
        model: Arc<ServedModel>,
        limits: &Limits,
        watch: &mut StageWatch<'_>,
    ) -> Result<Prepared, ApiError> {
        let request = chat_request(fields, &model, limits)?;
        watch.end(|stages| &stages.parse);
        prepare_chat(request, model, watch)
    }

    fn new(prepared: &Prepared) -> Self {
        let options = &prepared.options;
        let first = prepared.requests.first();
        let prompt_ids = first.map(|request| Arc::clone(&request.prompt_ids)).unwrap_or_default();
        Self {
            head: head("chatcmpl", prepared),
            model: Arc::clone(&prepared.model),
            begun: vec![false; options.samples as usize],
            include_usage: options.delivery.includes_usage(),
            logprobs: options.logprobs.is_some(),
            prompt_logprobs: options.prompt_logprobs,
            returns_ids: options.return_token_ids,
            unsent_prompt_ids: options.return_token_ids.then(|| Arc::clone(&prompt_ids)),
            prompt_ids,
        }
    }

    fn write_event(&mut self, event: &ChoiceEvent, frame: &mut Frame) {
        let index = event.index;
        if !std::mem::replace(&mut self.begun[index as usize], true) {
            let delta = ChatDelta { role: Some(ROLE), content: Some("") };
            let choice =
                ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, token_ids: None };
            self.write_chunk(choice, frame);
        }
        let TextDelta { text, token_ids, entries, .. } = &event.delta;
        let shows_ids = self.returns_ids && !token_ids.is_empty();
        if text.is_empty() && entries.is_empty() && !shows_ids && event.finish.is_none() {
            return;
        }
        let choice = ChatChunkChoice {
            index,
            delta: ChatDelta { role: None, content: Some(text.as_str()).filter(|text| !text.is_empty()) },
            logprobs: if entries.is_empty() { None } else { self.logprobs(entries) },
            finish_reason: event.finish.map(Finish::as_str),
            token_ids: self.returns_ids.then_some(token_ids),
        };
        self.write_chunk(choice, frame);
    }

    fn write_usage(&self, usage: &Usage, frame: &mut Frame) {
        let none: &[ChatChunkChoice<'_>] = &[];
        frame.json(&self.document("chat.completion.chunk", none, UsageField::Counts(usage), None));
    }

    fn whole(&self, folded: &[FoldedChoice], usage: &Usage) -> Result<Vec<u8>, serde_json::Error> {
        let choices: Vec<ChatChoice<'_>> = (0u32..)
            .zip(folded)
            .map(|(index, choice)| ChatChoice {
                index,
                message: ChatMessage { role: ROLE, content: &choice.delta.text, refusal: None },
                logprobs: self.logprobs(&choice.delta.entries),
                finish_reason: choice.finish.map(Finish::as_str),
                token_ids: self.returns_ids.then_some(&choice.delta.token_ids),
            })
            .collect();
        let prompt_ids = Some(&*self.prompt_ids).filter(|_| self.returns_ids);
        let scores = folded.first().and_then(|choice| choice.prompt_logprobs.as_ref());
        let document = self.document("chat.completion", &choices, UsageField::Counts(usage), prompt_ids);
        serde_json::to_vec(&Document {
            prompt_logprobs: scores.zip(self.prompt_logprobs).map(|(scores, top_n)| {
                prompt_logprobs(&self.prompt_ids, scores, top_n, self.model.tokenizer.vocabulary())
            }),
            ..document
        })
    }
}
