//! The mailbox between the session reader and one request: deltas merge while nobody reads, up to
//! a number of bytes, so one slow client neither blocks the session nor fills the memory.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use super::types::{EngineError, EngineErrorCode, EngineFinish, SampleDelta};

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
    /// Closed because the reader was too slow, and the engine has not been told.
    to_abort: bool,
}

struct Inbox {
    slots: Vec<Slot>,
    /// What is pending takes about so many bytes.
    unread_bytes: usize,
    max_unread_bytes: usize,
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

impl Inbox {
    /// Gives up on a reader that has left too much: every open sample ends with an error.
    fn overflow(&mut self) {
        let error = EngineError {
            code: EngineErrorCode::Unread,
            message: format!(
                "The client reads too slowly: more than {} bytes of the answer wait for it (--max-unread-bytes).",
                self.max_unread_bytes
            ),
        };
        for slot in self.slots.iter_mut().filter(|slot| !slot.closed) {
            let finish = Some(EngineFinish::Error(error.clone()));
            slot.pending = SampleDelta { finish, ..SampleDelta::default() };
            (slot.dirty, slot.closed, slot.to_abort) = (true, true, true);
        }
    }
}

/// The reading end. Dropping it aborts every sample that has not finished.
pub struct Generation {
    mailbox: Arc<Mailbox>,
    abort: Arc<dyn AbortSink>,
    open: usize,
}

/// What became of a delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Push {
    /// It will be read.
    Kept,
    /// The sample is closed: nobody waits for it.
    Dropped,
    /// The reader takes too little: the sample has ended with an error, and the caller must abort
    /// it. Told once per sample.
    Overfull,
}

/// The writing end, held by the session reader.
#[derive(Clone)]
pub struct GenerationSink {
    mailbox: Arc<Mailbox>,
}

impl Generation {
    /// A connected pair for `samples` answers, of which so many bytes may wait for the reader.
    pub fn new(
        samples: u32,
        max_unread_bytes: Option<usize>,
        abort: Arc<dyn AbortSink>,
    ) -> (Self, GenerationSink) {
        let slot = || Slot { pending: SampleDelta::default(), dirty: false, closed: false, to_abort: false };
        let slots = (0..samples).map(|_| slot()).collect();
        let max_unread_bytes = max_unread_bytes.unwrap_or(usize::MAX);
        let inbox = Inbox { slots, unread_bytes: 0, max_unread_bytes, reader: None };
        let mailbox = Arc::new(Mailbox { inbox: Mutex::new(inbox) });
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
            inbox.unread_bytes = 0;
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
    /// Appends to a sample's pending delta.
    pub fn push(&self, sample: u32, delta: SampleDelta) -> Push {
        let (reader, outcome) = {
            let mut guard = self.mailbox.lock();
            let inbox = &mut *guard;
            let Some(slot) = inbox.slots.get_mut(sample as usize) else { return Push::Dropped };
            if slot.closed {
                let is_news = std::mem::take(&mut slot.to_abort);
                return if is_news { Push::Overfull } else { Push::Dropped };
            }
            slot.dirty = true;
            inbox.unread_bytes += delta.size_bytes();
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
            let is_overfull = inbox.unread_bytes > inbox.max_unread_bytes;
            if is_overfull {
                inbox.overflow();
            }
            let ended = std::mem::take(&mut inbox.slots[sample as usize].to_abort);
            (inbox.reader.take(), if ended { Push::Overfull } else { Push::Kept })
        };
        if let Some(reader) = reader {
            reader.wake();
        }
        outcome
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
