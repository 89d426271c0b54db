//! A histogram of durations without a lock: one atomic add per observation and bucket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Counts durations by upper bound. Cheap to clone; clones share the counts.
#[derive(Debug, Clone)]
pub struct DurationHistogram {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Upper bounds in seconds, rising; a last bucket takes the rest.
    bounds: &'static [f64],
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl DurationHistogram {
    /// With these upper bounds in seconds.
    pub fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { inner: Arc::new(Inner { bounds, counts, sum_ns: AtomicU64::new(0) }) }
    }

    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        self.observe_many(duration, 1);
    }

    /// Counts the same duration `count` times.
    pub fn observe_many(&self, duration: Duration, count: u64) {
        let seconds = duration.as_secs_f64();
        let bucket = self.inner.bounds.partition_point(|&bound| bound < seconds);
        self.inner.counts[bucket].fetch_add(count, Ordering::Relaxed);
        let sum_ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).saturating_mul(count);
        self.inner.sum_ns.fetch_add(sum_ns, Ordering::Relaxed);
    }
}

impl EncodeMetric for DurationHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let bounds = self.inner.bounds.iter().copied().chain([f64::INFINITY]);
        let counts = self.inner.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
        let total = buckets.iter().map(|(_, count)| count).sum();
        let sum = Duration::from_nanos(self.inner.sum_ns.load(Ordering::Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, total, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn durations_are_counted_below_their_bounds_and_up_to_infinity() {
        let histogram = DurationHistogram::new(&[0.01, 0.1]);
        histogram.observe(Duration::from_millis(10));
        histogram.observe_many(Duration::from_millis(20), 3);
        histogram.observe(Duration::from_secs(9));
        let mut registry = Registry::default();
        registry.register("wait", "Help", histogram);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines = [
            "wait_sum 9.07",
            "wait_count 5",
            "wait_bucket{le=\"0.01\"} 1",
            "wait_bucket{le=\"0.1\"} 4",
            "wait_bucket{le=\"+Inf\"} 5",
        ];
        for line in lines {
            assert!(text.contains(line), "{text}");
        }
    }
}
