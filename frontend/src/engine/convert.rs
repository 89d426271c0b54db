//! Requests to protocol messages, and what an engine says of itself to plain values.
//!
//! Total in both directions: the engine is not trusted, so every length, id and range is checked
//! on arrival. Keeps no state; steps are decoded in [`super::frame`].

use bytes::{BufMut, Bytes, BytesMut};

use super::check::check_request;
use super::proto;
use super::types::{
    Capabilities, Capability, EngineError, EngineErrorCode, EngineLimits, GenerateRequest, ModelFacts,
    Sampling, Stopping, TokenRules,
};

/// The protocol that this frontend speaks. An engine of another number is refused.
pub(super) const PROTOCOL: u32 = 1;
/// The one size limit of the protocol, for both directions and both ends.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Bytes of one tokenizer file at most: the largest vocabularies need about 35 MB.
const MAX_TOKENIZER_FILE_BYTES: u64 = 512 * 1024 * 1024;
const MAX_TOKENIZER_FILES: usize = 16;
/// Ids are u32 and one more than the largest must fit too.
const MAX_VOCAB_SIZE: u32 = 1 << 30;

/// What an engine announces.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Facts of its model.
    pub facts: ModelFacts,
    /// Files that can be fetched.
    pub tokenizer_files: Vec<TokenizerFile>,
}

/// A file of the tokenizer bundle, as announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerFile {
    /// Such as `tokenizer.json`.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Its hash.
    pub sha256: [u8; 32],
}

/// A column of little-endian u32.
pub(super) fn column_of(values: impl ExactSizeIterator<Item = u32>) -> Bytes {
    let mut column = BytesMut::with_capacity(values.len() * 4);
    for value in values {
        column.put_u32_le(value);
    }
    column.freeze()
}

/// The message for a request, without handles. Refuses what the engine has said it cannot do.
pub(super) fn submit(request: &GenerateRequest, facts: &ModelFacts) -> Result<proto::Submit, EngineError> {
    check_request(request, facts)?;
    let logprobs = (request.top_logprobs.is_some() || request.prompt_top_logprobs.is_some()).then_some(
        proto::LogprobRequest { top_n: request.top_logprobs, prompt_top_n: request.prompt_top_logprobs },
    );
    Ok(proto::Submit {
        handles: Vec::new(),
        prompt_ids: column_of(request.prompt_ids.iter().copied()),
        sampling: Some(sampling(&request.sampling, &request.token_rules)),
        stopping: Some(stopping(&request.stopping)),
        logprobs,
        grammar: request.grammar.as_deref().map(|grammar| proto::Grammar { llguidance: grammar.to_owned() }),
        priority: request.priority,
        // A deadline that is about to pass is not one that has passed.
        deadline_ms: request.deadline.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)),
        cache_salt: request.cache_salt.as_deref().map(Bytes::copy_from_slice),
    })
}

/// Not everything that asks for logprobs asks for those of new tokens: the engine gives them whenever
/// the message is there, so the row that reads them must expect them.
pub(super) fn expected_top_logprobs(request: &GenerateRequest) -> Option<u32> {
    request.top_logprobs.or(request.prompt_top_logprobs.map(|_| 0))
}

/// Refuses a message that is larger than the engine takes.
pub(super) fn check_submit_size(encoded_bytes: usize, limits: &EngineLimits) -> Result<(), EngineError> {
    if encoded_bytes <= limits.max_submit_bytes as usize {
        return Ok(());
    }
    Err(EngineError {
        code: EngineErrorCode::InvalidArgument,
        message: format!(
            "The request takes {encoded_bytes} bytes on the way to the engine, which accepts {}; shorten the prompt.",
            limits.max_submit_bytes
        ),
    })
}

fn sampling(sampling: &Sampling, rules: &TokenRules) -> proto::Sampling {
    let bias = &rules.logit_bias;
    proto::Sampling {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        seed: sampling.seed,
        min_p: sampling.min_p,
        typical_p: sampling.typical_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        logit_bias_ids: column_of(bias.iter().map(|(id, _)| *id)),
        logit_bias_values: column_of(bias.iter().map(|(_, value)| value.to_bits())),
        allowed_token_ids: rules.allowed_token_ids.as_ref().map(|ids| column_of(ids.iter().copied())),
        bad_words: rules
            .bad_words
            .iter()
            .map(|ids| proto::TokenSequence { token_ids: column_of(ids.iter().copied()) })
            .collect(),
    }
}

fn stopping(stopping: &Stopping) -> proto::Stopping {
    proto::Stopping {
        max_tokens: stopping.max_tokens,
        min_tokens: (stopping.min_tokens > 0).then_some(stopping.min_tokens),
        stop_token_ids: stopping.stop_token_ids.clone(),
        ignore_eos: stopping.ignore_eos.then_some(true),
    }
}

/// An engine's error. A code that we do not know is an internal error.
pub(super) fn engine_error(error: proto::EngineError) -> EngineError {
    use proto::EngineErrorCode as Wire;
    let code = match error.code() {
        Wire::InvalidArgument => EngineErrorCode::InvalidArgument,
        Wire::ContextLength => EngineErrorCode::ContextLength,
        Wire::Capacity => EngineErrorCode::Capacity,
        Wire::Overloaded | Wire::Deadline => EngineErrorCode::Overloaded,
        Wire::Draining => EngineErrorCode::Draining,
        Wire::NonFinite => EngineErrorCode::NonFinite,
        Wire::Unspecified | Wire::Internal => EngineErrorCode::Internal,
    };
    let message = if error.message.is_empty() {
        "The engine failed the request without saying why.".to_owned()
    } else {
        error.message
    };
    EngineError { code, message }
}

/// What the engine announced, or one sentence on why this frontend cannot work with it.
pub(super) fn description(response: proto::DescribeResponse) -> Result<Description, String> {
    if response.protocol != PROTOCOL {
        return Err(format!(
            "The engine (version {}) speaks protocol {}, but this frontend (version {}) speaks protocol {PROTOCOL}; \
             install the same version of both.",
            if response.engine_version.is_empty() { "unknown" } else { &response.engine_version },
            response.protocol,
            env!("CARGO_PKG_VERSION"),
        ));
    }
    let capabilities = response.capabilities().filter_map(capability).collect::<Capabilities>();
    let model = response.model.ok_or("The engine describes no model.")?;
    let limits = limits(&response.limits.ok_or("The engine announces no limits.")?)?;
    let default_sampling = default_sampling(model.default_sampling.unwrap_or_default())?;
    if model.name.is_empty() {
        return Err("The engine's model has no name.".to_owned());
    }
    if !(1..=MAX_VOCAB_SIZE).contains(&model.vocab_size) {
        return Err(format!(
            "The engine's vocabulary has {} ids; 1 to {MAX_VOCAB_SIZE} is possible.",
            model.vocab_size
        ));
    }
    if model.max_model_len < 2 {
        return Err(format!(
            "The engine's context holds {} tokens; it needs at least 2.",
            model.max_model_len
        ));
    }
    if let Some(id) =
        model.eos_token_ids.iter().chain(&model.bos_token_id).find(|id| **id >= model.vocab_size)
    {
        return Err(format!(
            "The engine names special token {id}, but its ids are below {}.",
            model.vocab_size
        ));
    }
    let facts = ModelFacts {
        name: model.name,
        architecture: model.architecture,
        weight_format: model.weight_format,
        num_parameters: model.num_parameters,
        vocab_size: model.vocab_size,
        max_model_len: model.max_model_len,
        bos_token_id: model.bos_token_id,
        eos_token_ids: model.eos_token_ids,
        default_sampling,
        runner: model.runner,
        engine_version: response.engine_version,
        limits,
        capabilities,
    };
    Ok(Description { facts, tokenizer_files: tokenizer_files(response.tokenizer_files)? })
}

fn limits(limits: &proto::Limits) -> Result<EngineLimits, String> {
    let needed = [
        ("max_submit_bytes", limits.max_submit_bytes),
        ("max_num_seqs", limits.max_num_seqs),
        ("max_samples", limits.max_samples),
    ];
    if let Some((name, _)) = needed.iter().find(|(_, value)| *value == 0) {
        return Err(format!("The engine announces a limit {name} of 0; nothing could be served."));
    }
    Ok(EngineLimits {
        max_submit_bytes: limits.max_submit_bytes,
        max_num_seqs: limits.max_num_seqs,
        max_waiting: limits.max_waiting,
        max_samples: limits.max_samples,
        max_top_logprobs: limits.max_top_logprobs,
        max_stop_token_ids: limits.max_stop_token_ids,
        max_logit_bias: limits.max_logit_bias,
        max_allowed_token_ids: limits.max_allowed_token_ids,
        max_bad_words: limits.max_bad_words,
        max_bad_word_tokens: limits.max_bad_word_tokens,
        max_grammar_bytes: limits.max_grammar_bytes,
        max_cache_salt_bytes: limits.max_cache_salt_bytes,
    })
}

fn capability(bit: proto::Capability) -> Option<Capability> {
    match bit {
        proto::Capability::Unspecified => None,
        proto::Capability::Logprobs => Some(Capability::Logprobs),
        proto::Capability::BatchInvariant => Some(Capability::BatchInvariant),
        proto::Capability::SamplingExtra => Some(Capability::SamplingExtra),
        proto::Capability::PromptLogprobs => Some(Capability::PromptLogprobs),
        proto::Capability::Grammar => Some(Capability::Grammar),
        proto::Capability::Priority => Some(Capability::Priority),
        proto::Capability::PrefixCache => Some(Capability::PrefixCache),
    }
}

fn default_sampling(sampling: proto::Sampling) -> Result<Sampling, String> {
    let temperature_fits = sampling.temperature.is_none_or(|value| (0.0..=100.0).contains(&value));
    let above_zero = |value: Option<f32>, most: f32| value.is_none_or(|value| value > 0.0 && value <= most);
    let shares_fit = above_zero(sampling.top_p, 1.0) && above_zero(sampling.typical_p, 1.0);
    let min_p_fits = sampling.min_p.is_none_or(|value| (0.0..=1.0).contains(&value));
    if !temperature_fits || !shares_fit || !min_p_fits || !above_zero(sampling.repetition_penalty, 2.0) {
        return Err("The engine recommends sampling parameters that are out of range.".to_owned());
    }
    Ok(Sampling {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        seed: sampling.seed,
        min_p: sampling.min_p,
        typical_p: sampling.typical_p,
        repetition_penalty: sampling.repetition_penalty,
        ..Sampling::default()
    })
}

fn tokenizer_files(files: Vec<proto::TokenizerFile>) -> Result<Vec<TokenizerFile>, String> {
    if files.len() > MAX_TOKENIZER_FILES {
        return Err(format!(
            "The engine lists {} tokenizer files; at most {MAX_TOKENIZER_FILES} are taken.",
            files.len()
        ));
    }
    files
        .into_iter()
        .map(|file| {
            if file.size_bytes > MAX_TOKENIZER_FILE_BYTES {
                return Err(format!(
                    "The engine's {} has {} bytes; at most {MAX_TOKENIZER_FILE_BYTES} are taken.",
                    file.name, file.size_bytes
                ));
            }
            let sha256 = <[u8; 32]>::try_from(file.sha256.as_ref())
                .map_err(|_| format!("The engine's hash of {} is not 32 bytes long.", file.name))?;
            Ok(TokenizerFile { name: file.name, size_bytes: file.size_bytes, sha256 })
        })
        .collect()
}
