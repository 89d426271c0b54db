//! What stands before a choice's own text: the echoed prompt, and the prompt's logprobs. The engine
//! computes these once for all samples of a prompt, so events wait until they are complete.

use std::sync::Arc;

use super::answer::ChoiceEvent;
use super::prepare::Prepared;
use crate::engine::types::{EngineFinish, GenerateRequest, PromptLogprobs, SampleDelta, TokenLogprobs};
use crate::error::ApiError;
use crate::text::{SampleRules, SampleText, StopSet, TextDelta, TokenEntry};

/// The beginnings of one prompt's choices.
pub(super) struct Beginnings {
    prompt_ids: Arc<[u32]>,
    echo: Option<Arc<str>>,
    /// Alternatives for each echoed token; `None`: they have no logprobs.
    echoed_logprobs: Option<u32>,
    /// For the offsets of echoed tokens.
    rules: Arc<SampleRules>,
    scores: Scores,
    /// By sample.
    begun: Vec<bool>,
    /// Events that came before the logprobs of the prompt were complete.
    held: Vec<ChoiceEvent>,
}

enum Scores {
    NotAsked,
    Partial(Vec<PromptLogprobs>),
    Complete { all: Arc<[PromptLogprobs]>, echoed: Vec<TokenEntry> },
}

impl Beginnings {
    /// `None` when nothing stands before the choices' own text.
    pub(super) fn new(prompt: usize, request: &GenerateRequest, prepared: &Prepared) -> Option<Self> {
        let echo = prepared.echoes.get(prompt).cloned();
        let wants_scores = request.prompt_top_logprobs.is_some();
        if echo.is_none() && !wants_scores {
            return None;
        }
        let rules = SampleRules {
            tokenizer: Arc::clone(&prepared.model.tokenizer),
            stops: StopSet::new::<&str>(&[]),
            include_stop: false,
            ending_ids: Vec::new(),
            min_tokens: 0,
            leading: prepared.leading,
            logprobs: true,
        };
        let mut beginnings = Self {
            prompt_ids: Arc::clone(&request.prompt_ids),
            echoed_logprobs: prepared.options.logprobs.filter(|_| echo.is_some()),
            echo,
            rules: Arc::new(rules),
            scores: if wants_scores { Scores::Partial(Vec::new()) } else { Scores::NotAsked },
            begun: vec![false; request.samples as usize],
            held: Vec::new(),
        };
        beginnings.complete();
        Some(beginnings)
    }

    /// Takes the prompt's logprobs out of what a sample received.
    pub(super) fn read(&mut self, sample: u32, news: &mut SampleDelta) -> Result<(), ApiError> {
        let Scores::Partial(scores) = &mut self.scores else { return Ok(()) };
        scores.append(&mut news.prompt_logprobs);
        self.complete();
        let is_late = sample == 0
            && (!news.token_ids.is_empty()
                || matches!(news.finish, Some(EngineFinish::Stop { .. } | EngineFinish::Length)));
        match &self.scores {
            Scores::Partial(scores) if is_late => Err(ApiError::Internal(format!(
                "The engine sent logprobs of {} of the prompt's {} tokens.",
                scores.len(),
                self.prompt_ids.len()
            ))),
            _ => Ok(()),
        }
    }

    /// Gives an event out, with what stands before it, unless it must wait.
    pub(super) fn pass(&mut self, event: ChoiceEvent, events: &mut Vec<ChoiceEvent>) {
        self.held.push(event);
        if matches!(self.scores, Scores::Partial(_)) {
            return;
        }
        for mut event in std::mem::take(&mut self.held) {
            self.begin(&mut event);
            events.push(event);
        }
    }

    fn begin(&mut self, event: &mut ChoiceEvent) {
        let sample = event.index as usize % self.begun.len();
        let is_first = !std::mem::replace(&mut self.begun[sample], true);
        let delta = &mut event.delta;
        if let Some(echo) = self.echo.as_deref().filter(|_| self.echoed_logprobs.is_some()) {
            let num_chars = echo.chars().count();
            delta.entries.iter_mut().for_each(|entry| entry.char_offset += num_chars);
        }
        if !is_first {
            return;
        }
        if let Some(echo) = &self.echo {
            delta.text.insert_str(0, echo);
        }
        if let Scores::Complete { all, echoed } = &self.scores {
            event.prompt_logprobs = Some(Arc::clone(all));
            delta.entries.splice(0..0, echoed.iter().cloned());
        }
    }

    /// All but the first of the prompt's tokens have a logprob.
    fn complete(&mut self) {
        let Scores::Partial(scores) = &mut self.scores else { return };
        if scores.len() + 1 < self.prompt_ids.len() {
            return;
        }
        let all: Arc<[PromptLogprobs]> = std::mem::take(scores).into();
        let echoed = self.echoed_logprobs.map_or(Vec::new(), |top_n| self.entries(&all, top_n as usize));
        self.scores = Scores::Complete { all, echoed };
    }

    /// The prompt's tokens as an answer's tokens are written; nothing is known of the first.
    fn entries(&self, scores: &[PromptLogprobs], top_n: usize) -> Vec<TokenEntry> {
        let of_first = TokenLogprobs { chosen: 0.0, top: Vec::new() };
        let of_rest = scores.iter().map(|score| TokenLogprobs {
            chosen: score.chosen,
            top: score.top.iter().copied().take(top_n).collect(),
        });
        let mut text = SampleText::new(Arc::clone(&self.rules));
        let mut delta: TextDelta =
            text.push(&self.prompt_ids, std::iter::once(of_first).chain(of_rest).collect());
        delta.append(text.finish());
        if let Some(first) = delta.entries.first_mut() {
            first.logprobs = None;
        }
        delta.entries
    }
}
