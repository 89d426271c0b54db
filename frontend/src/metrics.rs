//! Every metric of the frontend: name, unit, meaning.

mod histogram;
mod http;

use prometheus_client::registry::Registry;

pub use histogram::DurationHistogram;
pub use http::{FinishLabels, HttpMetrics, RejectLabels, RequestLabels};

/// Counters and histograms, updated without locks on the request path.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests as clients see them.
    pub http: HttpMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let http = HttpMetrics::register(&mut registry);
        Self { registry, http }
    }
}

impl Metrics {
    /// The OpenMetrics text of `/metrics`.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }
}
