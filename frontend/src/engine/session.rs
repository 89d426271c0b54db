//! One stream to one engine: writes submissions and aborts, applies Steps, and judges liveness.
//!
//! The reader never waits for anyone but the engine: deltas merge in the requests' mailboxes.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream;
use tokio::sync::Notify;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::client::{EngineRpc, status_in_words};
use super::frame;
pub use super::frame::StepReport;
use super::generation::{AbortSink, Generation};
use super::ledger::{Applied, Ledger};
use super::proto::session_response::Message;
use super::types::{EngineError, EngineErrorCode, GenerateRequest, ModelFacts};
use super::{convert, proto};

/// An engine that has sent nothing for so long is dead.
pub const SILENCE: Duration = Duration::from_secs(5);
/// [`SILENCE`] in two parts: a process that was itself suspended then first reads what has arrived
/// meanwhile.
const LOOKS: [Duration; 2] = [Duration::from_millis(4500), Duration::from_millis(500)];
/// A step is hung beyond this age or ten times its prediction, whichever is more.
const HUNG_STEP: Duration = Duration::from_secs(10);
const HUNG_FACTOR: u32 = 10;

/// Why a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionEnd {
    /// The stream or the connection broke, or the engine ended it.
    Lost(String),
    /// No Step for [`SILENCE`].
    Silent,
    /// A step took far longer than predicted.
    Hung {
        /// How long it had taken.
        age: Duration,
    },
    /// Its process ended.
    Exited(String),
    /// The engine broke the rules of the stream so that nothing in it can be trusted.
    Broken(String),
}

impl fmt::Display for SessionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(reason) => write!(f, "the connection was lost ({reason})"),
            Self::Silent => write!(f, "nothing was heard for {} s", SILENCE.as_secs()),
            Self::Hung { age } => write!(f, "a step has hung for {} s", age.as_secs()),
            Self::Exited(status) => write!(f, "its process ended ({status})"),
            Self::Broken(reason) => write!(f, "the engine broke the protocol: {reason}"),
        }
    }
}

/// Told what a session sees, for metrics. Calls must not block.
pub trait SessionObserver: Send + Sync {
    /// A Step has arrived; `num_tokens` of generated text were in it.
    fn step(&self, report: &StepReport, dropped_rows: u64, faults: u64);
    /// A Rejected named handles that are not open.
    fn dropped(&self, rows: u64);
}

/// The submitting end of a session. Cheap to share.
pub struct Session {
    shared: Arc<Shared>,
    facts: ModelFacts,
}

/// The reading end; [`SessionReader::run`] drives it. Dropping it ends the session.
pub struct SessionReader {
    shared: Arc<Shared>,
    inbound: Streaming<proto::SessionResponse>,
    observer: Arc<dyn SessionObserver>,
    vocab_size: u32,
    last_seq: u64,
}

struct Shared {
    ledger: Mutex<Ledger>,
    /// Something to write, or closed. One waiter: the stream that the transport pulls.
    wake_writer: Notify,
    /// Rows in the engine, everyone's, as of its last Step.
    engine_rows: AtomicU32,
    /// Set before the first request learns of the end, so that nobody who has is told "ready".
    ended: AtomicBool,
}

impl Session {
    /// Opens the stream. Fails when the engine refuses it.
    pub async fn open(
        rpc: &EngineRpc<Channel>,
        facts: ModelFacts,
        observer: Arc<dyn SessionObserver>,
    ) -> Result<(Self, SessionReader), Status> {
        let shared = Arc::new(Shared {
            ledger: Mutex::new(Ledger::default()),
            wake_writer: Notify::new(),
            engine_rows: AtomicU32::new(0),
            ended: AtomicBool::new(false),
        });
        let outbound = stream::unfold(Arc::clone(&shared), |shared| async move {
            let message = shared.next_message().await?;
            Some((message, shared))
        });
        let opened = timeout(SILENCE, rpc.clone().session(outbound)).await;
        let inbound =
            opened.map_err(|_| Status::deadline_exceeded("it did not open the session in time"))??;
        let reader = SessionReader {
            shared: Arc::clone(&shared),
            inbound: inbound.into_inner(),
            observer,
            vocab_size: facts.vocab_size,
            last_seq: 0,
        };
        Ok((Self { shared, facts }, reader))
    }

    /// Starts a generation. Never blocks.
    pub fn submit(&self, request: &GenerateRequest) -> Result<Generation, EngineError> {
        let message = convert::submit(request, &self.facts)?;
        let generation = self.shared.lock().submit(request, message, &self.facts, |handles| {
            let abort = RowAborts { shared: Arc::clone(&self.shared), handles };
            Generation::new(request.samples, request.max_unread_bytes, Arc::new(abort))
        })?;
        self.shared.wake_writer.notify_one();
        Ok(generation)
    }

    /// How busy the engine is, in rows: ours at once, everyone's as of its last Step.
    pub fn load(&self) -> usize {
        let engine_rows = self.shared.engine_rows.load(Ordering::Relaxed) as usize;
        self.shared.lock().num_open().max(engine_rows)
    }

    /// Whether requests are still taken.
    pub fn is_live(&self) -> bool {
        !self.shared.ended.load(Ordering::Acquire)
    }
}

/// Aborts rows of one request on behalf of its [`Generation`].
struct RowAborts {
    shared: Arc<Shared>,
    handles: Vec<u32>,
}

impl AbortSink for RowAborts {
    fn abort(&self, sample: u32) {
        if let Some(handle) = self.handles.get(sample as usize) {
            self.shared.lock().abort(*handle);
            self.shared.wake_writer.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Built when the transport asks for it, so aborts coalesce while it is behind.
    async fn next_message(&self) -> Option<proto::SessionRequest> {
        loop {
            {
                let mut ledger = self.lock();
                if ledger.is_closed() {
                    return None;
                }
                if let Some(message) = ledger.next_message() {
                    return Some(message);
                }
            }
            // A wake between the look and the wait leaves a permit, so it is not missed.
            self.wake_writer.notified().await;
        }
    }

    fn close(&self, reason: &str) {
        self.ended.store(true, Ordering::Release);
        let error = |code, message| EngineError { code, message };
        let lost = error(
            EngineErrorCode::Lost,
            format!("The engine was lost while it worked on this request: {reason}."),
        );
        let unavailable =
            error(EngineErrorCode::Unavailable, format!("The engine is not available: {reason}."));
        self.lock().close(&lost, unavailable);
        self.wake_writer.notify_one();
    }
}

impl SessionReader {
    /// Reads until the session ends or `lost` knows that it has, then ends every open request
    /// with one error.
    pub async fn run(mut self, lost: impl Future<Output = SessionEnd>) -> SessionEnd {
        let end = tokio::select! {
            end = self.read() => end,
            end = lost => end,
        };
        self.shared.close(&end.to_string());
        end
    }

    async fn read(&mut self) -> SessionEnd {
        loop {
            match self.receive().await.and_then(|message| self.handle(message)) {
                Ok(()) => {}
                Err(end) => return end,
            }
        }
    }

    async fn receive(&mut self) -> Result<Message, SessionEnd> {
        for patience in LOOKS {
            let Ok(received) = timeout(patience, self.inbound.message()).await else {
                continue;
            };
            return match received {
                Ok(Some(proto::SessionResponse { message: Some(message) })) => Ok(message),
                Ok(Some(_)) => {
                    Err(SessionEnd::Broken("a message is empty or of a kind that is not known".to_owned()))
                }
                Ok(None) => Err(SessionEnd::Lost("the engine ended the session".to_owned())),
                Err(status) => Err(SessionEnd::Lost(status_in_words(&status))),
            };
        }
        Err(SessionEnd::Silent)
    }

    fn handle(&mut self, message: Message) -> Result<(), SessionEnd> {
        match message {
            Message::Step(step) => self.step(&step),
            Message::Rejected(rejected) => {
                let Some(error) = rejected.error else {
                    return Err(SessionEnd::Broken("a rejection has no error".to_owned()));
                };
                let (handles, []) = rejected.handles.as_chunks::<4>() else {
                    return Err(SessionEnd::Broken("a rejection names no whole handles".to_owned()));
                };
                let handles: Vec<u32> = handles.iter().map(|chunk| u32::from_le_bytes(*chunk)).collect();
                let unknown = self.shared.lock().reject(&handles, &convert::engine_error(error));
                self.observer.dropped(unknown);
                Ok(())
            }
        }
    }

    fn step(&mut self, step: &proto::Step) -> Result<(), SessionEnd> {
        let report = frame::report(step);
        if report.seq != self.last_seq + 1 {
            // Some row's tokens are missing, and nothing says whose.
            return Err(SessionEnd::Broken(format!("step {} came after step {}", report.seq, self.last_seq)));
        }
        self.last_seq = report.seq;
        let Applied { dropped, faults, aborts } = {
            let frame = frame::decode(step, self.vocab_size);
            self.shared.lock().apply(report.seq, frame)
        };
        if faults > 0 {
            tracing::error!(seq = report.seq, faults, "the engine sent a step that breaks the protocol");
        }
        if faults + aborts > 0 {
            self.shared.wake_writer.notify_one();
        }
        let stats = &report.stats;
        self.shared.engine_rows.store(stats.running.saturating_add(stats.waiting), Ordering::Relaxed);
        self.observer.step(&report, dropped, faults);
        if report.step_age > HUNG_STEP.max(report.predicted_step * HUNG_FACTOR) {
            return Err(SessionEnd::Hung { age: report.step_age });
        }
        Ok(())
    }
}

impl Drop for SessionReader {
    fn drop(&mut self) {
        self.shared.close("this server is shutting down");
    }
}
