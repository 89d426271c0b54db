//! How many generation requests are served at once. A request beyond the limit is refused at
//! once, before its body is read; nothing queues here.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, OpenRequest, Phase};
use crate::metrics::Metrics;

/// The gate in front of generation routes.
#[derive(Debug, Clone)]
pub struct Admission {
    permits: Arc<Semaphore>,
    limit: usize,
}

/// One admitted request, until its answer is out or dropped.
#[derive(Debug)]
pub struct Admitted {
    metrics: Arc<Metrics>,
    _permit: OwnedSemaphorePermit,
    _open: OpenRequest,
}

impl Admission {
    /// For `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(limit)), limit }
    }

    /// Lets a request in, or says why not.
    pub fn admit(&self, lifecycle: &Lifecycle, metrics: &Arc<Metrics>) -> Result<Admitted, ApiError> {
        // Counted before the phase is read: a drain that starts now either sees this request
        // or is seen by it.
        let open = lifecycle.open_request();
        if lifecycle.phase() != Phase::Serving {
            return Err(ApiError::Draining);
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| {
            let limit = self.limit;
            ApiError::Overloaded(format!(
                "The server already has {limit} requests, its limit; try again later."
            ))
        })?;
        metrics.http.in_flight.inc();
        Ok(Admitted { metrics: Arc::clone(metrics), _permit: permit, _open: open })
    }
}

impl Admitted {
    /// Ties the admission to the response's body: it ends when the last byte is handed over or
    /// the client is gone.
    pub fn hold(self, response: Response) -> Response {
        response.map(|body| Body::new(HeldBody { body, _admitted: self }))
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.metrics.http.in_flight.dec();
    }
}

struct HeldBody {
    body: Body,
    _admitted: Admitted,
}

impl HttpBody for HeldBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
