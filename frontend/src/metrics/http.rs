//! Metrics of requests as clients see them.

use std::sync::atomic::AtomicI64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::histogram::DurationHistogram;

const FIRST_TOKEN_BOUNDS: &[f64] =
    &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
const INTER_TOKEN_BOUNDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5];
const REQUEST_BOUNDS: &[f64] =
    &[0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Labels of an answered request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The route, from a fixed list; `other` for unknown paths.
    pub endpoint: &'static str,
    /// HTTP status.
    pub status: u16,
}

/// Labels of a refused request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RejectLabels {
    /// The error's code, from the error table.
    pub reason: &'static str,
}

/// Labels of an ended sample.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FinishLabels {
    /// `stop`, `length`, `error` or `abort`.
    pub reason: &'static str,
}

/// Counters and histograms of the HTTP side.
#[derive(Debug, Clone)]
pub struct HttpMetrics {
    /// Answered requests.
    pub requests: Family<RequestLabels, Counter>,
    /// Requests answered with an error.
    pub rejected: Family<RejectLabels, Counter>,
    /// Generation requests admitted and not yet answered in full.
    pub in_flight: Gauge<i64, AtomicI64>,
    /// From arrival to the first token.
    pub time_to_first_token: DurationHistogram,
    /// Between tokens of one sample; several tokens read at once share the gap.
    pub inter_token_latency: DurationHistogram,
    /// From arrival to the end of the answer.
    pub request_latency: DurationHistogram,
    /// Prompt tokens of submitted requests.
    pub prompt_tokens: Counter,
    /// Tokens given out to clients.
    pub generation_tokens: Counter,
    /// Samples by how they ended; every submitted sample is counted once.
    pub finished: Family<FinishLabels, Counter>,
}

impl HttpMetrics {
    /// Registers everything.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            requests: Family::default(),
            rejected: Family::default(),
            in_flight: Gauge::default(),
            time_to_first_token: DurationHistogram::new(FIRST_TOKEN_BOUNDS),
            inter_token_latency: DurationHistogram::new(INTER_TOKEN_BOUNDS),
            request_latency: DurationHistogram::new(REQUEST_BOUNDS),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            finished: Family::default(),
        };
        registry.register("rung_http_requests", "Answered requests", metrics.requests.clone());
        registry.register(
            "rung_http_requests_rejected",
            "Requests answered with an error",
            metrics.rejected.clone(),
        );
        registry.register(
            "rung_requests_in_flight",
            "Generation requests being served",
            metrics.in_flight.clone(),
        );
        registry.register_with_unit(
            "rung_time_to_first_token",
            "From arrival to the first token",
            Unit::Seconds,
            metrics.time_to_first_token.clone(),
        );
        registry.register_with_unit(
            "rung_inter_token_latency",
            "Between tokens of one sample",
            Unit::Seconds,
            metrics.inter_token_latency.clone(),
        );
        registry.register_with_unit(
            "rung_request_latency",
            "From arrival to the end of the answer",
            Unit::Seconds,
            metrics.request_latency.clone(),
        );
        registry.register(
            "rung_prompt_tokens",
            "Prompt tokens of submitted requests",
            metrics.prompt_tokens.clone(),
        );
        registry.register(
            "rung_generation_tokens",
            "Tokens given out to clients",
            metrics.generation_tokens.clone(),
        );
        registry.register("rung_samples_finished", "Samples by how they ended", metrics.finished.clone());
        metrics
    }
}
