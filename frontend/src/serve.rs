//! Puts the parts together and takes them apart again: socket first, engines last.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{Config, EngineSource};
use crate::engine::{EnginePool, StartError, Supervisor};
use crate::lifecycle::{Lifecycle, Phase};
use crate::listener;
use crate::metrics::{EngineHost, Metrics};
use crate::router::router;
use crate::state::AppState;

/// For streams to send their error event once the drain deadline has passed.
const CLOSING_TIME: Duration = Duration::from_secs(2);
const CANARY_INTERVAL: Duration = Duration::from_millis(200);

/// Why the server ended by itself. Exit statuses are those of sysexits.h.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be served.
    #[error("{0}")]
    Bind(String),
    /// The engine never became ready.
    #[error("{0}")]
    Engine(StartError),
    /// The operating system or a bug is in the way.
    #[error("The server cannot run: {0}.")]
    Internal(String),
}

impl ServeError {
    /// The process's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Engine(StartError::WrongSettings) => 64,
            Self::Bind(_) => 69,
            Self::Engine(StartError::Failed(_)) => 70,
            Self::Internal(_) => 71,
        }
    }

    /// Whether the user has not been told yet.
    pub fn is_news(&self) -> bool {
        !matches!(self, Self::Engine(StartError::WrongSettings))
    }
}

/// Serves until a signal says to stop; returns the exit status.
pub async fn serve(config: Config) -> Result<u8, ServeError> {
    let internal = |error: io::Error| ServeError::Internal(error.to_string());
    let mut signals = Signals::new().map_err(internal)?;
    let socket = listener::bind(config.listen).map_err(ServeError::Bind)?;
    let url = format!("http://{}", socket.local_addr().map_err(internal)?);
    eprintln!("Listening on {url}");

    let config = Arc::new(config);
    let metrics = Arc::new(Metrics::default());
    let pool =
        Arc::new(EnginePool::new(&engine_names(&config.engine), config.served_model_name.clone(), &metrics));
    let lifecycle = Lifecycle::new();
    let _canary = AbortOnDropHandle::new(tokio::spawn(watch_event_loop(Arc::clone(&metrics))));
    let state = AppState::new(Arc::clone(&config), Arc::clone(&pool) as _, metrics, lifecycle.clone());
    let stop_http = CancellationToken::new();
    let http =
        listener::serve(socket, router(state), lifecycle.clone(), config.limits.clone(), stop_http.clone());
    let http = AbortOnDropHandle::new(tokio::spawn(http));
    let stop_engines = CancellationToken::new();
    let mut engines = tokio::spawn(run_engines(Arc::clone(&config), Arc::clone(&pool), stop_engines.clone()));
    let _keys = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&config.keys).follow()));
    let _announcement = AbortOnDropHandle::new(tokio::spawn(announce(url, pool)));

    tokio::select! {
        ended = &mut engines => return Err(early_end(ended)),
        _ = signals.next() => {}
    }
    let shutdown = async {
        drain(&lifecycle, config.drain_timeout).await;
        stop_http.cancel();
        let _ = http.await;
        stop_engines.cancel();
        let _ = engines.await;
    };
    tokio::select! {
        () = shutdown => Ok(0),
        signal = signals.next() => Ok(128 + signal),
    }
}

fn engine_names(source: &EngineSource) -> Vec<(String, EngineHost)> {
    match source {
        EngineSource::Spawn { .. } => vec![("local".to_owned(), EngineHost::This)],
        EngineSource::Connect { addresses, .. } => addresses
            .iter()
            .map(|address| {
                let host = if address.is_tcp() { EngineHost::Other } else { EngineHost::This };
                (address.to_string(), host)
            })
            .collect(),
    }
}

async fn run_engines(
    config: Arc<Config>,
    pool: Arc<EnginePool>,
    stop: CancellationToken,
) -> Result<(), StartError> {
    match &config.engine {
        EngineSource::Spawn { command } => Supervisor::new(command, &pool, 0)?.run(stop).await,
        EngineSource::Connect { addresses, tls } => {
            let connections = addresses
                .iter()
                .enumerate()
                .map(|(slot, address)| pool.keep_connected(slot, address, tls.as_ref()));
            let _ = stop.run_until_cancelled(join_all(connections)).await;
            Ok(())
        }
    }
}

/// Measures how late the event loop is for something simple.
async fn watch_event_loop(metrics: Arc<Metrics>) {
    loop {
        let due = Instant::now() + CANARY_INTERVAL;
        sleep_until(due).await;
        metrics.http.event_loop_lag.observe(due.elapsed());
    }
}

/// Says once that the server can answer.
async fn announce(url: String, pool: Arc<EnginePool>) {
    let model = pool.ready().await;
    let facts = &model.facts;
    eprintln!(
        "Ready: {url}/v1 serving {} ({}, context {} tokens, {} sequences)",
        model.id, facts.runner, facts.max_model_len, facts.limits.max_num_seqs
    );
}

fn early_end(ended: Result<Result<(), StartError>, tokio::task::JoinError>) -> ServeError {
    match ended {
        Ok(Err(error)) => ServeError::Engine(error),
        Ok(Ok(())) => ServeError::Internal("the engine's supervisor ended".to_owned()),
        Err(error) => ServeError::Internal(error.to_string()),
    }
}

/// Lets open requests finish until the deadline, then ends them with an error.
async fn drain(lifecycle: &Lifecycle, deadline: Duration) {
    lifecycle.advance(Phase::Draining);
    let num_open = lifecycle.num_open();
    if num_open > 0 {
        tracing::info!(
            "finishing {num_open} requests, for {} s at most; a second signal ends at once",
            deadline.as_secs_f64()
        );
    }
    if timeout(deadline, lifecycle.idle()).await.is_ok() {
        return;
    }
    tracing::warn!("the drain deadline has passed with {} requests open; ending them", lifecycle.num_open());
    lifecycle.advance(Phase::Closing);
    let _ = timeout(CLOSING_TIME, lifecycle.idle()).await;
}

/// SIGTERM and SIGINT, in the order in which they come.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The number of the next signal.
    async fn next(&mut self) -> u8 {
        let signal = tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
        };
        signal.as_raw_value() as u8
    }
}
