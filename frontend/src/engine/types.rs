//! What the rest of the frontend knows of an engine: plain values, no protobuf.

use std::sync::Arc;
use std::time::Duration;

/// One request to generate `samples` answers to one prompt.
#[derive(Debug, Clone, Default)]
pub struct GenerateRequest {
    /// Token ids of the prompt; at least one.
    pub prompt_ids: Arc<[u32]>,
    /// How many answers; each becomes one row of the engine.
    pub samples: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// When a row ends inside the engine.
    pub stopping: Stopping,
    /// Which tokens may be chosen, and which are favoured.
    pub token_rules: TokenRules,
    /// Alternatives per token beside the chosen one's logprob; `None`: no logprobs at all.
    pub top_logprobs: Option<u32>,
    /// Alternatives per prompt token beside its own logprob; `None`: no logprobs of the prompt.
    /// They come with the first sample.
    pub prompt_top_logprobs: Option<u32>,
    /// What the answer must look like, as [`crate::grammar`] writes it; `None`: free text.
    pub grammar: Option<Arc<str>>,
    /// Higher runs first; absent is 0.
    pub priority: Option<u32>,
    /// How long the first token may be waited for.
    pub deadline: Option<Duration>,
    /// Requests share cached prefixes only with those of the same salt.
    pub cache_salt: Option<Arc<[u8]>>,
    /// Bytes of the answers that may wait for their reader; not the engine's concern. `None`: any.
    pub max_unread_bytes: Option<usize>,
}

/// Sampling parameters; `None` means that the engine's rule for absence holds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; absent is 1.
    pub temperature: Option<f32>,
    /// Keep the k most likely ids; absent or 0 keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set whose probability reaches p; absent is 1.
    pub top_p: Option<f32>,
    /// Fixes the random numbers; absent: drawn at admission.
    pub seed: Option<u64>,
    /// Drop ids less likely than this share of the likeliest one; absent is 0.
    pub min_p: Option<f32>,
    /// Keep the ids of most typical information until their probability reaches this; absent is 1.
    pub typical_p: Option<f32>,
    /// Divides positive and multiplies negative logits of ids in prompt or answer; absent is 1.
    pub repetition_penalty: Option<f32>,
    /// Subtracted for each time that an id occurs in the answer; absent is 0.
    pub frequency_penalty: Option<f32>,
    /// Subtracted once if an id occurs in the answer; absent is 0.
    pub presence_penalty: Option<f32>,
}

/// Rules on single token ids.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenRules {
    /// What is added to the logit of an id; each id stands here once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these may be chosen; absent: all.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Sequences that the answer must not contain.
    pub bad_words: Vec<Vec<u32>>,
}

/// When a row ends inside the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stopping {
    /// New tokens at most; absent: as many as the context has room for.
    pub max_tokens: Option<u32>,
    /// No end-of-text or stop id before this many new tokens.
    pub min_tokens: u32,
    /// Ids that end the row, besides the model's end-of-text ids.
    pub stop_token_ids: Vec<u32>,
    /// End-of-text ids do not end the row.
    pub ignore_eos: bool,
}

/// Logprobs of one generated token, natural logarithm, of the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Logprob of one token of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLogprobs {
    /// Of the token itself.
    pub chosen: f32,
    /// Its place among all ids; 1 is the most likely.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Sent once per sample, with or before its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// Tokens of the prompt as the engine counted them.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV was reused.
    pub cached_tokens: u32,
    /// From acceptance to the first scheduled chunk.
    pub queue: Duration,
    /// From then to the first token.
    pub prefill: Duration,
}

/// Why the engine ended a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineFinish {
    /// An end-of-text or stop id, which is also the last token.
    Stop {
        /// The id.
        token_id: u32,
    },
    /// `max_tokens` or the end of the context.
    Length,
    /// Aborted by us.
    Cancelled,
    /// The row failed after it was accepted.
    Error(EngineError),
}

/// Why the engine refused or failed a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineErrorCode {
    /// The request itself; never succeeds.
    InvalidArgument,
    /// The prompt does not fit the context.
    ContextLength,
    /// Could never fit the KV memory.
    Capacity,
    /// Queue full; try later.
    Overloaded,
    /// The engine takes no more requests.
    Draining,
    /// The model computed NaN or infinity for this row.
    NonFinite,
    /// A bug or a device fault in the engine.
    Internal,
    /// No engine is ready.
    Unavailable,
    /// The engine was lost while the request was in it.
    Lost,
    /// Found here: the client leaves too much of its answer unread.
    Unread,
}

/// An engine's failure, in one sentence for the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct EngineError {
    /// What kind.
    pub code: EngineErrorCode,
    /// One sentence for the caller.
    pub message: String,
}

/// What is new for one sample since it was last read. Deltas merge: reading late gives one
/// larger delta, never a lost or reordered token.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SampleDelta {
    /// New token ids, in order.
    pub token_ids: Vec<u32>,
    /// One per new token when logprobs were asked for, else empty.
    pub logprobs: Vec<TokenLogprobs>,
    /// Of the prompt's tokens from the second on, in order, ahead of the first new token. Empty
    /// unless asked for and in all samples but the first.
    pub prompt_logprobs: Vec<PromptLogprobs>,
    /// Present in the first delta of a sample that was scheduled.
    pub started: Option<Started>,
    /// Present in the last delta.
    pub finish: Option<EngineFinish>,
}

impl SampleDelta {
    /// About what it takes in memory.
    pub(super) fn size_bytes(&self) -> usize {
        const PAIR: usize = size_of::<(u32, f32)>();
        let new = self.logprobs.iter().map(|token| size_of::<TokenLogprobs>() + PAIR * token.top.len());
        let old =
            self.prompt_logprobs.iter().map(|token| size_of::<PromptLogprobs>() + PAIR * token.top.len());
        size_of_val(&self.token_ids[..]) + new.sum::<usize>() + old.sum::<usize>()
    }
}

/// Facts of a model as `Describe` gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFacts {
    /// The engine's name for the model.
    pub name: String,
    /// Such as `llama`.
    pub architecture: String,
    /// As stored, such as `Q4_1`.
    pub weight_format: String,
    /// Count of weights.
    pub num_parameters: u64,
    /// Rows of the output head; every id is below it.
    pub vocab_size: u32,
    /// Prompt and answer together, in tokens.
    pub max_model_len: u32,
    /// Beginning-of-text id.
    pub bos_token_id: Option<u32>,
    /// End-of-text ids.
    pub eos_token_ids: Vec<u32>,
    /// The model's recommendation for requests that are silent.
    pub default_sampling: Sampling,
    /// The engine's runner, such as `reference`.
    pub runner: String,
    /// Version of the engine package.
    pub engine_version: String,
    /// Limits on requests.
    pub limits: EngineLimits,
    /// What may be asked for.
    pub capabilities: Capabilities,
}

/// Something that not every engine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// Logprobs of new tokens.
    Logprobs,
    /// The same answer alone and in any batch.
    BatchInvariant,
    /// Sampling parameters beyond temperature, top-k, top-p and seed, and rules on tokens.
    SamplingExtra,
    /// Logprobs of the prompt.
    PromptLogprobs,
    /// Answers that follow a grammar.
    Grammar,
    /// Priorities and deadlines.
    Priority,
    /// Cached prefixes, with salts.
    PrefixCache,
}

/// What an engine can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities(u32);

impl Capabilities {
    /// Whether the engine can do it.
    #[must_use]
    pub fn has(self, capability: Capability) -> bool {
        self.0 & (1 << capability as u32) != 0
    }
}

impl FromIterator<Capability> for Capabilities {
    fn from_iter<T: IntoIterator<Item = Capability>>(capabilities: T) -> Self {
        Self(capabilities.into_iter().fold(0, |bits, capability| bits | 1 << capability as u32))
    }
}

/// Limits that the engine announces; checked in the frontend before anything is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineLimits {
    /// Bytes of one encoded Submit.
    pub max_submit_bytes: u32,
    /// Rows that run at once.
    pub max_num_seqs: u32,
    /// Rows that may wait.
    pub max_waiting: u32,
    /// Samples in one request.
    pub max_samples: u32,
    /// Alternatives per token.
    pub max_top_logprobs: u32,
    /// Stop ids in one request.
    pub max_stop_token_ids: u32,
    /// Ids with a bias.
    pub max_logit_bias: u32,
    /// Ids that a request may list as allowed.
    pub max_allowed_token_ids: u32,
    /// Sequences that a request may forbid.
    pub max_bad_words: u32,
    /// Ids in one of them.
    pub max_bad_word_tokens: u32,
    /// Bytes of a grammar.
    pub max_grammar_bytes: u32,
    /// Bytes of a cache salt.
    pub max_cache_salt_bytes: u32,
}

/// The engine's state after its last reported step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Rows being computed.
    pub running: u32,
    /// Rows waiting.
    pub waiting: u32,
    /// KV blocks in use.
    pub kv_blocks_used: u32,
    /// All KV blocks.
    pub kv_blocks_total: u32,
    /// Rows of the last step.
    pub step_rows: u32,
    /// Tokens computed by the last step.
    pub step_tokens: u32,
    /// Host time of the last step, in ns.
    pub step_host_ns: u64,
    /// Forward and sampling time of the last step, in ns.
    pub step_device_ns: u64,
    /// Preemptions since the engine started.
    pub preemptions_total: u64,
    /// Prompt tokens computed since the engine started.
    pub prompt_tokens_total: u64,
    /// Tokens generated since the engine started.
    pub generation_tokens_total: u64,
}
