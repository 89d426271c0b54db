//! Counts the tokens of an answer from its events.

use super::answer::ChoiceEvent;
use super::prepare::Prepared;
use super::types::{PromptTokensDetails, Usage};

/// Adds up as events pass.
#[derive(Debug)]
pub(super) struct UsageCount {
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Per prompt: the least that any of its samples reused, so that siblings that share the
    /// first one's work do not count as a cache hit.
    cached: Vec<Option<u32>>,
}

impl UsageCount {
    pub(super) fn new(prepared: &Prepared) -> Self {
        Self {
            prompt_tokens: prepared.requests.iter().map(|request| request.prompt_ids.len() as u64).sum(),
            completion_tokens: 0,
            cached: vec![None; prepared.requests.len()],
        }
    }

    pub(super) fn read(&mut self, event: &ChoiceEvent) {
        self.completion_tokens += event.delta.token_ids.len() as u64;
        if let (Some(started), Some(cached)) = (event.started, self.cached.get_mut(event.prompt)) {
            let new = started.cached_tokens;
            *cached = Some(cached.map_or(new, |least| least.min(new)));
        }
    }

    pub(super) fn total(&self) -> Usage {
        let cached: u64 = self.cached.iter().flatten().map(|&tokens| u64::from(tokens)).sum();
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: cached.min(self.prompt_tokens) },
        }
    }
}
