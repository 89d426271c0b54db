//! The events of one answer: what its samples' texts grow by, and how they end. Both modes read
//! them here: streaming encodes each one, the other mode folds them.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::meter::RequestMeter;
use super::prepare::Prepared;
use crate::engine::types::{EngineFinish, GenerateRequest, SampleDelta};
use crate::engine::{Engine, Generation};
use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use crate::text::{SampleText, TextDelta};

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
    /// Those with choices that have not ended.
    prompts: Vec<PromptReader>,
    /// An error that is reported once the events before it were.
    failure: Option<ApiError>,
    closing: Closing,
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
        let mut prompts = Vec::with_capacity(prepared.requests.len());
        for (prompt, request) in prepared.requests.iter().enumerate() {
            prompts.push(PromptReader::submit(prompt, request, prepared, engine)?);
            meter.submitted(request.prompt_ids.len() as u64, request.samples);
        }
        Ok(Self { prompts, failure: None, closing: Closing::new(lifecycle.clone()), meter })
    }

    /// The next events; `None` after the last choice has ended or after an error. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Events> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Answer::next`] for the body of a stream.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Events>> {
        if let Some(failure) = self.failure.take() {
            return Poll::Ready(Some(Err(self.fail(failure))));
        }
        if self.prompts.is_empty() {
            return Poll::Ready(None);
        }
        let mut events = Vec::new();
        let mut failure = None;
        self.prompts.retain_mut(|reader| {
            failure.is_none() && reader.poll_read(context, &mut events, &mut failure) == Reading::Open
        });
        if !events.is_empty() {
            self.failure = failure;
            self.meter.read(&events);
            return Poll::Ready(Some(Ok(events)));
        }
        if let Some(failure) = failure {
            return Poll::Ready(Some(Err(self.fail(failure))));
        }
        if self.prompts.is_empty() {
            return Poll::Ready(None);
        }
        if self.closing.is_reached(context) {
            return Poll::Ready(Some(Err(self.fail(ApiError::Draining))));
        }
        Poll::Pending
    }

    fn fail(&mut self, failure: ApiError) -> ApiError {
        self.meter.failed();
        self.prompts.clear();
        failure
    }
}

/// Watches for the end of the server's patience.
struct Closing {
    lifecycle: Lifecycle,
    reached: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Whom `reached` will wake at the end of which phase.
    waiting: Option<(Waker, Phase)>,
}

impl Closing {
    fn new(lifecycle: Lifecycle) -> Self {
        let watched = lifecycle.clone();
        let reached = Box::pin(async move { watched.reached(Phase::Closing).await });
        Self { lifecycle, reached, waiting: None }
    }

    /// Asks to be woken once per task and phase, not at every token.
    fn is_reached(&mut self, context: &mut Context<'_>) -> bool {
        let phase = self.lifecycle.phase();
        let is_waiting = |(waker, since): &(Waker, Phase)| waker.will_wake(context.waker()) && *since == phase;
        if self.waiting.as_ref().is_some_and(is_waiting) {
            return false;
        }
        self.waiting = Some((context.waker().clone(), phase));
        self.reached.as_mut().poll(context).is_ready()
    }
}

/// Whether more can come.
#[derive(Debug, PartialEq, Eq)]
enum Reading {
    Open,
    Over,
}

/// The samples of one prompt.
struct PromptReader {
    prompt: usize,
    generation: Generation,
    samples: Vec<SampleText>,
    /// The prompt's text, for each sample that is to begin with it and has not.
    echoes: Vec<Option<Arc<str>>>,
    generates_nothing: bool,
}

impl PromptReader {
    fn submit(
        prompt: usize,
        request: &GenerateRequest,
        prepared: &Prepared,
        engine: &dyn Engine,
    ) -> Result<Self, ApiError> {
        let generation = engine.submit(request.clone())?;
        let samples = (0..request.samples).map(|_| SampleText::new(Arc::clone(&prepared.rules))).collect();
        Ok(Self {
            prompt,
            generation,
            samples,
            echoes: vec![prepared.echoes.get(prompt).cloned(); request.samples as usize],
            generates_nothing: prepared.options.generates_nothing(),
        })
    }

    /// Adds what is new to `events`; a failure ends the whole answer after them.
    fn poll_read(
        &mut self,
        context: &mut Context<'_>,
        events: &mut Vec<ChoiceEvent>,
        failure: &mut Option<ApiError>,
    ) -> Reading {
        let news = match self.generation.poll_next(context) {
            Poll::Pending => return Reading::Open,
            Poll::Ready(None) => return Reading::Over,
            Poll::Ready(Some(news)) => news,
        };
        for (sample, delta) in news {
            if let Err(error) = self.read(sample, delta, events) {
                *failure = Some(error);
                return Reading::Over;
            }
        }
        Reading::Open
    }

    fn read(
        &mut self,
        sample: u32,
        mut news: SampleDelta,
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
        if self.generates_nothing && !news.token_ids.is_empty() {
            // The prompt has been computed; the token is nobody's.
            self.generation.abort(sample);
            let finish = Some(EngineFinish::Length);
            news = SampleDelta { started: news.started, finish, ..SampleDelta::default() };
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
        if let Some(echo) = self.echoes[sample as usize].take() {
            delta.text.insert_str(0, &echo);
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
