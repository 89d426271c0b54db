//! The HTTP socket: bind, accept, serve connections, close them in order. Knows no route.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::lifecycle::{Lifecycle, Phase};

const BACKLOG: u32 = 4096;
/// Large prompts then arrive without waiting for the window to grow.
const RECEIVE_BUFFER_BYTES: u32 = 1024 * 1024;
/// From an open connection, or the answer before, to the end of a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_mins(1);
const MAX_CONNECTIONS: usize = 32_768;
/// Kept free of connections: engines, log, files.
const RESERVED_FILES: u64 = 128;
const SHORTEST_ACCEPT_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// For answers that are complete to leave the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Binds the address. The error is one sentence that says what to do.
pub fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    let listen = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().map_err(|error| {
        let (ip, port) = (address.ip(), address.port());
        match error.kind() {
            io::ErrorKind::AddrInUse => format!(
                "Port {port} of {ip} is in use by another program; stop it, or choose another with --port (0 takes a \
                 free one)."
            ),
            io::ErrorKind::PermissionDenied => {
                format!("Port {port} of {ip} needs more rights than this user has; choose one above 1023 with --port.")
            }
            io::ErrorKind::AddrNotAvailable => {
                format!("{ip} is no address of this machine; choose one that is with --host, such as 127.0.0.1.")
            }
            _ => format!("{address} cannot be served: {error}; choose another with --host and --port."),
        }
    })
}

/// Raises the limit on open files as far as this user may, and returns how many connections fit.
pub fn raise_file_limit() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit on open files cannot be raised: {error}");
    }
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files.saturating_sub(RESERVED_FILES))
        .map_or(MAX_CONNECTIONS, |files| files.clamp(1, MAX_CONNECTIONS))
}

/// Accepts connections until `stop`, then waits until their answers are out.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    lifecycle: Lifecycle,
    max_connections: usize,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    let permits = Arc::new(Semaphore::new(max_connections));
    let mut pause = SHORTEST_ACCEPT_PAUSE;
    loop {
        let accept = async {
            let permit = Arc::clone(&permits).acquire_owned().await;
            (permit, listener.accept().await)
        };
        let accepted = tokio::select! {
            accepted = accept => accepted,
            () = stop.cancelled() => break,
        };
        match accepted {
            (Ok(permit), Ok((stream, _))) => {
                pause = SHORTEST_ACCEPT_PAUSE;
                let (router, lifecycle) = (router.clone(), lifecycle.clone());
                connections.spawn(async move {
                    serve_connection(stream, router, lifecycle).await;
                    drop(permit);
                });
            }
            (_, Err(error)) if concerns_one_client(&error) => {}
            (_, Err(error)) => {
                tracing::warn!(
                    "connections cannot be accepted ({error}); trying again in {} ms",
                    pause.as_millis()
                );
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_ACCEPT_PAUSE);
            }
            // The semaphore is never closed.
            (Err(_), _) => break,
        }
    }
    drop(listener);
    connections.close();
    if timeout(FLUSH_TIMEOUT, connections.wait()).await.is_err() {
        tracing::warn!(
            connections = connections.len(),
            "clients have not read their answers; closing on them"
        );
    }
}

fn concerns_one_client(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

async fn serve_connection(stream: TcpStream, router: Router, lifecycle: Lifecycle) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("TCP_NODELAY is not to be had: {error}");
    }
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    // One that comes while we drain is told so, once.
    let comes_late = lifecycle.phase() != Phase::Serving;
    builder.keep_alive(!comes_late);
    let mut connection =
        pin!(builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)));
    let result = tokio::select! {
        biased;
        result = connection.as_mut() => result,
        () = lifecycle.reached(Phase::Draining), if !comes_late => {
            // The answer under way is the last; an idle connection closes now.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!("a connection ended early: {error}");
    }
}
