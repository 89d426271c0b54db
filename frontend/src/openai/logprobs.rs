//! Logprobs in the two shapes that OpenAI's APIs have.

use super::types::{
    ChatLogprobs, ChatTokenLogprob, ChatTokenLogprobs, CompletionLogprobs, PromptTokenLogprob,
    PromptTokenLogprobs, TopLogprobs,
};
use crate::engine::types::{PromptLogprobs, TokenLogprobs};
use crate::text::{TokenEntry, Vocabulary};

/// Stands for minus infinity and NaN, which JSON cannot hold.
const FLOOR: f32 = -9999.0;

/// For chat completions.
pub(super) fn chat_logprobs(entries: &[TokenEntry], vocabulary: &Vocabulary) -> ChatLogprobs {
    let content = entries
        .iter()
        .map(|entry| {
            let (logprob, top) = entry.logprobs.as_ref().map_or((0.0, &[][..]), |own| (own.chosen, &own.top));
            let chosen = chat_token(entry.id, logprob, entry.in_text, vocabulary);
            ChatTokenLogprobs {
                token: chosen.token,
                logprob: chosen.logprob,
                bytes: chosen.bytes,
                top_logprobs: finite(top)
                    .map(|(id, logprob)| chat_token(id, logprob, !vocabulary.is_special(id), vocabulary))
                    .collect(),
            }
        })
        .collect();
    ChatLogprobs { content, refusal: None }
}

/// For completions. The map of a token always holds the chosen one too, as OpenAI's does.
pub(super) fn completion_logprobs(entries: &[TokenEntry], vocabulary: &Vocabulary) -> CompletionLogprobs {
    let mut logprobs = CompletionLogprobs::default();
    for entry in entries {
        let token = token_key(vocabulary.bytes(entry.id));
        let own = entry.logprobs.as_ref();
        logprobs.token_logprobs.push(own.map(|own| sendable(own.chosen)));
        logprobs.top_logprobs.push(own.map(|own| alternatives(own, &token, vocabulary)));
        logprobs.text_offset.push(entry.char_offset);
        logprobs.tokens.push(token);
    }
    logprobs
}

fn alternatives(own: &TokenLogprobs, token: &str, vocabulary: &Vocabulary) -> TopLogprobs {
    let mut top: Vec<(String, f32)> = Vec::with_capacity(own.top.len() + 1);
    let others = finite(&own.top).map(|(id, logprob)| (token_key(vocabulary.bytes(id)), sendable(logprob)));
    for (key, logprob) in others.chain([(token.to_owned(), sendable(own.chosen))]) {
        // Ids with the same text: the likelier one, which comes first.
        if !top.iter().any(|(known, _)| *known == key) {
            top.push((key, logprob));
        }
    }
    TopLogprobs(top)
}

/// Of a prompt, in the form that other servers use: by position, an object from token ids; null
/// for the first, of which nothing is known.
pub(super) fn prompt_logprobs(
    ids: &[u32],
    scores: &[PromptLogprobs],
    top_n: u32,
    vocabulary: &Vocabulary,
) -> Vec<Option<PromptTokenLogprobs>> {
    let of_token = |(&id, score): (&u32, &PromptLogprobs)| {
        let top = finite(&score.top).take(top_n as usize).zip(1..);
        let mut entries: Vec<(u32, PromptTokenLogprob)> = Vec::with_capacity(top_n as usize + 1);
        for ((id, logprob), rank) in std::iter::once(((id, score.chosen), score.rank)).chain(top) {
            if !entries.iter().any(|(known, _)| *known == id) {
                let decoded_token = String::from_utf8_lossy(vocabulary.bytes(id)).into_owned();
                let logprob = sendable(logprob);
                entries.push((id, PromptTokenLogprob { logprob, rank, decoded_token }));
            }
        }
        Some(PromptTokenLogprobs(entries))
    };
    std::iter::once(None).chain(ids.iter().skip(1).zip(scores).map(of_token)).collect()
}

fn chat_token(id: u32, logprob: f32, is_text: bool, vocabulary: &Vocabulary) -> ChatTokenLogprob {
    let bytes = vocabulary.bytes(id);
    ChatTokenLogprob {
        token: String::from_utf8_lossy(bytes).into_owned(),
        logprob: sendable(logprob),
        bytes: is_text.then(|| bytes.to_vec()),
    }
}

/// Tokens that are no whole characters are written by their bytes, so that they stay distinct.
fn token_key(bytes: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.to_owned();
    }
    let escapes: Vec<String> = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    format!("bytes:{}", escapes.concat())
}

fn finite(top: &[(u32, f32)]) -> impl Iterator<Item = (u32, f32)> {
    top.iter().copied().filter(|(_, logprob)| logprob.is_finite())
}

/// A logprob is at most 0 but for rounding.
fn sendable(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.min(0.0) } else { FLOOR }
}
