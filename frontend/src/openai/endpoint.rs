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
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::state::AppState;
use crate::text::TextDelta;

/// A choice after its last event.
#[derive(Debug, Default)]
pub(super) struct FoldedChoice {
    pub delta: TextDelta,
    pub finish: Option<Finish>,
}

impl FoldedChoice {
    /// The mean logprob of its tokens; without any, the worst.
    fn score(&self) -> f32 {
        let entries = &self.delta.entries;
        if entries.is_empty() {
            return f32::NEG_INFINITY;
        }
        let sum: f32 = entries.iter().map(|entry| entry.logprobs.chosen).sum();
        sum / entries.len() as f32
    }
}

/// How an endpoint reads its requests and writes its answers.
pub(super) trait Endpoint: Send + 'static {
    /// Checks and prepares a request body.
    fn prepare(
        fields: Map<String, Value>,
        model: Arc<ServedModel>,
        limits: &Limits,
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
    let body = read_body(request.into_body(), state.config.limits.max_body_bytes).await?;
    let model = state.model()?;
    let config = Arc::clone(&state.config);
    let prepared = state.off_thread(move || E::prepare(parse_object(body)?, model, &config.limits)).await?;
    let meter = RequestMeter::new(Arc::clone(&state.metrics), arrived);
    let answer = Answer::submit(&prepared, state.engine.as_ref(), &state.lifecycle, meter)?;
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
        for event in events? {
            usage.read(&event);
            let choice = &mut choices[event.index as usize];
            choice.delta.append(event.delta);
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
