//! Engines as the rest of the frontend sees them, and the only code that knows protobuf.

mod address;
mod backoff;
mod check;
mod child;
mod client;
mod convert;
mod frame;
mod generation;
mod ledger;
mod pool;
pub mod session;
mod supervisor;
pub mod types;

/// The wire types; for this module, and for the scripted engine of its tests.
#[expect(missing_docs, clippy::pedantic, clippy::large_enum_variant, reason = "generated")]
pub mod proto {
    include!("gen/rung.engine.v1.rs");
}

use std::pin::Pin;
use std::sync::Arc;

pub use address::EngineAddress;
pub use client::{ClientError, EngineClient};
pub use generation::{AbortSink, Generation, GenerationSink, Push};
pub use pool::{Attached, EnginePool};
pub use supervisor::{StartError, Supervisor};
use types::{EngineError, GenerateRequest};

use crate::model::ServedModel;

/// Somewhere to send requests: one engine, a pool of them, or a scripted one in tests.
pub trait Engine: Send + Sync + 'static {
    /// The model of the engines that are ready; `None` while none is.
    fn model(&self) -> Option<Arc<ServedModel>>;

    /// Waits until an engine is ready.
    fn ready(&self) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Starts a generation. Never blocks: an engine that cannot take the request says so.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, EngineError>;
}
