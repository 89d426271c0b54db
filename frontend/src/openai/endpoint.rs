//! From a request to its response, the same for both endpoints: admit, read, prepare off the
//! socket threads, submit, then stream or fold.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::header;
use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::answer::{Answer, ChoiceEvent, Finish};
use super::body::read_body;
use super::json::parse_object;
use super::meter::RequestMeter;
use super::prepare::Prepared;
use super::sse::{self, Frame};
use super::types::{Head, Usage};
use super::usage::UsageCount;
use super::validate::Delivery;
use crate::config::Limits;
use crate::engine::types::PromptLogprobs;
use crate::error::ApiError;
use crate::keys::KeyIdentity;
use crate::metrics::{DurationHistogram, StageHistograms};
use crate::model::ServedModel;
use crate::state::AppState;
use crate::text::TextDelta;

/// A choice after its last event.
#[derive(Debug, Default)]
pub(super) struct FoldedChoice {
    pub delta: TextDelta,
    /// Of the prompt's tokens from the second on, if asked for.
    pub prompt_logprobs: Option<Arc<[PromptLogprobs]>>,
    pub finish: Option<Finish>,
}

impl FoldedChoice {
    /// The mean logprob of its tokens; without any, the worst.
    fn score(&self) -> f32 {
        // Those of an echoed prompt are the same for all.
        let entries = &self.delta.entries[self.delta.entries.len() - self.delta.token_ids.len()..];
        if entries.is_empty() {
            return f32::NEG_INFINITY;
        }
        let sum: f32 = entries.iter().flat_map(|entry| &entry.logprobs).map(|logprobs| logprobs.chosen).sum();
        sum / entries.len() as f32
    }
}

/// Times the stages of one request, one after the other.
pub(super) struct StageWatch<'a> {
    stages: &'a StageHistograms,
    since: Instant,
}

impl<'a> StageWatch<'a> {
    fn start(stages: &'a StageHistograms) -> Self {
        Self { stages, since: Instant::now() }
    }

    /// The stage before has ended.
    pub(super) fn end(&mut self, stage: impl FnOnce(&StageHistograms) -> &DurationHistogram) {
        let now = Instant::now();
        stage(self.stages).observe(now - std::mem::replace(&mut self.since, now));
    }
}

/// How an endpoint reads its requests and writes its answers.
pub(super) trait Endpoint: Send + 'static {
    /// Checks and prepares a request body.
    fn prepare(
        fields: Map<String, Value>,
        model: Arc<ServedModel>,
        limits: &Limits,
        watch: &mut StageWatch<'_>,
    ) -> Result<Prepared, ApiError>;

    /// A writer for one answer.
    fn new(prepared: &Prepared) -> Self;

    /// Writes the chunks of one event; none when it shows nothing to the client.
    fn write_event(&mut self, event: &ChoiceEvent, frame: &mut Frame);

    /// Writes the chunk that holds the usage of the whole stream.
    fn write_usage(&self, usage: &Usage, frame: &mut Frame);

    /// The answer in one piece.
    fn whole(&self, choices: &[FoldedChoice], usage: &Usage) -> Result<Vec<u8>, serde_json::Error>;
}

/// Serves one request.
pub(super) async fn serve<E: Endpoint + Sync + Unpin>(
    state: AppState,
    request: Request,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let admitted = state.admission.admit(&state.lifecycle, &state.metrics)?;
    let identity = request.extensions().get::<KeyIdentity>().copied();
    let body = read_body(request.into_body(), &state.config.limits).await?;
    let model = state.model()?;
    let (config, metrics) = (Arc::clone(&state.config), Arc::clone(&state.metrics));
    metrics.http.stages.body.observe(arrived.elapsed());
    let waiting_since = Instant::now();
    let prepare = move || {
        let stages = &metrics.http.stages;
        stages.text_wait.observe(waiting_since.elapsed());
        let mut watch = StageWatch::start(stages);
        let mut prepared = E::prepare(parse_object(body)?, model, &config.limits, &mut watch)?;
        prepared.belong_to(identity.as_ref(), &config.limits);
        Ok(Arc::new(prepared))
    };
    let prepared = state.off_thread(prepare).await?;
    let place = state.queue.enter(prepared.prompt_tokens())?;
    let meter = RequestMeter::new(Arc::clone(&state.metrics), arrived);
    let answer = Answer::submit(Arc::clone(&prepared), &state, place, meter)?;
    let endpoint = E::new(&prepared);
    let response = match prepared.options.delivery {
        Delivery::Whole => fold(answer, endpoint, &prepared, &state).await?,
        Delivery::Stream { .. } => {
            sse::respond(answer, endpoint, &prepared, state.config.limits.sse_keepalive).await?
        }
    };
    Ok(admitted.hold(response))
}

/// Reads the whole answer, then writes it.
async fn fold<E: Endpoint + Sync>(
    mut answer: Answer,
    endpoint: E,
    prepared: &Prepared,
    state: &AppState,
) -> Result<Response, ApiError> {
    let count = prepared.requests.len() * prepared.options.samples as usize;
    let mut choices: Vec<FoldedChoice> = (0..count).map(|_| FoldedChoice::default()).collect();
    let mut usage = UsageCount::new(prepared);
    while let Some(events) = answer.next().await {
        let events = events?;
        if answer.has_restarted() {
            choices = (0..count).map(|_| FoldedChoice::default()).collect();
            usage = UsageCount::new(prepared);
        }
        for event in events {
            usage.read(&event);
            let choice = &mut choices[event.index as usize];
            choice.delta.append(event.delta);
            choice.prompt_logprobs = choice.prompt_logprobs.take().or(event.prompt_logprobs);
            choice.finish = event.finish;
        }
    }
    let choices = keep_best(choices, prepared.options.samples as usize, prepared.options.kept as usize);
    let internal = |_| ApiError::Internal("The server failed to write the answer.".to_owned());
    let body = state.off_thread(move || endpoint.whole(&choices, &usage.total()).map_err(internal)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Of each prompt's `samples` choices, the `kept` with the best logprob per token, best first.
fn keep_best(mut choices: Vec<FoldedChoice>, samples: usize, kept: usize) -> Vec<FoldedChoice> {
    if samples == kept {
        return choices;
    }
    let mut best = Vec::with_capacity(choices.len() / samples * kept);
    while !choices.is_empty() {
        let rest = choices.split_off(samples);
        choices.sort_by(|one, other| other.score().total_cmp(&one.score()));
        best.extend(choices.drain(..kept));
        choices = rest;
    }
    best
}

/// A fresh head; its id never comes from the client.
pub(super) fn head(prefix: &str, prepared: &Prepared) -> Head {
    let id: String = rand::rng().sample_iter(Alphanumeric).take(24).map(char::from).collect();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Head { id: format!("{prefix}-{id}"), created, model: prepared.model.id.clone() }
}
