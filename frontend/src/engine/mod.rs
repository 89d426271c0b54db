//! Engines as the rest of the frontend sees them, and the only code that knows protobuf.

mod generation;
pub mod types;

use std::sync::Arc;

pub use generation::{AbortSink, Generation, GenerationSink};
use types::{EngineError, GenerateRequest};

use crate::model::ServedModel;

/// Somewhere to send requests: one engine, a pool of them, or a scripted one in tests.
pub trait Engine: Send + Sync + 'static {
    /// The model of the engines that are ready; `None` while none is.
    fn model(&self) -> Option<Arc<ServedModel>>;

    /// Starts a generation. Never blocks: an engine that cannot take the request says so.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, EngineError>;
}
