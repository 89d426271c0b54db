//! Logprobs in the two shapes that OpenAI's APIs have.

use super::types::{ChatLogprobs, ChatTokenLogprob, ChatTokenLogprobs, CompletionLogprobs, TopLogprobs};
use crate::text::{TokenEntry, Vocabulary};

/// Stands for minus infinity and NaN, which JSON cannot hold.
const FLOOR: f32 = -9999.0;

/// For chat completions.
pub(super) fn chat_logprobs(entries: &[TokenEntry], vocabulary: &Vocabulary) -> ChatLogprobs {
    let content = entries
        .iter()
        .map(|entry| {
            let chosen = chat_token(entry.id, entry.logprobs.chosen, entry.in_text, vocabulary);
            ChatTokenLogprobs {
                token: chosen.token,
                logprob: chosen.logprob,
                bytes: chosen.bytes,
                top_logprobs: finite(&entry.logprobs.top)
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
        let chosen = sendable(entry.logprobs.chosen);
        let mut top: Vec<(String, f32)> = Vec::with_capacity(entry.logprobs.top.len() + 1);
        let alternatives = finite(&entry.logprobs.top)
            .map(|(id, logprob)| (token_key(vocabulary.bytes(id)), sendable(logprob)));
        for (key, logprob) in alternatives.chain([(token.clone(), chosen)]) {
            // Ids with the same text: the likelier one, which comes first.
            if !top.iter().any(|(known, _)| *known == key) {
                top.push((key, logprob));
            }
        }
        logprobs.tokens.push(token);
        logprobs.token_logprobs.push(chosen);
        logprobs.top_logprobs.push(TopLogprobs(top));
        logprobs.text_offset.push(entry.char_offset);
    }
    logprobs
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
