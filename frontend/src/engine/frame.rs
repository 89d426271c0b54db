//! Decodes one Step into events per handle, and finds what is wrong with it.
//!
//! A column that does not fit fails every request that the frame names; a wrong value fails only
//! its own. Which handles are open, and what they may still receive, is the ledger's to know.

use std::time::Duration;

use super::proto;
use super::types::{EngineFinish, EngineStats, PromptLogprobs, Started, TokenLogprobs};
use super::{convert, proto::FinishReason};

/// One row's news.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum RowEvent {
    Started(Started),
    Prompt(Vec<PromptLogprobs>),
    Tokens { ids: Vec<u32>, logprobs: Vec<TokenLogprobs> },
    Finished { finish: EngineFinish, completion_tokens: u32 },
}

/// Something wrong that concerns one handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) handle: u32,
    pub(super) reason: String,
    /// The frame also ends the handle, so nothing more will come for it.
    pub(super) ended: bool,
}

/// A Step, checked.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// In the order in which they are to be applied.
    pub(super) events: Vec<(u32, RowEvent)>,
    pub(super) faults: Vec<Fault>,
}

/// What a Step says of the engine itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Counts Steps of this session, from 1.
    pub seq: u64,
    /// Counts turns of the engine loop.
    pub loop_seq: u64,
    /// How long the engine has been inside its present turn.
    pub step_age: Duration,
    /// What it expected that turn to take; zero when it cannot tell.
    pub predicted_step: Duration,
    /// Wall clock of the engine when the Step was built, in ns since 1970.
    pub emitted_unix_ns: u64,
    /// State after the step.
    pub stats: EngineStats,
}

/// The part of a Step that holds without looking at its rows.
pub(super) fn report(step: &proto::Step) -> StepReport {
    let stats = step.stats.unwrap_or_default();
    StepReport {
        seq: step.seq,
        loop_seq: step.loop_seq,
        step_age: Duration::from_millis(u64::from(step.step_age_ms)),
        predicted_step: Duration::from_millis(u64::from(step.predicted_step_ms)),
        emitted_unix_ns: step.emitted_unix_ns,
        stats: EngineStats {
            running: stats.running,
            waiting: stats.waiting,
            kv_blocks_used: stats.kv_blocks_used,
            kv_blocks_total: stats.kv_blocks_total,
            step_rows: stats.step_rows,
            step_tokens: stats.step_tokens,
            step_host_ns: stats.step_host_ns,
            step_device_ns: stats.step_device_ns,
            preemptions_total: stats.preemptions_total,
            prompt_tokens_total: stats.prompt_tokens_total,
            generation_tokens_total: stats.generation_tokens_total,
        },
    }
}

/// The events of a Step whose ids must be below `vocab_size`.
pub(super) fn decode(step: &proto::Step, vocab_size: u32) -> Frame {
    let mut frame = Frame::default();
    frame.events.reserve(step.started.len() + step.handles.len() / 4 + step.finished.len());
    for started in &step.started {
        frame.started(*started);
    }
    let read = frame.prompts(step, vocab_size).and_then(|()| frame.rows(step, vocab_size));
    if let Err(reason) = read {
        return Frame { events: Vec::new(), faults: all_named(step, &reason) };
    }
    for finished in &step.finished {
        frame.finished(finished, vocab_size);
    }
    frame
}

impl Frame {
    fn started(&mut self, started: proto::Started) {
        if started.cached_tokens > started.prompt_tokens {
            let reason =
                format!("it reused {} of {} prompt tokens", started.cached_tokens, started.prompt_tokens);
            self.fault(started.handle, reason, false);
            return;
        }
        let event = RowEvent::Started(Started {
            prompt_tokens: started.prompt_tokens,
            cached_tokens: started.cached_tokens,
            queue: Duration::from_nanos(started.queue_ns),
            prefill: Duration::from_nanos(started.prefill_ns),
        });
        self.events.push((started.handle, event));
    }

    fn prompts(&mut self, step: &proto::Step, vocab_size: u32) -> Result<(), String> {
        let Some(columns) = &step.prompt_logprobs else { return Ok(()) };
        let handles = Column::new(&columns.handles, "prompt_logprobs.handles")?;
        let counts = Column::new(&columns.counts, "prompt_logprobs.counts")?;
        let mut ranks = Column::new(&columns.ranks, "prompt_logprobs.ranks")?;
        let mut tokens =
            TokenColumns::new(&columns.chosen, &columns.top_counts, &columns.top_ids, &columns.top_logprobs)?;
        if handles.len() != counts.len() {
            return Err(format!("{} prompts have {} counts", handles.len(), counts.len()));
        }
        expect_total(counts, &ranks, "ranks")?;
        expect_total(counts, &tokens.chosen, "logprobs of prompts")?;
        for (handle, count) in handles.iter().zip(counts.iter()) {
            let (row, ranks) = (tokens.take(count)?, ranks.take(count)?);
            if let Some(reason) = wrong_value(&[], &row, vocab_size) {
                self.fault(handle, reason, false);
                continue;
            }
            let row = row.into_iter().zip(ranks.iter()).map(|(token, rank)| PromptLogprobs {
                chosen: token.chosen,
                rank,
                top: token.top,
            });
            self.events.push((handle, RowEvent::Prompt(row.collect())));
        }
        Ok(())
    }

    fn rows(&mut self, step: &proto::Step, vocab_size: u32) -> Result<(), String> {
        let handles = Column::new(&step.handles, "handles")?;
        let counts = Column::new(&step.token_counts, "token_counts")?;
        let mut token_ids = Column::new(&step.token_ids, "token_ids")?;
        if handles.len() != counts.len() {
            return Err(format!("there are {} handles but {} token counts", handles.len(), counts.len()));
        }
        expect_total(counts, &token_ids, "token ids")?;
        let mut logprobs = step.logprobs.as_ref().map(LogprobRows::new).transpose()?;
        for (handle, count) in handles.iter().zip(counts.iter()) {
            let ids: Vec<u32> = token_ids.take(count)?.iter().collect();
            let row_logprobs = match &mut logprobs {
                Some(columns) => columns.take(handle, ids.len())?,
                None => Vec::new(),
            };
            match wrong_value(&ids, &row_logprobs, vocab_size) {
                Some(reason) => self.fault(handle, reason, false),
                None => self.events.push((handle, RowEvent::Tokens { ids, logprobs: row_logprobs })),
            }
        }
        logprobs.map_or(Ok(()), |columns| columns.finish())
    }

    fn finished(&mut self, finished: &proto::Finished, vocab_size: u32) {
        let finish = match (finished.reason(), finished.stop_token_id, &finished.error) {
            (FinishReason::Stop, Some(token_id), None) if token_id < vocab_size => {
                EngineFinish::Stop { token_id }
            }
            (FinishReason::Length, _, None) => EngineFinish::Length,
            (FinishReason::Cancelled, _, None) => EngineFinish::Cancelled,
            (FinishReason::Error, _, Some(error)) => {
                EngineFinish::Error(convert::engine_error(error.clone()))
            }
            (reason, ..) => {
                let reason =
                    format!("it ended with {} and fields that do not belong to it", reason.as_str_name());
                self.fault(finished.handle, reason, true);
                return;
            }
        };
        let event = RowEvent::Finished { finish, completion_tokens: finished.completion_tokens };
        self.events.push((finished.handle, event));
    }

    fn fault(&mut self, handle: u32, reason: String, ended: bool) {
        self.faults.push(Fault { handle, reason, ended });
    }
}

fn wrong_value(ids: &[u32], logprobs: &[TokenLogprobs], vocab_size: u32) -> Option<String> {
    let alternatives = logprobs.iter().flat_map(|token| token.top.iter());
    if let Some(id) = ids.iter().chain(alternatives.clone().map(|(id, _)| id)).find(|id| **id >= vocab_size) {
        return Some(format!("token id {id} is not below {vocab_size}"));
    }
    let mut values =
        logprobs.iter().map(|token| token.chosen).chain(alternatives.map(|(_, logprob)| *logprob));
    values.find(|value| !value.is_finite()).map(|value| format!("a logprob is {value}"))
}

/// Every handle that a frame names anywhere, as far as it can be read.
fn all_named(step: &proto::Step, reason: &str) -> Vec<Fault> {
    let readable =
        |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|chunk| u32::from_le_bytes(*chunk)).collect();
    let mut open: Vec<u32> = readable(&step.handles);
    if let Some(logprobs) = &step.logprobs {
        open.extend::<Vec<u32>>(readable(&logprobs.handles));
    }
    if let Some(prompts) = &step.prompt_logprobs {
        open.extend::<Vec<u32>>(readable(&prompts.handles));
    }
    open.extend(step.started.iter().map(|started| started.handle));
    let ended = step.finished.iter().map(|finished| (finished.handle, true));
    // Ended ones first: the ledger forgets a handle at its first fault that ends it.
    ended
        .chain(open.into_iter().map(|handle| (handle, false)))
        .map(|(handle, ended)| Fault { handle, reason: reason.to_owned(), ended })
        .collect()
}

/// The columns over tokens of the rows that asked for logprobs.
struct LogprobRows<'a> {
    handles: Column<'a>,
    tokens: TokenColumns<'a>,
}

impl<'a> LogprobRows<'a> {
    fn new(columns: &'a proto::LogprobColumns) -> Result<Self, String> {
        Ok(Self {
            handles: Column::new(&columns.handles, "logprobs.handles")?,
            tokens: TokenColumns::new(
                &columns.chosen,
                &columns.top_counts,
                &columns.top_ids,
                &columns.top_logprobs,
            )?,
        })
    }

    /// The logprobs of a row's tokens if it is the next that has any.
    fn take(&mut self, handle: u32, num_tokens: usize) -> Result<Vec<TokenLogprobs>, String> {
        if self.handles.first() != Some(handle) {
            return Ok(Vec::new());
        }
        self.handles.take(1)?;
        self.tokens.take(num_tokens as u32)
    }

    fn finish(&self) -> Result<(), String> {
        if self.handles.len() == 0 && self.tokens.chosen.len() == 0 {
            return Ok(());
        }
        Err("it has logprobs of rows that it does not have".to_owned())
    }
}

/// A logprob of each token with its alternatives, consumed from the front.
struct TokenColumns<'a> {
    chosen: Column<'a>,
    top_counts: Column<'a>,
    top_ids: Column<'a>,
    top_logprobs: Column<'a>,
}

impl<'a> TokenColumns<'a> {
    fn new(
        chosen: &'a [u8],
        top_counts: &'a [u8],
        top_ids: &'a [u8],
        top_logprobs: &'a [u8],
    ) -> Result<Self, String> {
        let tokens = Self {
            chosen: Column::new(chosen, "chosen")?,
            top_counts: Column::new(top_counts, "top_counts")?,
            top_ids: Column::new(top_ids, "top_ids")?,
            top_logprobs: Column::new(top_logprobs, "top_logprobs")?,
        };
        if tokens.chosen.len() != tokens.top_counts.len() {
            return Err("logprobs and counts of alternatives differ in number".to_owned());
        }
        expect_total(tokens.top_counts, &tokens.top_ids, "alternatives")?;
        expect_total(tokens.top_counts, &tokens.top_logprobs, "logprobs of alternatives")?;
        Ok(tokens)
    }

    fn take(&mut self, num_tokens: u32) -> Result<Vec<TokenLogprobs>, String> {
        let chosen = self.chosen.take(num_tokens)?;
        let counts = self.top_counts.take(num_tokens)?;
        chosen
            .iter()
            .zip(counts.iter())
            .map(|(chosen, count)| {
                let ids = self.top_ids.take(count)?;
                let logprobs = self.top_logprobs.take(count)?;
                let top = ids.iter().zip(logprobs.iter().map(f32::from_bits)).collect();
                Ok(TokenLogprobs { chosen: f32::from_bits(chosen), top })
            })
            .collect()
    }
}

/// A column of little-endian 32-bit values, consumed from the front.
#[derive(Clone, Copy)]
struct Column<'a>(&'a [[u8; 4]]);

impl<'a> Column<'a> {
    fn new(bytes: &'a [u8], name: &str) -> Result<Self, String> {
        match bytes.as_chunks::<4>() {
            (values, []) => Ok(Self(values)),
            _ => Err(format!("{name} has {} bytes, which is no column of 4-byte values", bytes.len())),
        }
    }

    fn len(self) -> usize {
        self.0.len()
    }

    fn iter(self) -> impl ExactSizeIterator<Item = u32> + 'a {
        self.0.iter().map(|chunk| u32::from_le_bytes(*chunk))
    }

    fn first(self) -> Option<u32> {
        self.0.first().map(|chunk| u32::from_le_bytes(*chunk))
    }

    fn take(&mut self, count: u32) -> Result<Self, String> {
        let (head, tail) =
            self.0.split_at_checked(count as usize).ok_or("a column is too short for its rows")?;
        self.0 = tail;
        Ok(Self(head))
    }
}

fn expect_total(counts: Column<'_>, values: &Column<'_>, what: &str) -> Result<(), String> {
    let total: u64 = counts.iter().map(u64::from).sum();
    if total == values.len() as u64 {
        return Ok(());
    }
    Err(format!("the counts add up to {total} but there are {} {what}", values.len()))
}
