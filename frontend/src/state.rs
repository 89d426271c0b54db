//! What request handlers may touch.

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::admission::Admission;
use crate::config::Config;
use crate::engine::Engine;
use crate::error::ApiError;
use crate::lifecycle::Lifecycle;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::queue::{PromptQueue, QueueLimits};

/// Shared by all requests; cheap to clone.
#[derive(Clone)]
pub struct AppState {
    /// Checked settings.
    pub config: Arc<Config>,
    /// Where requests go.
    pub engine: Arc<dyn Engine>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Whether requests are taken.
    pub lifecycle: Lifecycle,
    /// The gate in front of generation routes.
    pub admission: Admission,
    /// Prompts that wait for their first token.
    pub queue: PromptQueue,
    workers: Arc<Semaphore>,
}

impl AppState {
    /// With as many text workers as the process may use cores.
    pub fn new(
        config: Arc<Config>,
        engine: Arc<dyn Engine>,
        metrics: Arc<Metrics>,
        lifecycle: Lifecycle,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let admission = Admission::new(config.limits.max_inflight_requests);
        let queue = PromptQueue::new(QueueLimits {
            max_queued_tokens: config.limits.max_queued_tokens,
            max_queue_wait: config.limits.max_queue_wait,
        });
        Self {
            config,
            engine,
            metrics,
            lifecycle,
            admission,
            queue,
            workers: Arc::new(Semaphore::new(cores)),
        }
    }

    /// The model that is being served, or 503.
    pub fn model(&self) -> Result<Arc<ServedModel>, ApiError> {
        self.engine
            .model()
            .ok_or_else(|| ApiError::Unavailable("No engine is ready; try again in a moment.".to_owned()))
    }

    /// Runs CPU-bound work (JSON, templates, tokenizing) off the threads that serve sockets, as
    /// many pieces at once as there are cores. A panic in it is this request's error alone.
    pub async fn off_thread<T, F>(&self, work: F) -> Result<T, ApiError>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        let internal = || ApiError::Internal("The server failed while it read this request.".to_owned());
        let permit = Arc::clone(&self.workers).acquire_owned().await.map_err(|_| internal())?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        task.await.map_err(|_| internal())?
    }
}
