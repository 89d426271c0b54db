//! The JSON of answers, field by field as OpenAI documents it; fields of our own are marked.

use serde::{Serialize, Serializer};

/// Token counts.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
}

/// What a document says of its usage.
#[derive(Debug, Clone, Copy)]
pub(super) enum UsageField<'a> {
    /// A chunk of a stream that does not report usage.
    Absent,
    /// A chunk of a stream that will.
    Later,
    Counts(&'a Usage),
}

impl UsageField<'_> {
    /// Of a chunk, by whether its stream reports usage.
    pub(super) fn of_chunk(include_usage: bool) -> Self {
        if include_usage { Self::Later } else { Self::Absent }
    }

    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

impl Serialize for UsageField<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Absent | Self::Later => serializer.serialize_none(),
            Self::Counts(usage) => usage.serialize(serializer),
        }
    }
}

#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub(super) struct PromptTokensDetails {
    pub cached_tokens: u64,
}

/// What every answer and every chunk of one request have in common.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub id: String,
    pub created: u64,
    pub model: String,
}

/// An answer in one piece, or one chunk of a stream.
#[derive(Debug, Serialize)]
pub(super) struct Document<'a, Choice> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub choices: &'a [Choice],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub usage: UsageField<'a>,
    /// Ours, with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// Ours, with `prompt_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatChoice<'a> {
    pub index: u32,
    pub message: ChatMessage<'a>,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    /// Ours, with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatMessage<'a> {
    pub role: &'static str,
    pub content: &'a str,
    pub refusal: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatChunkChoice<'a> {
    pub index: u32,
    pub delta: ChatDelta<'a>,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
    /// Ours, with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprobs>,
    pub refusal: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatTokenLogprobs {
    pub token: String,
    pub logprob: f32,
    pub bytes: Option<Vec<u8>>,
    pub top_logprobs: Vec<ChatTokenLogprob>,
}

#[derive(Debug, Serialize)]
pub(super) struct ChatTokenLogprob {
    pub token: String,
    pub logprob: f32,
    /// Null for tokens that are not text.
    pub bytes: Option<Vec<u8>>,
}

/// A choice of a completion; the same in chunks.
#[derive(Debug, Serialize)]
pub(super) struct CompletionChoice<'a> {
    pub index: u32,
    pub text: &'a str,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    /// Ours, with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
    /// Ours, with `return_token_ids`; in a stream, with the choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// Ours, with `prompt_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
}

/// Four lists of the same length.
#[derive(Debug, Default, Serialize)]
pub(super) struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// Null for the first token of an echoed prompt, as in `top_logprobs`.
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    pub text_offset: Vec<usize>,
}

/// An object from token to logprob, best first.
#[derive(Debug)]
pub(super) struct TopLogprobs(pub Vec<(String, f32)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// An object from token id to logprob: the prompt's own token first, then the likeliest.
#[derive(Debug)]
pub(super) struct PromptTokenLogprobs(pub Vec<(u32, PromptTokenLogprob)>);

impl Serialize for PromptTokenLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, logprob)| (id, logprob)))
    }
}

#[derive(Debug, Serialize)]
pub(super) struct PromptTokenLogprob {
    pub logprob: f32,
    pub rank: u32,
    pub decoded_token: String,
}

/// An entry of `/v1/models`.
#[derive(Debug, Serialize)]
pub(super) struct Model<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Ours: prompt and answer together, in tokens.
    pub max_model_len: u32,
}

#[derive(Debug, Serialize)]
pub(super) struct ModelList<'a> {
    pub object: &'static str,
    pub data: [Model<'a>; 1],
}
