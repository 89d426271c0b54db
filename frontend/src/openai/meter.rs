//! What one generation request adds to the metrics. Counts are kept here and added when the
//! request ends, however it ends.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::answer::{ChoiceEvent, Finish};
use crate::error::ApiError;
use crate::metrics::{AbortLabels, FinishLabels, Metrics};

/// Lives as long as the answer.
pub(super) struct RequestMeter {
    metrics: Arc<Metrics>,
    arrived: Instant,
    prompt_tokens: u64,
    generation_tokens: u64,
    /// When each choice last had a token.
    last_token: Vec<Option<Instant>>,
    open: u64,
    stopped: u64,
    cut: u64,
    failed: u64,
    /// Choices that a stop string ended, which the engine would have gone on with.
    stop_strings: u64,
    merged_tokens: u64,
}

impl RequestMeter {
    /// Starts at arrival.
    pub(super) fn new(metrics: Arc<Metrics>, arrived: Instant) -> Self {
        Self {
            metrics,
            arrived,
            prompt_tokens: 0,
            generation_tokens: 0,
            last_token: Vec::new(),
            open: 0,
            stopped: 0,
            cut: 0,
            failed: 0,
            stop_strings: 0,
            merged_tokens: 0,
        }
    }

    /// Before the prompts are submitted, each time that they are.
    pub(super) fn begin(&mut self) {
        self.prompt_tokens = 0;
        self.generation_tokens = 0;
        self.last_token.clear();
        (self.open, self.stopped, self.cut, self.stop_strings) = (0, 0, 0, 0);
    }

    /// An engine was lost, and another takes the request.
    pub(super) fn replayed(&self) {
        self.metrics.http.replays.inc();
    }

    pub(super) fn submitted(&mut self, prompt_tokens: u64, samples: u32) {
        self.prompt_tokens += prompt_tokens;
        self.open += u64::from(samples);
        self.last_token.resize(self.open as usize, None);
    }

    pub(super) fn read(&mut self, events: &[ChoiceEvent]) {
        let now = Instant::now();
        for event in events {
            let count = event.delta.token_ids.len() as u64;
            if count > 0 {
                self.tokens(event.index as usize, count, now);
            }
            if let Some(started) = &event.started {
                self.metrics.http.stages.queue.observe(started.queue);
                self.metrics.http.stages.prefill.observe(started.prefill);
            }
            self.stop_strings += u64::from(event.delta.stopped);
            match event.finish {
                None => continue,
                Some(Finish::Stop) => self.stopped += 1,
                Some(Finish::Length) => self.cut += 1,
            }
            self.open = self.open.saturating_sub(1);
        }
    }

    /// The whole request ended with an error.
    pub(super) fn failed(&mut self, failure: &ApiError) {
        let open = std::mem::take(&mut self.open);
        self.failed += open;
        // Those that the engine has not ended by itself.
        let cause = match failure {
            ApiError::SlowReader(_) => "slow_reader",
            ApiError::Draining => "drain",
            _ => return,
        };
        self.metrics.http.aborted.get_or_create(&AbortLabels { cause }).inc_by(open);
    }

    fn tokens(&mut self, index: usize, count: u64, now: Instant) {
        let http = &self.metrics.http;
        if self.generation_tokens == 0 {
            http.time_to_first_token.observe(now - self.arrived);
        }
        self.generation_tokens += count;
        self.merged_tokens += count - 1;
        let Some(last) = self.last_token.get_mut(index) else {
            return;
        };
        if let Some(before) = last.replace(now) {
            let each = (now - before).as_nanos() / u128::from(count);
            http.inter_token_latency.observe_many(Duration::from_nanos(each as u64), count);
        }
    }
}

impl Drop for RequestMeter {
    fn drop(&mut self) {
        let http = &self.metrics.http;
        if self.prompt_tokens == 0 {
            // Refused by the engine before anything was submitted.
            return;
        }
        http.request_latency.observe(self.arrived.elapsed());
        http.prompt_tokens.inc_by(self.prompt_tokens);
        http.generation_tokens.inc_by(self.generation_tokens);
        http.merged_tokens.inc_by(self.merged_tokens);
        let ends =
            [("stop", self.stopped), ("length", self.cut), ("error", self.failed), ("abort", self.open)];
        for (reason, count) in ends.into_iter().filter(|&(_, count)| count > 0) {
            http.finished.get_or_create(&FinishLabels { reason }).inc_by(count);
        }
        let aborts = [("stop_string", self.stop_strings), ("client", self.open)];
        for (cause, count) in aborts.into_iter().filter(|&(_, count)| count > 0) {
            http.aborted.get_or_create(&AbortLabels { cause }).inc_by(count);
        }
    }
}
