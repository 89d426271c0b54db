//! Whether the server takes requests, and how many are still open. Shutdown is an input: tests
//! drive it without signals.

use std::sync::Arc;

use tokio::sync::watch;

/// Where the server is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Takes requests.
    Serving,
    /// Refuses new requests with 503; open ones go on.
    Draining,
    /// The drain deadline has passed: open streams end with an error event.
    Closing,
}

/// Shared by everything that must act when the phase changes. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Lifecycle {
    phase: Arc<watch::Sender<Phase>>,
    open: Arc<watch::Sender<usize>>,
}

/// Counts one open request for as long as it lives; held by the response body.
#[derive(Debug)]
pub struct OpenRequest {
    open: Arc<watch::Sender<usize>>,
}

impl Lifecycle {
    /// Starts serving.
    pub fn new() -> Self {
        Self { phase: Arc::new(watch::Sender::new(Phase::Serving)), open: Arc::new(watch::Sender::new(0)) }
    }

    /// The present phase.
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Moves on to a later phase; never back.
    pub fn advance(&self, phase: Phase) {
        self.phase.send_if_modified(|current| {
            let later = phase as u8 > *current as u8;
            if later {
                *current = phase;
            }
            later
        });
    }

    /// Waits until `phase` or a later one is reached.
    pub async fn reached(&self, phase: Phase) {
        let mut phases = self.phase.subscribe();
        // The sender lives in `self`, so waiting cannot fail.
        let _ = phases.wait_for(|current| *current as u8 >= phase as u8).await;
    }

    /// Counts a request until the guard is dropped.
    pub fn open_request(&self) -> OpenRequest {
        self.open.send_modify(|count| *count += 1);
        OpenRequest { open: Arc::clone(&self.open) }
    }

    /// Requests open now.
    pub fn num_open(&self) -> usize {
        *self.open.borrow()
    }

    /// Waits until no request is open.
    pub async fn idle(&self) {
        let mut open = self.open.subscribe();
        let _ = open.wait_for(|count| *count == 0).await;
    }
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.open.send_modify(|count| *count -= 1);
    }
}
