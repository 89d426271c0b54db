//! One or more engines of the same model behind one [`Engine`]: each request goes to the ready
//! engine with the least to do. Starts no process; that is [`super::supervisor`]'s.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep};

use super::address::EngineAddress;
use super::backoff::Backoff;
use super::client::{ClientError, EngineClient, status_in_words};
use super::convert::Description;
use super::session::{Session, SessionEnd, SessionReader};
use super::types::{EngineError, EngineErrorCode, GenerateRequest, ModelFacts};
use super::{Engine, Generation};
use crate::config::TlsFiles;
use crate::metrics::{EngineHost, EngineMetrics, Metrics};
use crate::model::ServedModel;

/// All engines of this frontend.
pub struct EnginePool {
    slots: Vec<Slot>,
    /// Overrides the engine's name for its model.
    served_model_name: Option<String>,
    /// What is served, and what it was built from. Locked while an engine joins, so that engines
    /// that come at the same time are compared with each other.
    served: Mutex<Option<Description>>,
    model: ArcSwapOption<ServedModel>,
    num_ready: watch::Sender<usize>,
    next_slot: AtomicUsize,
}

/// The place of one engine, kept while the engine comes and goes.
struct Slot {
    name: String,
    session: ArcSwapOption<Session>,
    metrics: Arc<EngineMetrics>,
}

impl EnginePool {
    /// A pool with a slot for each named engine, none of them ready.
    pub fn new(
        engines: &[(String, EngineHost)],
        served_model_name: Option<String>,
        metrics: &Metrics,
    ) -> Self {
        let slots = engines.iter().map(|(name, host)| Slot {
            name: name.clone(),
            session: ArcSwapOption::empty(),
            metrics: Arc::new(metrics.engine(name, *host)),
        });
        Self {
            slots: slots.collect(),
            served_model_name,
            served: Mutex::new(None),
            model: ArcSwapOption::empty(),
            num_ready: watch::Sender::new(0),
            next_slot: AtomicUsize::new(0),
        }
    }

    /// Waits until an engine is ready and returns its model.
    pub async fn ready(&self) -> Arc<ServedModel> {
        let mut num_ready = self.num_ready.subscribe();
        loop {
            // The sender lives in `self`, so waiting cannot fail.
            let _ = num_ready.wait_for(|count| *count > 0).await;
            if let Some(model) = self.model() {
                return model;
            }
            let _ = num_ready.changed().await;
        }
    }

    /// The metrics of a slot's engine.
    pub(super) fn metrics(&self, slot: usize) -> &EngineMetrics {
        &self.slots[slot].metrics
    }

    /// Learns what the engine serves, opens a session and makes the slot ready.
    pub async fn attach(&self, slot: usize, client: &EngineClient) -> Result<Attached<'_>, ClientError> {
        let slot = &self.slots[slot];
        let description = client.describe().await?;
        let mut served = self.served.lock().await;
        if served.as_ref() != Some(&description) {
            if let Some(present) = served.as_ref().filter(|_| self.is_ready()) {
                same_model(present, &description).map_err(ClientError::Incompatible)?;
            } else {
                self.model.store(Some(Arc::new(self.build(client, &description).await?)));
                *served = Some(description.clone());
            }
        }
        let observer = Arc::clone(&slot.metrics);
        let (session, reader) =
            Session::open(client.rpc(), description.facts, observer).await.map_err(|status| {
                ClientError::Unreachable(format!(
                    "The engine opens no session: {}.",
                    status_in_words(&status)
                ))
            })?;
        slot.session.store(Some(Arc::new(session)));
        slot.metrics.up();
        self.num_ready.send_modify(|count| *count += 1);
        Ok(Attached { pool: self, slot, reader: Some(reader) })
    }

    async fn build(
        &self,
        client: &EngineClient,
        description: &Description,
    ) -> Result<ServedModel, ClientError> {
        let files = client.fetch_tokenizer(&description.tokenizer_files).await?;
        let (name, facts) = (self.served_model_name.clone(), description.facts.clone());
        let built =
            tokio::task::spawn_blocking(move || ServedModel::build(name.as_deref(), facts, &files)).await;
        built
            .map_err(|error| {
                ClientError::Incompatible(format!("The engine's tokenizer cannot be loaded: {error}."))
            })?
            .map_err(ClientError::Incompatible)
    }

    fn is_ready(&self) -> bool {
        self.live_sessions().next().is_some()
    }

    fn live_sessions(&self) -> impl Iterator<Item = Arc<Session>> {
        self.slots.iter().filter_map(|slot| slot.session.load_full()).filter(|session| session.is_live())
    }

    /// Connects to an engine that runs elsewhere, again and again, for as long as it is polled.
    pub async fn keep_connected(&self, slot: usize, address: &EngineAddress, tls: Option<&TlsFiles>) {
        let mut backoff = Backoff::new();
        let mut last_complaint = None;
        loop {
            let mut working_since = None;
            let attached = match EngineClient::connect(address, tls).await {
                Ok(client) => self.attach(slot, &client).await,
                Err(error) => Err(error),
            };
            match attached {
                Ok(attached) => {
                    working_since = Some(Instant::now());
                    last_complaint = None;
                    tracing::info!(engine = %address, "connected");
                    let end = attached.run(std::future::pending()).await;
                    tracing::warn!(engine = %address, "lost the engine: {end}");
                    self.metrics(slot).restarted();
                }
                // The same complaint every 30 s would bury all others.
                Err(error) if last_complaint.as_ref() != Some(&error) => {
                    tracing::warn!(engine = %address, "{error}");
                    last_complaint = Some(error);
                }
                Err(_) => {}
            }
            sleep(backoff.after(working_since)).await;
        }
    }
}

impl Engine for EnginePool {
    fn model(&self) -> Option<Arc<ServedModel>> {
        if self.is_ready() { self.model.load_full() } else { None }
    }

    fn ready(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let mut num_ready = self.num_ready.subscribe();
        Box::pin(async move {
            // Fails only when the pool is gone, and nobody waits then.
            let _ = num_ready.wait_for(|count| *count > 0).await;
        })
    }

    fn submit(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let mut sessions: Vec<_> = self.live_sessions().map(|session| (session.load(), session)).collect();
        if sessions.is_empty() {
            let message = "No engine is ready; try again in a moment.".to_owned();
            return Err(EngineError { code: EngineErrorCode::Unavailable, message });
        }
        // Among equals, take turns.
        let turn = self.next_slot.fetch_add(1, Ordering::Relaxed) % sessions.len();
        sessions.rotate_left(turn);
        sessions.sort_by_key(|(load, _)| *load);
        let mut outcome = sessions[0].1.submit(&request);
        for (_, session) in &sessions[1..] {
            match &outcome {
                Err(error)
                    if matches!(error.code, EngineErrorCode::Unavailable | EngineErrorCode::Overloaded) =>
                {
                    outcome = session.submit(&request);
                }
                _ => break,
            }
        }
        outcome
    }
}

/// An engine that is ready for as long as this lives.
pub struct Attached<'a> {
    pool: &'a EnginePool,
    slot: &'a Slot,
    reader: Option<SessionReader>,
}

impl Attached<'_> {
    /// Works until the session ends, or until `lost` tells that the engine is gone.
    pub async fn run(mut self, lost: impl Future<Output = SessionEnd>) -> SessionEnd {
        match self.reader.take() {
            Some(reader) => reader.run(lost).await,
            None => SessionEnd::Lost("it was read before".to_owned()),
        }
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.slot.session.store(None);
        self.slot.metrics.down();
        self.pool.num_ready.send_modify(|count| *count -= 1);
        tracing::debug!(engine = self.slot.name, "detached");
    }
}

/// Whether requests prepared for one engine can go to another.
fn same_model(present: &Description, other: &Description) -> Result<(), String> {
    let what_counts = |facts: &ModelFacts| {
        let size = (facts.num_parameters, facts.vocab_size, facts.max_model_len);
        (
            facts.name.clone(),
            facts.architecture.clone(),
            facts.weight_format.clone(),
            size,
            facts.eos_token_ids.clone(),
        )
    };
    if what_counts(&present.facts) == what_counts(&other.facts)
        && present.tokenizer_files == other.tokenizer_files
    {
        return Ok(());
    }
    let describe = |facts: &ModelFacts| {
        format!("{} ({}, context {} tokens)", facts.name, facts.weight_format, facts.max_model_len)
    };
    Err(format!(
        "The engine serves {}, but the engines that are ready serve {}; all engines of one frontend must serve the \
         same model with the same settings and tokenizer.",
        describe(&other.facts),
        describe(&present.facts)
    ))
}
