//! The events of one answer: what its samples' texts grow by, and how they end. Both modes read
//! them here: streaming encodes each one, the other mode folds them.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use super::beginning::Beginnings;
use super::meter::RequestMeter;
use super::prepare::Prepared;
use super::validate::Delivery;
use crate::engine::types::{EngineFinish, GenerateRequest, PromptLogprobs, SampleDelta, Started};
use crate::engine::{Engine, Generation};
use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, Phase};
use crate::model::ServedModel;
use crate::queue::QueuePlace;
use crate::state::AppState;
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
    /// Of the prompt's tokens from the second on; present in the choice's first event, if asked for.
    pub prompt_logprobs: Option<Arc<[PromptLogprobs]>>,
    /// Present once per scheduled choice.
    pub started: Option<Started>,
    /// Present in the choice's last event.
    pub finish: Option<Finish>,
}

type Events = Result<Vec<ChoiceEvent>, ApiError>;

/// How often a request is given to an engine anew after one was lost.
const MAX_REPLAYS: u32 = 1;

/// All choices of one request. Dropping it aborts whatever is still being computed.
pub(super) struct Answer {
    prepared: Arc<Prepared>,
    engine: Arc<dyn Engine>,
    /// Those with choices that have not ended.
    prompts: Vec<PromptReader>,
    /// An error that is reported once the events before it were.
    failure: Option<ApiError>,
    /// Until the first token.
    place: Option<QueuePlace>,
    replay: Replay,
    closing: Closing,
    meter: RequestMeter,
}

/// Whether an engine has come back in time.
type ReadyAgain = Pin<Box<dyn Future<Output = bool> + Send>>;

/// A request that has shown nothing to its client survives the loss of an engine.
struct Replay {
    /// Whether the client has seen something of the answer.
    is_shown: bool,
    left: u32,
    /// How long an engine may be waited for.
    patience: Duration,
    /// The loss, and the wait for an engine.
    waiting: Option<(ApiError, ReadyAgain)>,
    restarted: bool,
}

impl Answer {
    /// Submits every prompt; when one is refused, those before it are aborted.
    pub(super) fn submit(
        prepared: Arc<Prepared>,
        state: &AppState,
        place: QueuePlace,
        meter: RequestMeter,
    ) -> Result<Self, ApiError> {
        let patience = state.config.limits.replay_wait;
        let mut answer = Self {
            prepared,
            engine: Arc::clone(&state.engine),
            prompts: Vec::new(),
            failure: None,
            place: Some(place),
            replay: Replay {
                is_shown: false,
                left: if patience.is_zero() { 0 } else { MAX_REPLAYS },
                patience,
                waiting: None,
                restarted: false,
            },
            closing: Closing::new(state.lifecycle.clone()),
            meter,
        };
        answer.submit_all()?;
        Ok(answer)
    }

    fn submit_all(&mut self) -> Result<(), ApiError> {
        self.meter.begin();
        for (prompt, request) in self.prepared.requests.iter().enumerate() {
            let reader = PromptReader::submit(prompt, request, &self.prepared, self.engine.as_ref())?;
            self.prompts.push(reader);
            self.meter.submitted(request.prompt_ids.len() as u64, request.samples);
        }
        Ok(())
    }

    /// The next events; `None` after the last choice has ended or after an error. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Events> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Whether what was read before belongs to an attempt that failed; told once. Never so for
    /// a stream.
    pub(super) fn has_restarted(&mut self) -> bool {
        std::mem::take(&mut self.replay.restarted)
    }

    /// [`Answer::next`] for the body of a stream.
    pub(super) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Events>> {
        loop {
            if self.replay.waiting.is_some()
                && let Err(failure) = ready!(self.poll_replay(context))
            {
                return Poll::Ready(Some(Err(self.fail(failure))));
            }
            let mut failure = self.failure.take();
            if self.prompts.is_empty() && failure.is_none() {
                return Poll::Ready(None);
            }
            let mut events = Vec::new();
            self.prompts.retain_mut(|reader| {
                failure.is_none() && reader.poll_read(context, &mut events, &mut failure) == Reading::Open
            });
            if !events.is_empty() {
                self.failure = failure;
                self.pass(&events);
                return Poll::Ready(Some(Ok(events)));
            }
            match failure {
                Some(failure) if self.may_replay(&failure) => self.await_engine(failure),
                Some(failure) => return Poll::Ready(Some(Err(self.fail(failure)))),
                None if self.prompts.is_empty() => return Poll::Ready(None),
                None if self.closing.is_reached(context) => {
                    return Poll::Ready(Some(Err(self.fail(ApiError::Draining))));
                }
                None => return Poll::Pending,
            }
        }
    }

    fn pass(&mut self, events: &[ChoiceEvent]) {
        self.meter.read(events);
        self.replay.is_shown |= self.prepared.options.delivery != Delivery::Whole;
        let is_computed = |event: &ChoiceEvent| !event.delta.token_ids.is_empty() || event.finish.is_some();
        if events.iter().any(is_computed)
            && let Some(place) = self.place.take()
        {
            place.served();
        }
    }

    fn may_replay(&self, failure: &ApiError) -> bool {
        matches!(failure, ApiError::EngineLost(_)) && !self.replay.is_shown && self.replay.left > 0
    }

    fn await_engine(&mut self, failure: ApiError) {
        self.prompts.clear();
        self.replay.left -= 1;
        let ready = tokio::time::timeout(self.replay.patience, self.engine.ready());
        let waiting = Box::pin(async move { ready.await.is_ok() });
        self.replay.waiting = Some((failure, waiting));
    }

    /// Gives the request to the engine that comes next.
    fn poll_replay(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        let Some((_, waiting)) = &mut self.replay.waiting else { return Poll::Ready(Ok(())) };
        let is_back = match waiting.as_mut().poll(context) {
            Poll::Ready(is_back) => is_back,
            Poll::Pending if self.closing.is_reached(context) => return Poll::Ready(Err(ApiError::Draining)),
            Poll::Pending => return Poll::Pending,
        };
        let Some((loss, _)) = self.replay.waiting.take() else { return Poll::Ready(Ok(())) };
        // Ids of another model mean something else.
        let is_same = |model: Arc<ServedModel>| Arc::ptr_eq(&model, &self.prepared.model);
        if !is_back || !self.engine.model().is_some_and(is_same) {
            return Poll::Ready(Err(loss));
        }
        self.replay.restarted = true;
        self.meter.replayed();
        Poll::Ready(self.submit_all())
    }

    fn fail(&mut self, failure: ApiError) -> ApiError {
        self.meter.failed(&failure);
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
        let is_waiting =
            |(waker, since): &(Waker, Phase)| waker.will_wake(context.waker()) && *since == phase;
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
    /// Present while samples have yet to begin.
    beginnings: Option<Beginnings>,
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
            beginnings: Beginnings::new(prompt, request, prepared),
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
        if let Some(beginnings) = &mut self.beginnings {
            beginnings.read(sample, &mut news)?;
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
        let event = ChoiceEvent {
            index: self.prompt as u32 * num_samples + sample,
            prompt: self.prompt,
            delta,
            prompt_logprobs: None,
            started: news.started,
            finish,
        };
        match &mut self.beginnings {
            Some(beginnings) => beginnings.pass(event, events),
            None => events.push(event),
        }
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
