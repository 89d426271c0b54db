//! Metrics of requests as clients see them.

use std::sync::atomic::{AtomicI64, AtomicU64};

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

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SuccessLabels {
    finished_reason: &'static str,
}

/// Labels of an aborted sample.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AbortLabels {
    /// `client`, `stop_string`, `slow_reader`, `drain` or `sibling`.
    pub cause: &'static str,
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
    /// Requests given to an engine anew after another was lost.
    pub replays: Counter,
    /// Samples that ended before the engine ended them, by cause.
    pub aborted: Family<AbortLabels, Counter>,
    /// Tokens that went out together with an earlier one of their sample.
    pub merged_tokens: Counter,
    /// Prompt tokens that wait for their request's first token.
    pub queued_tokens: Gauge<i64, AtomicI64>,
    /// Age of the oldest request in flight.
    pub oldest_request: Gauge<f64, AtomicU64>,
    /// How late the event loop's timer was; above a few ms the loop is the bottleneck.
    pub event_loop_lag: DurationHistogram,
    /// Parts of a request's way to its first token.
    pub stages: StageHistograms,
}

/// How long each stage took, once per request.
#[derive(Debug, Clone)]
pub struct StageHistograms {
    /// Reading the body off the socket.
    pub body: DurationHistogram,
    /// Waiting for a thread of the text pool.
    pub text_wait: DurationHistogram,
    /// JSON and validation.
    pub parse: DurationHistogram,
    /// The chat template.
    pub template: DurationHistogram,
    /// Text to ids.
    pub tokenize: DurationHistogram,
    /// In the engine, until the first chunk was scheduled.
    pub queue: DurationHistogram,
    /// In the engine, from then to the first token.
    pub prefill: DurationHistogram,
}

/// From 10 us to 10 s.
const STAGE_BOUNDS: &[f64] = &[
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1,
    0.25, 1.0, 10.0,
];

impl StageHistograms {
    fn register(registry: &mut Registry) -> Self {
        let mut stage = |name: &str, help: &str| {
            let histogram = DurationHistogram::new(STAGE_BOUNDS);
            registry.register_with_unit(format!("rung_stage_{name}"), help, Unit::Seconds, histogram.clone());
            histogram
        };
        Self {
            body: stage("body", "Reading a request's body off the socket"),
            text_wait: stage("text_wait", "Waiting for a thread of the text pool"),
            parse: stage("parse", "JSON and validation of a request"),
            template: stage("template", "Rendering a chat"),
            tokenize: stage("tokenize", "Encoding the prompts of a request"),
            queue: stage("queue", "Waiting in the engine for the first chunk to be scheduled"),
            prefill: stage("prefill", "In the engine from the first scheduled chunk to the first token"),
        }
    }
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
            replays: Counter::default(),
            aborted: Family::default(),
            merged_tokens: Counter::default(),
            queued_tokens: Gauge::default(),
            oldest_request: Gauge::default(),
            event_loop_lag: DurationHistogram::new(STAGE_BOUNDS),
            stages: StageHistograms::register(registry),
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
        registry.register(
            "rung_requests_replayed",
            "Requests given to an engine anew after another was lost",
            metrics.replays.clone(),
        );
        metrics.register_state(registry);
        metrics
    }

    fn register_state(&self, registry: &mut Registry) {
        registry.register(
            "rung_samples_aborted",
            "Samples that ended before the engine ended them, by cause",
            self.aborted.clone(),
        );
        registry.register(
            "rung_merged_tokens",
            "Tokens that went out together with an earlier one of their sample",
            self.merged_tokens.clone(),
        );
        registry.register(
            "rung_queued_prompt_tokens",
            "Prompt tokens that wait for their request's first token",
            self.queued_tokens.clone(),
        );
        registry.register_with_unit(
            "rung_oldest_request_age",
            "Age of the oldest generation request in flight; 0 without any",
            Unit::Seconds,
            self.oldest_request.clone(),
        );
        registry.register_with_unit(
            "rung_event_loop_lag",
            "How late a timer of the event loop was",
            Unit::Seconds,
            self.event_loop_lag.clone(),
        );
    }

    /// The same under the names that dashboards for vLLM know.
    pub(super) fn register_aliases(&self, registry: &mut Registry) {
        let help = "The rung_ metric of the same meaning, under a name that dashboards know";
        let histograms = [
            ("vllm:time_to_first_token", &self.time_to_first_token),
            ("vllm:inter_token_latency", &self.inter_token_latency),
            ("vllm:time_per_output_token", &self.inter_token_latency),
            ("vllm:e2e_request_latency", &self.request_latency),
            ("vllm:request_queue_time", &self.stages.queue),
            ("vllm:request_prefill_time", &self.stages.prefill),
        ];
        for (name, histogram) in histograms {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        registry.register("vllm:prompt_tokens", help, self.prompt_tokens.clone());
        registry.register("vllm:generation_tokens", help, self.generation_tokens.clone());
        registry.register("vllm:request_success", help, self.succeeded());
    }

    /// Samples that ended well, with vLLM's name for the label.
    fn succeeded(&self) -> Family<SuccessLabels, Counter> {
        let family = Family::<SuccessLabels, Counter>::default();
        for reason in ["stop", "length"] {
            let count = self.finished.get_or_create(&FinishLabels { reason }).get();
            family.get_or_create(&SuccessLabels { finished_reason: reason }).inc_by(count);
        }
        family
    }
}
