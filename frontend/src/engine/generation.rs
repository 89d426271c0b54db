//! The mailbox between the session reader and one request: deltas merge while nobody reads, so
//! it is bounded by the request's own token limit, and one slow client never blocks the session.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::types::{EngineError, EngineFinish, SampleDelta};

/// Told when samples that the engine may still be computing are no longer wanted.
pub trait AbortSink: Send + Sync {
    /// Abort one sample of the request. Called at most once per sample, never after its finish.
    fn abort(&self, sample: u32);
}

struct Slot {
    pending: SampleDelta,
    /// Something to read.
    dirty: bool,
    /// Terminal delta pushed, or aborted by the reader: later pushes are dropped.
    closed: bool,
}

struct Inbox {
    slots: Vec<Slot>,
    /// The reader, while it waits.
    reader: Option<Waker>,
}

struct Mailbox {
    inbox: Mutex<Inbox>,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reading end. Dropping it aborts every sample that has not finished.
pub struct Generation {
    mailbox: Arc<Mailbox>,
    abort: Arc<dyn AbortSink>,
    open: usize,
}

/// The writing end, held by the session reader.
#[derive(Clone)]
pub struct GenerationSink {
    mailbox: Arc<Mailbox>,
}

impl Generation {
    /// A connected pair for `samples` answers.
    pub fn new(samples: u32, abort: Arc<dyn AbortSink>) -> (Self, GenerationSink) {
        let slots = (0..samples)
            .map(|_| Slot { pending: SampleDelta::default(), dirty: false, closed: false })
            .collect();
        let mailbox = Arc::new(Mailbox { inbox: Mutex::new(Inbox { slots, reader: None }) });
        let sink = GenerationSink { mailbox: Arc::clone(&mailbox) };
        (Self { mailbox, abort, open: samples as usize }, sink)
    }

    /// Waits until something is new and returns it, one entry per sample that has news, in
    /// sample order. `None` once every sample has finished or was aborted. Cancel-safe.
    pub async fn next(&mut self) -> Option<Vec<(u32, SampleDelta)>> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// [`Generation::next`] for callers that wait for several things.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Vec<(u32, SampleDelta)>>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let mut inbox = self.mailbox.lock();
        let mut news = Vec::new();
        for (sample, slot) in inbox.slots.iter_mut().enumerate() {
            if slot.dirty {
                slot.dirty = false;
                let delta = std::mem::take(&mut slot.pending);
                if delta.finish.is_some() {
                    self.open -= 1;
                }
                news.push((sample as u32, delta));
            }
        }
        if !news.is_empty() {
            return Poll::Ready(Some(news));
        }
        // Under the lock, so that no push comes between the look and the wait.
        match &mut inbox.reader {
            Some(reader) => reader.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Stops one sample: nothing more is read from it and the engine is told. No effect on a
    /// sample that has finished.
    pub fn abort(&mut self, sample: u32) {
        let was_open = {
            let mut inbox = self.mailbox.lock();
            let slot = &mut inbox.slots[sample as usize];
            // A terminal delta that was pushed but not read still counts as open here, though
            // the engine has nothing left to abort.
            let unread_finish = slot.dirty && slot.pending.finish.is_some();
            if slot.closed && !unread_finish {
                return;
            }
            slot.pending = SampleDelta::default();
            slot.dirty = false;
            let was_live = !slot.closed;
            slot.closed = true;
            was_live
        };
        self.open -= 1;
        if was_open {
            self.abort.abort(sample);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        let live: Vec<u32> = {
            let mut inbox = self.mailbox.lock();
            (0u32..)
                .zip(inbox.slots.iter_mut())
                .filter(|(_, slot)| !slot.closed)
                .map(|(sample, slot)| {
                    slot.closed = true;
                    sample
                })
                .collect()
        };
        for sample in live {
            self.abort.abort(sample);
        }
    }
}

impl GenerationSink {
    /// Appends to a sample's pending delta. Returns false when the sample is closed, so that the
    /// caller can count the dropped row.
    pub fn push(&self, sample: u32, delta: SampleDelta) -> bool {
        let reader = {
            let mut inbox = self.mailbox.lock();
            let Some(slot) = inbox.slots.get_mut(sample as usize) else { return false };
            if slot.closed {
                return false;
            }
            slot.dirty = true;
            slot.closed = delta.finish.is_some();
            let pending = &mut slot.pending;
            if pending.prompt_logprobs.is_empty() {
                pending.prompt_logprobs = delta.prompt_logprobs;
            } else {
                pending.prompt_logprobs.extend(delta.prompt_logprobs);
            }
            if pending.token_ids.is_empty() {
                pending.token_ids = delta.token_ids;
                pending.logprobs = delta.logprobs;
            } else {
                pending.token_ids.extend_from_slice(&delta.token_ids);
                pending.logprobs.extend(delta.logprobs);
            }
            pending.started = pending.started.or(delta.started);
            if delta.finish.is_some() {
                pending.finish = delta.finish;
            }
            inbox.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
        true
    }

    /// Ends every sample that is still open with the same error.
    pub fn fail(&self, error: &EngineError) {
        let samples = self.mailbox.lock().slots.len();
        for sample in 0..samples as u32 {
            let finish = Some(EngineFinish::Error(error.clone()));
            self.push(sample, SampleDelta { finish, ..SampleDelta::default() });
        }
    }
}
