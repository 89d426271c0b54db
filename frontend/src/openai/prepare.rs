//! Checked requests to engine requests: templates, tokenizing, room in the context.

use std::sync::Arc;

use serde_json::Value;

use super::endpoint::StageWatch;
use super::format::RequestedFormat;
use super::sampling::RequestedRules;
use super::validate::{ChatRequest, CompletionRequest, Options, Prompt};
use crate::chat::{RenderInput, TemplateError};
use crate::config::Limits;
use crate::engine::types::{Capability, GenerateRequest, Stopping, TokenRules};
use crate::error::ApiError;
use crate::keys::{KeyIdentity, cache_salt};
use crate::model::ServedModel;
use crate::text::{LeadingSpace, SampleRules, SpecialTokens, StopSet, Tokenizer, TokenizerError};

/// Everything that is needed to submit a request and to read its answer.
#[derive(Debug)]
pub(super) struct Prepared {
    /// One per prompt.
    pub requests: Vec<GenerateRequest>,
    pub rules: Arc<SampleRules>,
    /// The text of each prompt, where answers begin with it; else empty.
    pub echoes: Vec<Arc<str>>,
    /// What happens to a space at the start of a prompt.
    pub leading: LeadingSpace,
    pub options: Options,
    pub model: Arc<ServedModel>,
}

impl Prepared {
    /// Of all prompts.
    pub(super) fn prompt_tokens(&self) -> u64 {
        self.requests.iter().map(|request| request.prompt_ids.len() as u64).sum()
    }

    /// Keeps the cached prefixes of the key's holder apart from others', and applies the limits
    /// that hold whatever was asked for.
    pub(super) fn belong_to(&mut self, identity: Option<&KeyIdentity>, limits: &Limits) {
        // An engine without a cache shares nothing.
        let is_cached = self.model.facts.capabilities.has(Capability::PrefixCache);
        let salt = cache_salt(identity, self.options.cache_salt.as_deref()).filter(|_| is_cached);
        let salt: Option<Arc<[u8]>> = salt.map(|salt| Arc::from(&salt[..]));
        for request in &mut self.requests {
            request.cache_salt.clone_from(&salt);
            request.max_unread_bytes = Some(limits.max_unread_bytes);
        }
    }
}

/// Renders and tokenizes a chat.
pub(super) fn prepare_chat(
    request: ChatRequest,
    model: Arc<ServedModel>,
    watch: &mut StageWatch<'_>,
) -> Result<Prepared, ApiError> {
    let prompt = render(&model, &request.messages, true)?;
    watch.end(|stages| &stages.template);
    let ids = encode(&model, &prompt, SpecialTokens::Omit, "messages")?;
    watch.end(|stages| &stages.tokenize);
    finish(vec![ids], Vec::new(), request.options, model.tokenizer.leading_space(), model, "messages")
}

/// The text that a chat is to the model.
pub(super) fn render(
    model: &ServedModel,
    messages: &[Value],
    add_generation_prompt: bool,
) -> Result<String, ApiError> {
    let Some(template) = &model.template else {
        let message = format!("The model {:?} has no chat template; use /v1/completions.", model.id);
        return Err(ApiError::unsupported("messages", message));
    };
    let eos = model.facts.eos_token_ids.first().copied();
    template
        .render(RenderInput {
            messages,
            add_generation_prompt,
            bos_token: &token_text(&model.tokenizer, model.facts.bos_token_id),
            eos_token: &token_text(&model.tokenizer, eos),
        })
        .map_err(template_error)
}

/// Tokenizes the prompts of a completion.
pub(super) fn prepare_completion(
    request: CompletionRequest,
    model: Arc<ServedModel>,
    watch: &mut StageWatch<'_>,
) -> Result<Prepared, ApiError> {
    let mut prompts = Vec::with_capacity(request.prompts.len());
    let mut echoes = Vec::new();
    for prompt in request.prompts {
        let (ids, text) = match prompt {
            Prompt::Text(text) => (encode(&model, &text, SpecialTokens::Add, "prompt")?, text),
            Prompt::Ids(ids) if request.echo => {
                let text = model.tokenizer.vocabulary().text(&ids);
                (ids, text)
            }
            Prompt::Ids(ids) => (ids, String::new()),
        };
        prompts.push(ids);
        if request.echo {
            echoes.push(text.into());
        }
    }
    watch.end(|stages| &stages.tokenize);
    finish(prompts, echoes, request.options, LeadingSpace::Keep, model, "prompt")
}

fn token_text(tokenizer: &Tokenizer, id: Option<u32>) -> String {
    let bytes = id.map_or(&[][..], |id| tokenizer.vocabulary().bytes(id));
    String::from_utf8_lossy(bytes).into_owned()
}

fn template_error(error: TemplateError) -> ApiError {
    match error {
        TemplateError::Compile(_) => ApiError::Internal(error.to_string()),
        _ => ApiError::invalid("messages", error.to_string()),
    }
}

/// The ids of a text that may fit the context.
pub(super) fn encode(
    model: &ServedModel,
    text: &str,
    special_tokens: SpecialTokens,
    param: &'static str,
) -> Result<Vec<u32>, ApiError> {
    let least = model.tokenizer.min_tokens(text.len());
    if least >= model.facts.max_model_len as usize {
        return Err(too_long(model, &format!("at least {least}"), param));
    }
    model.tokenizer.encode(text, special_tokens).map_err(|error| match error {
        TokenizerError::OutsideVocabulary { .. } => ApiError::invalid(param, error.to_string()),
        _ => ApiError::Internal(error.to_string()),
    })
}

fn too_long(model: &ServedModel, length: &str, param: &'static str) -> ApiError {
    let most = model.facts.max_model_len;
    let message = format!(
        "The prompt has {length} tokens, but the context holds {most} tokens, prompt and answer together; shorten the prompt."
    );
    ApiError::ContextLength { message, param: Some(param.into()) }
}

fn finish(
    prompts: Vec<Vec<u32>>,
    echoes: Vec<Arc<str>>,
    options: Options,
    leading: LeadingSpace,
    model: Arc<ServedModel>,
    param: &'static str,
) -> Result<Prepared, ApiError> {
    let echoed_logprobs = options.logprobs.filter(|_| !echoes.is_empty());
    let like = GenerateRequest {
        samples: options.samples,
        sampling: options.sampling,
        token_rules: token_rules(&options.token_rules, &model)?,
        top_logprobs: options.engine_logprobs(),
        prompt_top_logprobs: options.prompt_logprobs.max(echoed_logprobs),
        priority: options.priority,
        grammar: options.format.as_ref().map(|format| grammar(format, &model)).transpose()?,
        ..GenerateRequest::default()
    };
    let requests = prompts
        .into_iter()
        .map(|ids| generate_request(ids, &like, &options, &model, param))
        .collect::<Result<_, ApiError>>()?;
    let mut ending_ids = options.stop_token_ids.clone();
    if !options.ignore_eos {
        ending_ids.extend_from_slice(&model.facts.eos_token_ids);
    }
    let rules = Arc::new(SampleRules {
        tokenizer: Arc::clone(&model.tokenizer),
        stops: StopSet::new(&options.stops),
        include_stop: options.include_stop,
        ending_ids,
        min_tokens: options.min_tokens,
        leading,
        logprobs: options.engine_logprobs().is_some(),
    });
    let leading = model.tokenizer.leading_space();
    Ok(Prepared { requests, rules, echoes, leading, options, model })
}

fn grammar(format: &RequestedFormat, model: &ServedModel) -> Result<Arc<str>, ApiError> {
    let compiled = model.grammars.compile(&format.constraint);
    compiled.map_err(|error| ApiError::invalid(format.param.clone(), error.to_string()))
}

/// Bad words as ids, each as it stands at the start of a word and inside one.
fn token_rules(requested: &RequestedRules, model: &ServedModel) -> Result<TokenRules, ApiError> {
    let mut rules = requested.rules.clone();
    let limits = &model.facts.limits;
    for word in &requested.bad_words {
        for text in [word.clone(), format!(" {}", word.trim_start())] {
            let ids = encode(model, &text, SpecialTokens::Omit, "bad_words")?;
            if ids.len() > limits.max_bad_word_tokens as usize {
                let message =
                    format!("A bad word may have {} tokens; {word:?} has more.", limits.max_bad_word_tokens);
                return Err(ApiError::invalid("bad_words", message));
            }
            if !ids.is_empty() && !rules.bad_words.contains(&ids) {
                rules.bad_words.push(ids);
            }
        }
    }
    Ok(rules)
}

fn generate_request(
    ids: Vec<u32>,
    like: &GenerateRequest,
    options: &Options,
    model: &ServedModel,
    param: &'static str,
) -> Result<GenerateRequest, ApiError> {
    if ids.is_empty() {
        return Err(ApiError::invalid(param, "The prompt has no tokens; at least one is needed."));
    }
    let room = u64::from(model.facts.max_model_len).saturating_sub(ids.len() as u64);
    if room == 0 {
        return Err(too_long(model, &ids.len().to_string(), param));
    }
    // More than there is room for is an upper bound, not a demand. The engine generates at least
    // one token; who asked for none is not shown it.
    let max_tokens = options.max_tokens.map_or(room, |most| most.clamp(1, room)) as u32;
    let request = GenerateRequest {
        prompt_ids: ids.into(),
        stopping: Stopping {
            max_tokens: Some(max_tokens),
            min_tokens: options.min_tokens.min(max_tokens),
            stop_token_ids: options.stop_token_ids.clone(),
            ignore_eos: options.ignore_eos,
        },
        ..like.clone()
    };
    let rules = &request.token_rules;
    let rule_ids = 2 * rules.logit_bias.len()
        + rules.allowed_token_ids.as_ref().map_or(0, Vec::len)
        + rules.bad_words.iter().map(|word| word.len() + 4).sum::<usize>();
    let grammar_bytes = request.grammar.as_ref().map_or(0, |grammar| grammar.len()) as u64;
    let bytes = (request.prompt_ids.len() + rule_ids) as u64 * 4 + grammar_bytes + SUBMIT_OVERHEAD_BYTES;
    if bytes > u64::from(model.facts.limits.max_submit_bytes) {
        return Err(too_long(model, &request.prompt_ids.len().to_string(), param));
    }
    Ok(request)
}

/// Room in an encoded Submit for everything beside the prompt.
const SUBMIT_OVERHEAD_BYTES: u64 = 4096;
