//! How many generation requests are served at once. A request beyond the limit is refused at
//! once, before its body is read; nothing queues here.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::error::ApiError;
use crate::lifecycle::{Lifecycle, OpenRequest, Phase};
use crate::metrics::Metrics;
use crate::queue::retry_after_s;

/// The gate in front of generation routes.
#[derive(Debug, Clone)]
pub struct Admission {
    permits: Arc<Semaphore>,
    limit: usize,
    pace: Arc<Pace>,
    ages: Arc<Ages>,
}

/// When the requests in flight came, oldest first.
#[derive(Debug, Default)]
struct Ages {
    came: Mutex<(u64, BTreeMap<u64, Instant>)>,
}

impl Ages {
    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Instant>)> {
        self.came.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self) -> u64 {
        let (next, came) = &mut *self.lock();
        *next += 1;
        came.insert(*next, Instant::now());
        *next
    }

    fn remove(&self, number: u64) {
        self.lock().1.remove(&number);
    }
}

/// How often a place comes free.
#[derive(Debug, Default)]
struct Pace {
    measured: Mutex<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    last: Option<Instant>,
    /// From one end of a request to the next, a fading mean.
    interval_s: f64,
}

/// What a new interval counts for in the mean.
const PACE_WEIGHT: f64 = 0.1;

impl Pace {
    fn ended(&self) {
        let now = Instant::now();
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = measured.last.replace(now) {
            let interval_s = (now - last).as_secs_f64();
            measured.interval_s += PACE_WEIGHT * (interval_s - measured.interval_s);
        }
    }

    fn retry_after_s(&self) -> u32 {
        let measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        retry_after_s(measured.interval_s)
    }
}

/// One admitted request, until its answer is out or dropped.
#[derive(Debug)]
pub struct Admitted {
    metrics: Arc<Metrics>,
    pace: Arc<Pace>,
    ages: Arc<Ages>,
    number: u64,
    _permit: OwnedSemaphorePermit,
    _open: OpenRequest,
}

impl Admission {
    /// For `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.min(Semaphore::MAX_PERMITS);
        Self { permits: Arc::new(Semaphore::new(limit)), limit, pace: Arc::default(), ages: Arc::default() }
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
            let message = format!(
                "The server already has {limit} requests, its limit (--max-inflight-requests); try again later."
            );
            ApiError::Overloaded { message, retry_after_s: self.pace.retry_after_s() }
        })?;
        metrics.http.in_flight.inc();
        Ok(Admitted {
            metrics: Arc::clone(metrics),
            pace: Arc::clone(&self.pace),
            ages: Arc::clone(&self.ages),
            number: self.ages.add(),
            _permit: permit,
            _open: open,
        })
    }

    /// How long the oldest request has been in flight; zero without any.
    pub fn oldest_age(&self) -> Duration {
        self.ages.lock().1.first_key_value().map_or(Duration::ZERO, |(_, came)| came.elapsed())
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
        self.pace.ended();
        self.ages.remove(self.number);
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
