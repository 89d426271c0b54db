//! What one session owes: open handles, requests not yet written, aborts not yet written.
//!
//! Pure state behind the session's lock: no I/O, no clock, and no call that can block.

use std::collections::{BTreeMap, HashMap};

use prost::Message;

use super::frame::{Fault, Frame, RowEvent};
use super::generation::{GenerationSink, Push};
use super::types::{
    EngineError, EngineErrorCode, EngineFinish, GenerateRequest, ModelFacts, PromptLogprobs, SampleDelta,
    TokenLogprobs,
};
use super::{convert, proto};

/// Submits that may wait for the stream to take them.
pub(super) const MAX_QUEUED_SUBMITS: usize = 1024;
/// Their bytes together.
pub(super) const MAX_QUEUED_BYTES: usize = convert::MAX_MESSAGE_BYTES;

/// A sample that the engine computes, or will.
struct OpenRow {
    sink: GenerationSink,
    sample: u32,
    /// Present until its Submit is written.
    ticket: Option<u64>,
    top_logprobs: Option<u32>,
    prompt_top_logprobs: u32,
    /// Prompt tokens whose logprobs are still to come.
    prompt_room: usize,
    /// Tokens that it may still receive.
    room: u32,
    received: u32,
    last_token: Option<u32>,
    started: bool,
    /// The last Step in which it had a row.
    last_seq: u64,
}

enum Row {
    Open(OpenRow),
    /// No longer wanted. Kept until the engine ends it, so that its handle is not used again.
    Aborted {
        ticket: Option<u64>,
    },
}

struct QueuedSubmit {
    message: proto::Submit,
    bytes: usize,
    /// Samples that are still wanted.
    wanted: usize,
}

/// What the frames of one Step came to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Applied {
    /// Events for handles that nobody waits for any more.
    pub(super) dropped: u64,
    /// Requests that were ended because their part of the frame was wrong.
    pub(super) faults: u64,
    /// Samples that were ended because their reader is too slow.
    pub(super) aborts: u64,
}

#[derive(Default)]
pub(super) struct Ledger {
    rows: HashMap<u32, Row>,
    num_open: usize,
    next_handle: u32,
    /// By ticket, which counts up: the order of submission.
    queue: BTreeMap<u64, QueuedSubmit>,
    queued_bytes: usize,
    next_ticket: u64,
    /// Handles whose Abort is to be written; each stands here once.
    aborts: Vec<u32>,
    /// Why nothing can be submitted any more.
    closed: Option<EngineError>,
}

impl Ledger {
    pub(super) fn num_open(&self) -> usize {
        self.num_open
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Queues a request and returns its handles, one per sample. `sink` is called with them once
    /// nothing can fail any more.
    pub(super) fn submit<T>(
        &mut self,
        request: &GenerateRequest,
        mut message: proto::Submit,
        facts: &ModelFacts,
        pair: impl FnOnce(Vec<u32>) -> (T, GenerationSink),
    ) -> Result<T, EngineError> {
        if let Some(error) = &self.closed {
            return Err(error.clone());
        }
        message.handles = self.fresh_handles(request.samples);
        let bytes = message.encoded_len();
        convert::check_submit_size(bytes, &facts.limits)?;
        if self.queue.len() >= MAX_QUEUED_SUBMITS || self.queued_bytes + bytes > MAX_QUEUED_BYTES {
            return Err(EngineError {
                code: EngineErrorCode::Overloaded,
                message: format!(
                    "The engine takes requests more slowly than they come: {} requests of {} bytes wait to be sent \
                     ({MAX_QUEUED_SUBMITS} or {MAX_QUEUED_BYTES} bytes may); try again later.",
                    self.queue.len(),
                    self.queued_bytes
                ),
            });
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let context_room = facts.max_model_len.saturating_sub(request.prompt_ids.len() as u32);
        let room = request.stopping.max_tokens.unwrap_or(u32::MAX).min(context_room);
        let (value, sink) = pair(message.handles.clone());
        for (sample, handle) in (0..).zip(&message.handles) {
            let row = OpenRow {
                sink: sink.clone(),
                sample,
                ticket: Some(ticket),
                top_logprobs: convert::expected_top_logprobs(request),
                prompt_top_logprobs: request.prompt_top_logprobs.unwrap_or(0),
                prompt_room: match request.prompt_top_logprobs {
                    Some(_) if sample == 0 => request.prompt_ids.len() - 1,
                    _ => 0,
                },
                room,
                received: 0,
                last_token: None,
                started: false,
                last_seq: 0,
            };
            self.rows.insert(*handle, Row::Open(row));
        }
        let wanted = message.handles.len();
        self.num_open += wanted;
        self.queued_bytes += bytes;
        self.queue.insert(ticket, QueuedSubmit { message, bytes, wanted });
        Ok(value)
    }

    /// Handles count up, past the wrap at 2^32 too, and skip those that have not ended.
    fn fresh_handles(&mut self, count: u32) -> Vec<u32> {
        let mut handles = Vec::with_capacity(count as usize);
        while handles.len() < count as usize {
            let handle = self.next_handle;
            self.next_handle = handle.wrapping_add(1);
            if !self.rows.contains_key(&handle) {
                handles.push(handle);
            }
        }
        handles
    }

    /// The caller wants no more of a handle. Before its Submit is written nothing is sent for it;
    /// afterwards an Abort is.
    pub(super) fn abort(&mut self, handle: u32) {
        let Some(row) = self.rows.get_mut(&handle) else {
            return;
        };
        let Row::Open(open) = row else { return };
        let ticket = open.ticket;
        *row = Row::Aborted { ticket };
        self.num_open -= 1;
        match ticket {
            Some(ticket) => self.unqueue_sample(ticket),
            None => self.aborts.push(handle),
        }
    }

    /// Drops a queued Submit with its last wanted sample.
    fn unqueue_sample(&mut self, ticket: u64) {
        let Some(queued) = self.queue.get_mut(&ticket) else {
            return;
        };
        queued.wanted -= 1;
        if queued.wanted > 0 {
            return;
        }
        if let Some(queued) = self.queue.remove(&ticket) {
            self.queued_bytes -= queued.bytes;
            for handle in queued.message.handles {
                self.rows.remove(&handle);
            }
        }
    }

    /// What to write next: aborts before submissions, and no abort before its submission.
    pub(super) fn next_message(&mut self) -> Option<proto::SessionRequest> {
        use proto::session_request::Message;
        let message = if self.aborts.is_empty() {
            let (_, queued) = self.queue.pop_first()?;
            self.queued_bytes -= queued.bytes;
            self.mark_written(&queued.message.handles);
            Message::Submit(queued.message)
        } else {
            let handles = std::mem::take(&mut self.aborts);
            Message::Abort(proto::Abort { handles: convert::column_of(handles.into_iter()) })
        };
        Some(proto::SessionRequest { message: Some(message) })
    }

    fn mark_written(&mut self, handles: &[u32]) {
        for handle in handles {
            match self.rows.get_mut(handle) {
                Some(Row::Open(open)) => open.ticket = None,
                Some(Row::Aborted { ticket }) => {
                    *ticket = None;
                    self.aborts.push(*handle);
                }
                None => {}
            }
        }
    }

    /// Hands a Step's events to the requests they belong to.
    pub(super) fn apply(&mut self, seq: u64, frame: Frame) -> Applied {
        let mut applied = Applied::default();
        for fault in frame.faults {
            self.fault(&fault, &mut applied);
        }
        for (handle, event) in frame.events {
            let ended = matches!(event, RowEvent::Finished { .. });
            match self.rows.get_mut(&handle) {
                Some(Row::Open(open)) if open.ticket.is_none() => match open.accept(seq, event) {
                    Ok(delta) => {
                        let outcome = open.sink.push(open.sample, delta);
                        // The reader may have let go this instant; its abort is on the way here.
                        applied.dropped += u64::from(outcome == Push::Dropped);
                        if ended {
                            self.forget(handle);
                        } else if outcome == Push::Overfull {
                            applied.aborts += 1;
                            self.abort(handle);
                        }
                    }
                    Err(reason) => self.fault(&Fault { handle, reason, ended }, &mut applied),
                },
                Some(Row::Aborted { ticket: None }) => {
                    // A cancelled row's end is what we asked for; anything else came too late.
                    applied.dropped += u64::from(!ended);
                    if ended {
                        self.forget(handle);
                    }
                }
                _ => applied.dropped += 1,
            }
        }
        applied
    }

    /// Ends the one request that a wrong part of a frame names.
    fn fault(&mut self, fault: &Fault, applied: &mut Applied) {
        match self.rows.get(&fault.handle) {
            Some(Row::Open(open)) if open.ticket.is_none() => {
                applied.faults += 1;
                open.fail(EngineError {
                    code: EngineErrorCode::Internal,
                    message: format!("The engine broke the protocol for this request: {}.", fault.reason),
                });
                if !fault.ended {
                    self.abort(fault.handle);
                }
            }
            Some(Row::Aborted { ticket: None }) => {}
            _ => return,
        }
        if fault.ended {
            self.forget(fault.handle);
        }
    }

    fn forget(&mut self, handle: u32) {
        if let Some(Row::Open(_)) = self.rows.remove(&handle) {
            self.num_open -= 1;
        }
    }

    /// The engine did not accept a Submit. Returns how many handles it named that are not open.
    pub(super) fn reject(&mut self, handles: &[u32], error: &EngineError) -> u64 {
        let mut unknown = 0;
        for handle in handles {
            match self.rows.get(handle) {
                Some(Row::Open(open)) if open.ticket.is_none() => open.fail(error.clone()),
                Some(Row::Aborted { ticket: None }) => {}
                _ => {
                    unknown += 1;
                    continue;
                }
            }
            self.forget(*handle);
        }
        unknown
    }

    /// Ends every open request with `error` and refuses later ones with it. The first call counts.
    pub(super) fn close(&mut self, open_error: &EngineError, later_error: EngineError) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(later_error);
        for row in std::mem::take(&mut self.rows).into_values() {
            if let Row::Open(open) = row {
                open.fail(open_error.clone());
            }
        }
        self.num_open = 0;
        self.queue.clear();
        self.queued_bytes = 0;
        self.aborts.clear();
    }
}

impl OpenRow {
    fn fail(&self, error: EngineError) {
        let finish = Some(EngineFinish::Error(error));
        self.sink.push(self.sample, SampleDelta { finish, ..SampleDelta::default() });
    }

    /// Checks an event against what this row asked for and has received.
    fn accept(&mut self, seq: u64, event: RowEvent) -> Result<SampleDelta, String> {
        match event {
            RowEvent::Started(started) => {
                if self.started || self.received > 0 {
                    return Err("it started twice or after its first token".to_owned());
                }
                self.started = true;
                Ok(SampleDelta { started: Some(started), ..SampleDelta::default() })
            }
            RowEvent::Prompt(prompt_logprobs) => {
                self.check_prompt(&prompt_logprobs)?;
                self.prompt_room -= prompt_logprobs.len();
                Ok(SampleDelta { prompt_logprobs, ..SampleDelta::default() })
            }
            RowEvent::Tokens { ids, logprobs } => {
                if self.prompt_room > 0 {
                    return Err(format!("it went on without {} logprobs of its prompt", self.prompt_room));
                }
                if self.last_seq == seq {
                    return Err("it has two rows in one step".to_owned());
                }
                self.last_seq = seq;
                self.check_logprobs(ids.len(), &logprobs)?;
                let count = ids.len() as u32;
                self.room = self.room.checked_sub(count).ok_or("it has more tokens than were asked for")?;
                self.received += count;
                self.last_token = ids.last().copied().or(self.last_token);
                Ok(SampleDelta { token_ids: ids, logprobs, ..SampleDelta::default() })
            }
            RowEvent::Finished { finish, completion_tokens } => {
                self.check_finish(&finish, completion_tokens)?;
                Ok(SampleDelta { finish: Some(finish), ..SampleDelta::default() })
            }
        }
    }

    fn check_prompt(&self, logprobs: &[PromptLogprobs]) -> Result<(), String> {
        if logprobs.len() > self.prompt_room {
            return Err("it has more logprobs of its prompt than were asked for".to_owned());
        }
        let top_n = self.prompt_top_logprobs as usize;
        match logprobs.iter().find(|token| token.top.len() > top_n || token.rank == 0) {
            Some(token) => Err(format!(
                "a prompt token of rank {} has {} alternatives of {top_n}",
                token.rank,
                token.top.len()
            )),
            None => Ok(()),
        }
    }

    fn check_logprobs(&self, num_tokens: usize, logprobs: &[TokenLogprobs]) -> Result<(), String> {
        let (expected, top_n) = self.top_logprobs.map_or((0, 0), |top_n| (num_tokens, top_n as usize));
        if logprobs.len() != expected {
            return Err(format!("{num_tokens} tokens came with {} logprobs", logprobs.len()));
        }
        match logprobs.iter().find(|token| token.top.len() > top_n) {
            Some(token) => Err(format!("{} alternatives came where {top_n} were asked for", token.top.len())),
            None => Ok(()),
        }
    }

    /// A count that differs means that tokens were lost on the way.
    fn check_finish(&self, finish: &EngineFinish, completion_tokens: u32) -> Result<(), String> {
        match finish {
            EngineFinish::Stop { token_id } if self.last_token != Some(*token_id) => {
                Err(format!("it stopped at token {token_id}, which is not its last"))
            }
            EngineFinish::Stop { .. } | EngineFinish::Length if completion_tokens != self.received => {
                Err(format!("it ended after {completion_tokens} tokens of which {} arrived", self.received))
            }
            // We asked for no end: the engine gave up on the row without saying why.
            EngineFinish::Cancelled => Err("it was cancelled, though nobody asked for that".to_owned()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
