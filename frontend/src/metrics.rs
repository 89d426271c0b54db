//! Every metric of the frontend: name, unit, meaning.

use prometheus_client::registry::Registry;

/// Counters and histograms, updated without locks on the request path.
#[derive(Debug, Default)]
pub struct Metrics {
    registry: Registry,
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
