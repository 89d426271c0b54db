//! `/v1/completions`: events to completion chunks, or folded to a completion.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value};

use super::answer::{ChoiceEvent, Finish};
use super::endpoint::{Endpoint, FoldedChoice, StageWatch, head, serve};
use super::logprobs::{completion_logprobs, prompt_logprobs};
use super::prepare::{Prepared, prepare_completion};
use super::sse::Frame;
use super::types::{CompletionChoice, Document, Head, PromptTokenLogprobs, Usage, UsageField};
use super::validate::completion_request;
use crate::config::Limits;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::state::AppState;
use crate::text::TextDelta;

const OBJECT: &str = "text_completion";

/// The handler.
pub async fn completions(State(state): State<AppState>, request: Request) -> Result<Response, ApiError> {
    serve::<Completion>(state, request).await
}

struct Completion {
    head: Head,
    model: Arc<ServedModel>,
    /// Whether each choice's first chunk went out.
    begun: Vec<bool>,
    /// `n`, which is also `best_of` in a stream: a choice's prompt is its index divided by this.
    samples: u32,
    include_usage: bool,
    logprobs: bool,
    prompt_logprobs: Option<u32>,
    returns_ids: bool,
    /// One per prompt.
    prompt_ids: Vec<Arc<[u32]>>,
}

impl Completion {
    fn choice<'a>(
        &'a self,
        index: u32,
        delta: &'a TextDelta,
        finish: Option<Finish>,
        prompt_token_ids: Option<&'a [u32]>,
    ) -> CompletionChoice<'a> {
        CompletionChoice {
            index,
            text: &delta.text,
            logprobs: self
                .logprobs
                .then(|| completion_logprobs(&delta.entries, self.model.tokenizer.vocabulary())),
            finish_reason: finish.map(Finish::as_str),
            token_ids: self.returns_ids.then_some(&delta.token_ids),
            prompt_token_ids,
            prompt_logprobs: None,
        }
    }

    fn prompt_logprobs(&self, index: u32, choice: &FoldedChoice) -> Option<Vec<Option<PromptTokenLogprobs>>> {
        let scores = choice.prompt_logprobs.as_ref()?;
        let ids = self.prompt_ids(index)?;
        Some(prompt_logprobs(ids, scores, self.prompt_logprobs?, self.model.tokenizer.vocabulary()))
    }

    fn prompt_ids(&self, index: u32) -> Option<&[u32]> {
        self.prompt_ids.get((index / self.samples) as usize).map(AsRef::as_ref)
    }

    fn document<'a>(
        &'a self,
        choices: &'a [CompletionChoice<'a>],
        usage: UsageField<'a>,
    ) -> Document<'a, CompletionChoice<'a>> {
        let Head { id, created, model } = &self.head;
        Document {
            id,
            object: OBJECT,
            created: *created,
            model,
            choices,
            usage,
            prompt_token_ids: None,
            prompt_logprobs: None,
        }
    }
}

impl Endpoint for Completion {
    fn prepare(
        fields: Map<String, Value>,
        model: Arc<ServedModel>,
        limits: &Limits,
        watch: &mut StageWatch<'_>,
    ) -> Result<Prepared, ApiError> {
        let request = completion_request(fields, &model, limits)?;
        watch.end(|stages| &stages.parse);
        prepare_completion(request, model, watch)
    }

    fn new(prepared: &Prepared) -> Self {
        let options = &prepared.options;
        Self {
            head: head("cmpl", prepared),
            model: Arc::clone(&prepared.model),
            begun: vec![false; prepared.requests.len() * options.samples as usize],
            samples: options.kept,
            include_usage: options.delivery.includes_usage(),
            logprobs: options.logprobs.is_some(),
            prompt_logprobs: options.prompt_logprobs,
            returns_ids: options.return_token_ids,
            prompt_ids: prepared.requests.iter().map(|request| Arc::clone(&request.prompt_ids)).collect(),
        }
    }

    fn write_event(&mut self, event: &ChoiceEvent, frame: &mut Frame) {
        let TextDelta { text, token_ids, entries, .. } = &event.delta;
        let shows_ids = self.returns_ids && !token_ids.is_empty();
        if text.is_empty() && entries.is_empty() && !shows_ids && event.finish.is_none() {
            return;
        }
        let begun = std::mem::replace(&mut self.begun[event.index as usize], true);
        let prompt_ids = self.prompt_ids(event.index).filter(|_| self.returns_ids && !begun);
        let mut choice = self.choice(event.index, &event.delta, event.finish, prompt_ids);
        if entries.is_empty() {
            choice.logprobs = None;
        }
        frame.json(&self.document(&[choice], UsageField::of_chunk(self.include_usage)));
    }

    fn write_usage(&self, usage: &Usage, frame: &mut Frame) {
        frame.json(&self.document(&[], UsageField::Counts(usage)));
    }

    fn whole(&self, choices: &[FoldedChoice], usage: &Usage) -> Result<Vec<u8>, serde_json::Error> {
        let choices: Vec<CompletionChoice<'_>> = (0u32..)
            .zip(choices)
            .map(|(index, choice)| {
                let ids = self.prompt_ids(index).filter(|_| self.returns_ids);
                CompletionChoice {
                    prompt_logprobs: self.prompt_logprobs(index, choice),
                    ..self.choice(index, &choice.delta, choice.finish, ids)
                }
            })
            .collect();
        serde_json::to_vec(&self.document(&choices, UsageField::Counts(usage)))
    }
}
