//! How much prompt work waits for its first token, and how fast that wait has been draining: a
//! request whose predicted wait is too long is refused at once, with the time to come back.
//!
//! Knows no HTTP and no engine; the clock is tokio's, so tests can pause it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Half of what was measured is forgotten after so much time with work to do.
const HALF_LIFE_S: f64 = 10.0;
/// Less busy time than this tells no rate.
const SHORTEST_MEASURE_S: f64 = 0.5;
/// Whatever is predicted, a client is told to wait between these.
const RETRY_AFTER_S: (f64, f64) = (1.0, 60.0);

/// The whole seconds after which a client is told to come back.
pub(crate) fn retry_after_s(wait_s: f64) -> u32 {
    let (least, most) = RETRY_AFTER_S;
    wait_s.clamp(least, most).ceil() as u32
}

/// Bounds of the queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Prompt tokens that may wait for their request's first token, all requests together.
    pub max_queued_tokens: u64,
    /// How long the last of them may have to wait, as far as can be predicted.
    pub max_queue_wait: Duration,
}

/// Why a request may not wait, and when to come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueFull {
    /// One sentence.
    pub message: String,
    /// Seconds until there is likely to be room.
    pub retry_after_s: u32,
}

impl QueueFull {
    fn after(message: String, wait_s: Option<f64>) -> Self {
        Self { message, retry_after_s: retry_after_s(wait_s.unwrap_or(0.0)) }
    }
}

/// The queue, shared by all requests. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PromptQueue {
    limits: QueueLimits,
    state: Arc<Mutex<State>>,
}

/// The place of one request, until its first token or its end.
#[derive(Debug)]
pub struct QueuePlace {
    state: Arc<Mutex<State>>,
    tokens: u64,
}

#[derive(Debug)]
struct State {
    queued: u64,
    /// Tokens drained and seconds with work, both fading together.
    drained: f64,
    busy_s: f64,
    looked: Instant,
}

impl State {
    /// Brings the measure up to now.
    fn advance(&mut self) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.looked, now)).as_secs_f64();
        if self.queued > 0 {
            let kept = 0.5f64.powf(passed / HALF_LIFE_S);
            self.drained *= kept;
            self.busy_s = self.busy_s * kept + passed;
        }
    }

    /// Tokens a second, if enough has been seen.
    fn rate(&self) -> Option<f64> {
        (self.busy_s >= SHORTEST_MEASURE_S && self.drained > 0.0).then(|| self.drained / self.busy_s)
    }
}

impl PromptQueue {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        let state = State { queued: 0, drained: 0.0, busy_s: 0.0, looked: Instant::now() };
        Self { limits, state: Arc::new(Mutex::new(state)) }
    }

    /// Takes a place for a request of so many prompt tokens. An empty queue takes any.
    pub fn enter(&self, tokens: u64) -> Result<QueuePlace, QueueFull> {
        let mut state = lock(&self.state);
        state.advance();
        let (queued, rate) = (state.queued, state.rate());
        if queued > 0 {
            let most = self.limits.max_queued_tokens;
            if queued + tokens > most {
                let excess = queued + tokens - most;
                return Err(QueueFull::after(
                    format!(
                        "{queued} prompt tokens wait already, and {tokens} more exceed the limit of {most} \
                         (--max-queued-tokens); try again later."
                    ),
                    rate.map(|rate| excess as f64 / rate),
                ));
            }
            let wait_s = rate.map_or(0.0, |rate| (queued + tokens) as f64 / rate);
            let longest_s = self.limits.max_queue_wait.as_secs_f64();
            if wait_s > longest_s {
                return Err(QueueFull::after(
                    format!(
                        "The first token would come after {wait_s:.0} s, longer than the {longest_s} s that requests \
                         may wait here (--max-queue-wait); try again later."
                    ),
                    Some(wait_s - longest_s),
                ));
            }
        }
        state.queued += tokens;
        Ok(QueuePlace { state: Arc::clone(&self.state), tokens })
    }

    /// Prompt tokens that wait now.
    pub fn queued_tokens(&self) -> u64 {
        lock(&self.state).queued
    }
}

impl QueuePlace {
    /// The prompt was computed: its tokens count as drained.
    pub fn served(mut self) {
        let mut state = lock(&self.state);
        state.advance();
        state.drained += self.tokens as f64;
        state.queued = state.queued.saturating_sub(std::mem::take(&mut self.tokens));
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        if self.tokens > 0 {
            let mut state = lock(&self.state);
            state.advance();
            state.queued = state.queued.saturating_sub(self.tokens);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(max_queued_tokens: u64, wait_s: u64) -> PromptQueue {
        PromptQueue::new(QueueLimits { max_queued_tokens, max_queue_wait: Duration::from_secs(wait_s) })
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_queue_takes_any_request_and_a_full_one_none() {
        let queue = queue(100, 60);
        let large = queue.enter(1000).unwrap();
        let refused = queue.enter(1).unwrap_err();
        assert!(refused.message.contains("1000") && refused.message.contains("--max-queued-tokens"));
        assert_eq!(refused.retry_after_s, 1, "nothing was measured yet");
        drop(large);
        assert_eq!(queue.queued_tokens(), 0);
        let places: Vec<QueuePlace> = (0..4).map(|_| queue.enter(25).unwrap()).collect();
        assert!(queue.enter(1).is_err());
        drop(places);
        assert!(queue.enter(100).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_is_predicted_from_the_measured_rate() {
        let queue = queue(1_000_000, 10);
        for _ in 0..20 {
            let place = queue.enter(100).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
            place.served();
        }
        // An hour without work tells nothing of the rate, which is 100 a second.
        tokio::time::advance(Duration::from_hours(1)).await;
        let _first = queue.enter(500).unwrap();
        let _second = queue.enter(400).unwrap();
        let refused = queue.enter(1100).unwrap_err();
        assert!(
            refused.message.contains("20 s") && refused.message.contains("--max-queue-wait"),
            "{refused:?}"
        );
        assert_eq!(refused.retry_after_s, 10);
        assert!(queue.enter(50).is_ok(), "a shorter one still fits");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_leave_are_no_drain() {
        let queue = queue(1_000_000, 1);
        for _ in 0..10 {
            let place = queue.enter(1000).unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
            drop(place);
        }
        let place = queue.enter(10).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        place.served();
        let _waiting = queue.enter(10).unwrap();
        let refused = queue.enter(1_000).unwrap_err();
        assert_eq!(refused.retry_after_s, 60, "the rate is about a token a second, not a thousand");
    }
}
