//! Every metric of the frontend: name, unit, meaning. Reading them waits for nobody.

mod engine;
mod histogram;
mod http;

use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::registry::Registry;

use engine::EngineFamilies;
pub use engine::{EngineHost, EngineMetrics};
pub use histogram::DurationHistogram;
pub use http::{AbortLabels, FinishLabels, HttpMetrics, RejectLabels, RequestLabels, StageHistograms};

/// Counters and histograms, updated without locks on the request path.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Requests as clients see them.
    pub http: HttpMetrics,
    engines: EngineFamilies,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let http = HttpMetrics::register(&mut registry);
        let engines = EngineFamilies::register(&mut registry);
        Self { registry, http, engines }
    }
}

impl Metrics {
    /// The OpenMetrics text of `/metrics`; `model` labels the metrics that dashboards select by it.
    pub fn render(&self, model: &str) -> String {
        let labels = [("model_name".into(), model.to_owned().into())];
        let mut aliases = Registry::with_labels(labels.into_iter());
        self.http.register_aliases(&mut aliases);
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode_registry(&mut text, &aliases);
        let _ = encode_eof(&mut text);
        text
    }

    /// The metrics of one engine, at their idle values.
    pub fn engine(&self, name: &str, host: EngineHost) -> EngineMetrics {
        self.engines.of(name, host)
    }
}
