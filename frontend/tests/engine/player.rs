//! Plays a scripted engine by itself: seeded tokens at a set pace, within a batch limit, and with
//! faults where they are asked for. Knows nothing of models.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rung_frontend::engine::proto;
use rung_frontend::engine::proto::session_request::Message as Request;
use tokio::time::{interval, sleep_until};
use tonic::Status;

use crate::mock_engine::{MockSession, column, finished, length, values};

const HEARTBEAT: Duration = Duration::from_millis(400);

/// What can be changed while the engine plays.
#[derive(Debug, Default)]
pub(crate) struct Controls {
    /// From one step to the next; 0: as fast as the stream takes them.
    step_ns: AtomicU64,
    paused: AtomicBool,
    /// By the request's seed; filled while `recording`.
    lives: Mutex<HashMap<u64, RowLife>>,
    recording: AtomicBool,
}

/// When things happened to one row.
#[derive(Debug, Clone)]
pub(crate) struct RowLife {
    pub(crate) submitted: Instant,
    /// One per token.
    pub(crate) emitted: Vec<Instant>,
}

impl Controls {
    pub(crate) fn set_step(&self, step: Duration) {
        self.step_ns.store(step.as_nanos() as u64, Ordering::Relaxed);
    }

    pub(crate) fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// Starts to keep the life of each row by its seed, or stops and returns what was kept.
    pub(crate) fn record(&self, recording: bool) -> HashMap<u64, RowLife> {
        self.recording.store(recording, Ordering::Relaxed);
        std::mem::take(&mut self.lives.lock().unwrap())
    }

    fn step(&self) -> Duration {
        Duration::from_nanos(self.step_ns.load(Ordering::Relaxed))
    }
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Faults {
    /// Every so many-th request is rejected as overload.
    pub(crate) reject_every: Option<u64>,
    /// The session ends with an error after so many steps that had rows.
    pub(crate) end_after_steps: Option<u64>,
}

/// An engine that needs no test to tell it what to send.
pub(crate) struct Player {
    pub(crate) controls: Arc<Controls>,
    /// Rows of one step at most; others wait.
    pub(crate) max_rows: usize,
    /// Ids to choose from.
    pub(crate) tokens: Vec<u32>,
    pub(crate) faults: Faults,
}

struct Row {
    handle: u32,
    seed: u64,
    prompt_tokens: u32,
    generated: u32,
    max_tokens: u32,
    submitted: Instant,
    emitted: Vec<Instant>,
}

#[derive(Default)]
struct Batch {
    running: Vec<Row>,
    waiting: VecDeque<Row>,
    /// Ends to report with the next step.
    ended: Vec<proto::Finished>,
    submits: u64,
    steps: u64,
}

impl Player {
    /// Serves one session until it ends.
    pub(crate) async fn play(&self, mut session: MockSession) {
        let mut batch = Batch::default();
        let mut heartbeat = interval(HEARTBEAT);
        let mut last_step = tokio::time::Instant::now();
        loop {
            let is_busy =
                !self.controls.paused.load(Ordering::Relaxed) && batch.has_work() || !batch.ended.is_empty();
            tokio::select! {
                biased;
                request = session.next() => match request {
                    Some(request) => self.receive(request, &mut batch, &mut session).await,
                    None => return,
                },
                () = sleep_until(last_step + self.controls.step()), if is_busy => {
                    last_step = tokio::time::Instant::now();
                    if self.faults.end_after_steps.is_some_and(|limit| batch.steps >= limit) {
                        return session.fail(Status::unavailable("the mock engine was told to fail")).await;
                    }
                    self.step(&mut batch, &mut session).await;
                }
                _ = heartbeat.tick() => session.step(|_| {}).await,
            }
        }
    }

    async fn receive(&self, request: Request, batch: &mut Batch, session: &mut MockSession) {
        match request {
            Request::Submit(submit) => {
                batch.submits += 1;
                if self.faults.reject_every.is_some_and(|every| batch.submits.is_multiple_of(every)) {
                    let error = proto::EngineError {
                        code: proto::EngineErrorCode::Overloaded.into(),
                        message: "The mock engine is full.".to_owned(),
                        retryable: true,
                    };
                    return session.reject(&submit.handles, error).await;
                }
                batch.add(&submit);
            }
            Request::Abort(abort) => {
                for row in batch.abort(&values(&abort.handles)) {
                    self.keep(row);
                }
            }
            Request::Drain(_) => {}
        }
    }

    async fn step(&self, batch: &mut Batch, session: &mut MockSession) {
        let is_paused = self.controls.paused.load(Ordering::Relaxed);
        let mut step = proto::Step { finished: std::mem::take(&mut batch.ended), ..proto::Step::default() };
        if !is_paused {
            self.advance(batch, &mut step);
        }
        session.step(|sent| *sent = proto::Step { seq: sent.seq, loop_seq: sent.loop_seq, ..step }).await;
    }

    /// One token for each row that runs.
    fn advance(&self, batch: &mut Batch, step: &mut proto::Step) {
        batch.steps += 1;
        let room = self.max_rows.saturating_sub(batch.running.len()).min(batch.waiting.len());
        batch.running.extend(batch.waiting.drain(..room));
        let is_recorded = self.controls.recording.load(Ordering::Relaxed);
        let now = Instant::now();
        let mut token_ids = Vec::with_capacity(batch.running.len());
        for row in &mut batch.running {
            if row.generated == 0 {
                let (handle, prompt_tokens) = (row.handle, row.prompt_tokens);
                step.started.push(proto::Started { handle, prompt_tokens, ..proto::Started::default() });
            }
            token_ids.push(self.token(row.seed, row.generated));
            row.generated += 1;
            if is_recorded {
                row.emitted.push(now);
            }
        }
        step.handles = column(batch.running.iter().map(|row| row.handle));
        step.token_counts = column(batch.running.iter().map(|_| 1));
        step.token_ids = column(token_ids);
        let stats = proto::EngineStats {
            running: batch.running.len() as u32,
            waiting: batch.waiting.len() as u32,
            step_rows: batch.running.len() as u32,
            step_tokens: batch.running.len() as u32,
            ..proto::EngineStats::default()
        };
        step.stats = Some(stats);
        for row in batch.running.extract_if(.., |row| row.generated >= row.max_tokens) {
            step.finished.push(length(row.handle, row.generated));
            self.keep(row);
        }
    }

    fn keep(&self, row: Row) {
        if self.controls.recording.load(Ordering::Relaxed) {
            let life = RowLife { submitted: row.submitted, emitted: row.emitted };
            self.controls.lives.lock().unwrap().insert(row.seed, life);
        }
    }

    fn token(&self, seed: u64, position: u32) -> u32 {
        // The finaliser of splitmix64.
        let mut bits = seed.wrapping_add(u64::from(position).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        self.tokens[((bits ^ (bits >> 31)) % self.tokens.len() as u64) as usize]
    }
}

impl Batch {
    fn has_work(&self) -> bool {
        !self.running.is_empty() || !self.waiting.is_empty()
    }

    fn add(&mut self, submit: &proto::Submit) {
        let stopping = submit.stopping.clone().unwrap_or_default();
        let seed = submit.sampling.as_ref().and_then(|sampling| sampling.seed);
        for (sample, &handle) in (0u64..).zip(&submit.handles) {
            self.waiting.push_back(Row {
                handle,
                seed: seed.unwrap_or(u64::from(handle)).wrapping_add(sample << 32),
                prompt_tokens: (submit.prompt_ids.len() / 4) as u32,
                generated: 0,
                max_tokens: stopping.max_tokens.unwrap_or(u32::MAX),
                submitted: Instant::now(),
                emitted: Vec::new(),
            });
        }
    }

    /// Takes rows out; each still gets its end with the next step.
    fn abort(&mut self, handles: &[u32]) -> Vec<Row> {
        let handles: HashSet<u32> = handles.iter().copied().collect();
        let mut gone: Vec<Row> = self.running.extract_if(.., |row| handles.contains(&row.handle)).collect();
        let waiting = std::mem::take(&mut self.waiting);
        let (named, waiting) = waiting.into_iter().partition(|row| handles.contains(&row.handle));
        self.waiting = waiting;
        gone.extend::<VecDeque<Row>>(named);
        self.ended.extend(gone.iter().map(|row| finished(row.handle, proto::FinishReason::Cancelled)));
        gone
    }
}
