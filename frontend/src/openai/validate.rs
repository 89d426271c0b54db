//! Request objects to checked requests. Bounds of the model and the engine are checked here too,
//! so that whatever passes can be computed.

use serde_json::{Map, Value};

use super::fields::Fields;
use super::format::{RequestedFormat, format};
use super::sampling::{RequestedRules, priority, sampling, token_rules};
use super::unsupported;
use crate::chat::normalize_messages;
use crate::config::Limits;
use crate::engine::types::{Capability, ModelFacts, Sampling};
use crate::error::ApiError;
use crate::model::ServedModel;

/// What OpenAI's completions API does when `max_tokens` is absent.
const DEFAULT_COMPLETION_TOKENS: u64 = 16;

/// OpenAI's bound on `top_logprobs` and on `logprobs` of completions.
const MAX_LOGPROBS: u32 = 20;

/// How the answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    Whole,
    Stream {
        /// Whether the stream ends with a chunk that holds the usage.
        include_usage: bool,
    },
}

/// What both endpoints share.
#[derive(Debug, Clone)]
pub(super) struct Options {
    /// Answers to each prompt that are generated (`best_of`).
    pub samples: u32,
    /// Answers to each prompt that are given out (`n`): those with the best logprobs.
    pub kept: u32,
    pub delivery: Delivery,
    pub return_token_ids: bool,
    pub stops: Vec<String>,
    pub include_stop: bool,
    pub sampling: Sampling,
    pub token_rules: RequestedRules,
    pub priority: Option<u32>,
    pub cache_salt: Option<String>,
    pub format: Option<RequestedFormat>,
    /// Alternatives per prompt token; `None`: no logprobs of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Absent: as many as there is room for. 0 only where the prompt is echoed.
    pub max_tokens: Option<u64>,
    pub min_tokens: u32,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    /// Alternatives per token; `None`: no logprobs.
    pub logprobs: Option<u32>,
}

impl Options {
    /// What the engine is asked for: also what choosing the best answers takes.
    pub(super) fn engine_logprobs(&self) -> Option<u32> {
        self.logprobs.or((self.samples > self.kept).then_some(0))
    }

    /// Whether only the prompt is asked for.
    pub(super) fn generates_nothing(&self) -> bool {
        self.max_tokens == Some(0)
    }
}

impl Delivery {
    pub(super) fn includes_usage(self) -> bool {
        self == Self::Stream { include_usage: true }
    }
}

/// A chat completion.
#[derive(Debug)]
pub(super) struct ChatRequest {
    pub options: Options,
    pub messages: Vec<Value>,
}

/// A completion of one or more prompts.
#[derive(Debug)]
pub(super) struct CompletionRequest {
    pub options: Options,
    pub prompts: Vec<Prompt>,
    /// Whether each answer begins with its prompt.
    pub echo: bool,
}

/// One prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Checks a body of `/v1/chat/completions`.
pub(super) fn chat_request(
    object: Map<String, Value>,
    model: &ServedModel,
    limits: &Limits,
) -> Result<ChatRequest, ApiError> {
    let mut fields = Fields::new(object);
    check_model(&mut fields, model)?;
    unsupported::refuse_in_chat(&fields)?;
    let messages = messages(&mut fields)?;
    let newer = max_tokens(&mut fields, "max_completion_tokens", 1)?;
    let older = max_tokens(&mut fields, "max_tokens", 1)?;
    let wants = fields.flag("logprobs")?;
    let top = logprob_count(&mut fields, "top_logprobs", &model.facts)?;
    if top.is_some() && !wants {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true."));
    }
    let logprobs = wants.then(|| top.unwrap_or(0));
    let options = options(&mut fields, newer.or(older), logprobs, model, limits)?;
    Ok(ChatRequest { options, messages })
}

pub(super) fn messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let Some(messages) = fields.take("messages") else {
        return Err(ApiError::invalid("messages", "messages is missing: a list of messages is needed."));
    };
    Ok(normalize_messages(messages)?)
}

/// Checks a body of `/v1/completions`.
pub(super) fn completion_request(
    object: Map<String, Value>,
    model: &ServedModel,
    limits: &Limits,
) -> Result<CompletionRequest, ApiError> {
    let mut fields = Fields::new(object);
    check_model(&mut fields, model)?;
    unsupported::refuse_in_completions(&fields)?;
    let prompts = prompts(&mut fields, model.facts.vocab_size, limits)?;
    let echo = fields.flag("echo")?;
    let fewest = i64::from(!echo);
    let max_tokens = max_tokens(&mut fields, "max_tokens", fewest)?.unwrap_or(DEFAULT_COMPLETION_TOKENS);
    let logprobs = logprob_count(&mut fields, "logprobs", &model.facts)?;
    if echo && logprobs.is_some() && !model.facts.capabilities.has(Capability::PromptLogprobs) {
        let message = "echo with logprobs is not offered by this engine; ask for one of them.";
        return Err(ApiError::unsupported("logprobs", message));
    }
    let mut options = options(&mut fields, Some(max_tokens), logprobs, model, limits)?;
    best_of(&mut fields, &mut options, model, limits)?;
    let rows = prompts.len() as u64 * u64::from(options.samples);
    let engine = &model.facts.limits;
    let most = u64::from(engine.max_num_seqs) + u64::from(engine.max_waiting);
    if rows > most {
        let message =
            format!("prompt and n ask for {rows} answers at once; the engine holds at most {most}.");
        return Err(ApiError::invalid("prompt", message));
    }
    Ok(CompletionRequest { options, prompts, echo })
}

/// More answers may be generated than are given out.
fn best_of(
    fields: &mut Fields,
    options: &mut Options,
    model: &ServedModel,
    limits: &Limits,
) -> Result<(), ApiError> {
    let most = limits.max_samples.min(model.facts.limits.max_samples);
    let Some(best_of) = fields.integer("best_of", 1..=i64::from(most))? else {
        return Ok(());
    };
    let best_of = best_of as u32;
    if best_of < options.kept {
        return Err(ApiError::invalid("best_of", "best_of must be at least n."));
    }
    if best_of > options.kept && options.delivery != Delivery::Whole {
        return Err(ApiError::invalid("best_of", "best_of above n cannot be streamed; leave out stream."));
    }
    if best_of > options.kept && !model.facts.capabilities.has(Capability::Logprobs) {
        let message = "best_of above n needs logprobs, which this engine does not offer.";
        return Err(ApiError::unsupported("best_of", message));
    }
    options.samples = best_of;
    Ok(())
}

pub(super) fn check_model(fields: &mut Fields, served: &ServedModel) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(name) if name == served.id => Ok(()),
        Some(name) => Err(ApiError::model_not_found(&name, &served.id)),
        None => {
            Err(ApiError::invalid("model", format!("model is missing; this server has {:?}.", served.id)))
        }
    }
}

fn options(
    fields: &mut Fields,
    max_tokens: Option<u64>,
    logprobs: Option<u32>,
    model: &ServedModel,
    limits: &Limits,
) -> Result<Options, ApiError> {
    let facts = &model.facts;
    if logprobs.is_some() && !facts.capabilities.has(Capability::Logprobs) {
        return Err(ApiError::unsupported("logprobs", "logprobs are not offered by this engine."));
    }
    let min_tokens = fields.integer("min_tokens", 0..=i64::from(u32::MAX))?.unwrap_or(0) as u32;
    if max_tokens.is_some_and(|most| u64::from(min_tokens) > most) {
        return Err(ApiError::invalid("min_tokens", "min_tokens must not exceed max_tokens."));
    }
    let delivery = delivery(fields)?;
    let most_samples = limits.max_samples.min(facts.limits.max_samples);
    let samples = fields.integer("n", 1..=i64::from(most_samples))?.unwrap_or(1) as u32;
    Ok(Options {
        samples,
        kept: samples,
        delivery,
        return_token_ids: fields.flag("return_token_ids")?,
        stops: stops(fields, limits)?,
        include_stop: fields.flag("include_stop_str_in_output")?,
        sampling: sampling(fields, facts)?,
        token_rules: token_rules(fields, facts, limits)?,
        priority: priority(fields, facts)?,
        cache_salt: fields.string("cache_salt")?,
        format: format(fields, facts)?,
        prompt_logprobs: prompt_logprobs(fields, facts, delivery)?,
        max_tokens,
        min_tokens,
        stop_token_ids: stop_token_ids(fields, facts)?,
        ignore_eos: fields.flag("ignore_eos")?,
        logprobs,
    })
}

fn max_tokens(fields: &mut Fields, name: &'static str, fewest: i64) -> Result<Option<u64>, ApiError> {
    Ok(fields.integer(name, fewest..=i64::MAX)?.map(|count| count as u64))
}

fn logprob_count(
    fields: &mut Fields,
    name: &'static str,
    facts: &ModelFacts,
) -> Result<Option<u32>, ApiError> {
    let most = MAX_LOGPROBS.min(facts.limits.max_top_logprobs);
    Ok(fields.integer(name, 0..=i64::from(most))?.map(|count| count as u32))
}

/// Not with a stream, whose chunks have no place for them.
fn prompt_logprobs(
    fields: &mut Fields,
    facts: &ModelFacts,
    delivery: Delivery,
) -> Result<Option<u32>, ApiError> {
    let name = "prompt_logprobs";
    let count = logprob_count(fields, name, facts)?;
    if count.is_some() && !facts.capabilities.has(Capability::PromptLogprobs) {
        return Err(ApiError::unsupported(name, "prompt_logprobs is not offered by this engine."));
    }
    if count.is_some() && delivery != Delivery::Whole {
        return Err(ApiError::invalid(name, "prompt_logprobs cannot be streamed; leave out stream."));
    }
    Ok(count)
}

fn delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream")?;
    let include_usage = match fields.take("stream_options") {
        None => false,
        Some(Value::Object(_)) if !stream => {
            return Err(ApiError::invalid("stream_options", "stream_options needs stream to be true."));
        }
        Some(Value::Object(object)) => Fields::new(object).flag("include_usage")?,
        Some(_) => {
            return Err(ApiError::invalid("stream_options", "stream_options must be an object."));
        }
    };
    Ok(if stream { Delivery::Stream { include_usage } } else { Delivery::Whole })
}

fn stops(fields: &mut Fields, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("stop", message));
    let items = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(item) => vec![item],
    };
    if items.len() > limits.max_stop_strings {
        return invalid(format!(
            "stop holds {} strings; at most {} are allowed.",
            items.len(),
            limits.max_stop_strings
        ));
    }
    let mut stops = Vec::with_capacity(items.len());
    for item in items {
        match item {
            Value::String(stop) if stop.is_empty() => {
                return invalid("stop must not hold an empty string.".to_owned());
            }
            Value::String(stop) if stop.len() > limits.max_stop_bytes => {
                return invalid(format!("A stop string has at most {} bytes.", limits.max_stop_bytes));
            }
            Value::String(stop) => stops.push(stop),
            _ => return invalid("stop must be a string or a list of strings.".to_owned()),
        }
    }
    Ok(stops)
}

fn stop_token_ids(fields: &mut Fields, facts: &ModelFacts) -> Result<Vec<u32>, ApiError> {
    let most = facts.limits.max_stop_token_ids as usize;
    match fields.take("stop_token_ids") {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() > most => {
            let message = format!("stop_token_ids holds {} ids; at most {most} are allowed.", items.len());
            Err(ApiError::invalid("stop_token_ids", message))
        }
        Some(Value::Array(items)) => token_ids("stop_token_ids", &items, facts.vocab_size),
        Some(_) => Err(ApiError::invalid("stop_token_ids", "stop_token_ids must be a list of token ids.")),
    }
}

pub(super) fn token_ids(param: &'static str, items: &[Value], vocab_size: u32) -> Result<Vec<u32>, ApiError> {
    let id = |item: &Value| item.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < vocab_size);
    items.iter().map(id).collect::<Option<_>>().ok_or_else(|| {
        ApiError::invalid(
            param,
            format!("{param} must hold token ids from 0 to {}.", vocab_size.saturating_sub(1)),
        )
    })
}

/// A string, a list of strings, a list of ids, or a list of lists of ids.
fn prompts(fields: &mut Fields, vocab_size: u32, limits: &Limits) -> Result<Vec<Prompt>, ApiError> {
    let invalid = |message: &str| ApiError::invalid("prompt", message);
    let items = match fields.take("prompt") {
        None => {
            return Err(invalid("prompt is missing: a string, a list of strings or token ids are needed."));
        }
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(items)) => items,
        Some(_) => {
            return Err(invalid("prompt must be a string, a list of strings, or token ids."));
        }
    };
    match items.first() {
        None => return Err(invalid("prompt must not be an empty list.")),
        Some(Value::Number(_)) => {
            return Ok(vec![Prompt::Ids(token_ids("prompt", &items, vocab_size)?)]);
        }
        _ => {}
    }
    if items.len() > limits.max_prompts {
        let message =
            format!("prompt holds {} prompts; at most {} are allowed.", items.len(), limits.max_prompts);
        return Err(invalid(&message));
    }
    items
        .into_iter()
        .map(|item| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(ids) if ids.is_empty() => {
                Err(invalid("prompt must not hold an empty list of token ids."))
            }
            Value::Array(ids) => Ok(Prompt::Ids(token_ids("prompt", &ids, vocab_size)?)),
            _ => Err(invalid("prompt must hold strings alone or lists of token ids alone.")),
        })
        .collect()
}
