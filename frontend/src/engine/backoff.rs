//! Delays between attempts: doubling, bounded, and spread so that many do not try at once.

use std::time::Duration;

use tokio::time::Instant;

const SHORTEST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);
/// An attempt that held for so long starts the series anew.
const STABLE: Duration = Duration::from_mins(1);

/// The delays of one thing that is tried again and again.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: SHORTEST }
    }

    /// The delay after an attempt that began working at `working_since`, if it ever did: between
    /// half and all of the present step.
    pub(super) fn after(&mut self, working_since: Option<Instant>) -> Duration {
        if working_since.is_some_and(|since| since.elapsed() >= STABLE) {
            self.next = SHORTEST;
        }
        let step = self.next;
        self.next = (step * 2).min(LONGEST);
        step.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn delays_double_up_to_a_bound_and_start_anew_after_a_stable_minute() {
        let mut backoff = Backoff::new();
        for step in [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0] {
            let delay = backoff.after(None).as_secs_f64();
            assert!((step / 2.0..=step).contains(&delay), "{delay} is not within half and all of {step}");
        }
        let working_since = Instant::now();
        tokio::time::advance(STABLE / 2).await;
        assert!(backoff.after(Some(working_since)) >= LONGEST / 2);
        tokio::time::advance(STABLE / 2).await;
        assert!(backoff.after(Some(working_since)) <= SHORTEST);
    }
}
