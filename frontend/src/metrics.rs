//! Every metric of the frontend: name, unit, meaning. Reading them waits for nobody.

mod engine;

use prometheus_client::registry::Registry;

use engine::EngineFamilies;
pub use engine::{EngineHost, EngineMetrics};

/// Counters and histograms, updated without locks on the request path.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    engines: EngineFamilies,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let engines = EngineFamilies::register(&mut registry);
        Self { registry, engines }
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

    /// The metrics of one engine, at their idle values.
    pub fn engine(&self, name: &str, host: EngineHost) -> EngineMetrics {
        self.engines.of(name, host)
    }
}
