//! The events of one answer: what its samples' texts grow by, and how they end. Both modes read
//! them here: streaming encodes each one, the other mode folds them.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::stream::{self, SelectAll, Stream, StreamExt};

use super::meter::RequestMeter;
use super::prepare::Prepared;
use crate::engine::types::{EngineFinish, GenerateRequest, SampleDelta};
use crate::engine::{Engine, Generation};
use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use crate::text::{SampleRules, SampleText, TextDelta};

/// How a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    /// An end-of-text id, a stop id or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

impl Finish {
    /// As OpenAI writes it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// News of one choice.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ChoiceEvent {
    /// Prompt number times `n` plus sample number.
    pub index: u32,
    /// Which prompt.
    pub prompt: usize,
    pub delta: TextDelta,
    /// Present once per scheduled choice: prompt tokens whose KV was reused.
    pub cached_tokens: Option<u32>,
    /// Present in the choice's last event.
    pub finish: Option<Finish>,
}

type Events = Result<Vec<ChoiceEvent>, ApiError>;

/// All choices of one request. Dropping it aborts whatever is still being computed.
pub(super) struct Answer {
    prompts: SelectAll<Pin<Box<dyn Stream<Item = Events> + Send>>>,
    closing: Pin<Box<dyn Future<Output = ()> + Send>>,
    meter: RequestMeter,
}

impl Answer {
    /// Submits every prompt; when one is refused, those before it are aborted.
    pub(super) fn submit(
        prepared: &Prepared,
        engine: &dyn Engine,
        lifecycle: &Lifecycle,
        mut meter: RequestMeter,
    ) -> Result<Self, ApiError> {
        let mut prompts = SelectAll::new();
        for (prompt, request) in prepared.requests.iter().enumerate() {
            let reader = PromptReader::submit(prompt, request, &prepared.rules, engine)?;
            meter.submitted(request.prompt_ids.len() as u64, request.samples);
            prompts.push(
                stream::unfold(reader, |mut reader| async { Some((reader.next().await?, reader)) }).boxed(),
            );
        }
        let lifecycle = lifecycle.clone();
        let closing = Box::pin(async move { lifecycle.reached(Phase::Closing).await });
        Ok(Self { prompts, closing, meter })
    }

    /// The next events; `None` after the last choice has ended or after an error. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Events> {
        if self.prompts.is_empty() {
            return None;
        }
        let events = tokio::select! {
            biased;
            events = self.prompts.next() => events?,
            () = &mut self.closing => Err(ApiError::Draining),
        };
        if let Ok(events) = &events {
            self.meter.read(events);
        } else {
            self.meter.failed();
            self.prompts.clear();
        }
        Some(events)
    }
}

/// The samples of one prompt.
struct PromptReader {
    prompt: usize,
    generation: Generation,
    samples: Vec<SampleText>,
    /// An error that is reported once the events before it were.
    failure: Option<ApiError>,
}

impl PromptReader {
    fn submit(
        prompt: usize,
        request: &GenerateRequest,
        rules: &Arc<SampleRules>,
        engine: &dyn Engine,
    ) -> Result<Self, ApiError> {
        let generation = engine.submit(request.clone())?;
        let samples = (0..request.samples).map(|_| SampleText::new(Arc::clone(rules))).collect();
        Ok(Self { prompt, generation, samples, failure: None })
    }

    async fn next(&mut self) -> Option<Events> {
        loop {
            if let Some(failure) = self.failure.take() {
                return Some(Err(failure));
            }
            let news = self.generation.next().await?;
            let mut events = Vec::with_capacity(news.len());
            for (sample, delta) in news {
                if let Err(failure) = self.read(sample, delta, &mut events) {
                    self.failure = Some(failure);
                    break;
                }
            }
            if !events.is_empty() {
                return Some(Ok(events));
            }
        }
    }

    fn read(
        &mut self,
        sample: u32,
        news: SampleDelta,
        events: &mut Vec<ChoiceEvent>,
    ) -> Result<(), ApiError> {
        let num_samples = self.samples.len() as u32;
        let Some(text) = self.samples.get_mut(sample as usize) else {
            return Err(ApiError::Internal(format!(
                "The engine answered for sample {sample} of {num_samples}."
            )));
        };
        if text.wants_logprobs() && news.logprobs.len() != news.token_ids.len() {
            return Err(ApiError::Internal(
                "The engine sent tokens without the logprobs that belong to them.".to_owned(),
            ));
        }
        let mut delta = text.push(&news.token_ids, news.logprobs);
        let ended = news.finish.map(ending).transpose();
        if let Ok(Some(_)) = ended {
            delta.append(text.finish());
        }
        // A stop string ended the choice before whatever else came.
        let finish = if delta.stopped { Some(Finish::Stop) } else { ended.clone().unwrap_or_default() };
        if delta.stopped {
            self.generation.abort(sample);
        }
        let failure = ended.err().filter(|_| finish.is_none());
        if let Some(failure) = failure.clone().filter(|_| delta.is_empty()) {
            return Err(failure);
        }
        events.push(ChoiceEvent {
            index: self.prompt as u32 * num_samples + sample,
            prompt: self.prompt,
            delta,
            cached_tokens: news.started.map(|started| started.cached_tokens),
            finish,
        });
        failure.map_or(Ok(()), Err)
    }
}

/// How a row that the engine ended counts.
fn ending(finish: EngineFinish) -> Result<Finish, ApiError> {
    match finish {
        EngineFinish::Stop { .. } => Ok(Finish::Stop),
        EngineFinish::Length => Ok(Finish::Length),
        EngineFinish::Cancelled => {
            Err(ApiError::Internal("The engine cancelled the request without being asked.".to_owned()))
        }
        EngineFinish::Error(error) => Err(error.into()),
    }
}
