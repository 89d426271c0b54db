//! The HTTP socket: bind, accept, serve connections, close them in order. Knows no route.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt::set_tcp_user_timeout;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Limits;
use crate::lifecycle::{Lifecycle, Phase};

const BACKLOG: u32 = 4096;
/// Large prompts then arrive without waiting for the window to grow.
const RECEIVE_BUFFER_BYTES: u32 = 1024 * 1024;
/// Of one request, the request line too.
const MAX_HEAD_BYTES: usize = 64 * 1024;
const MAX_HEADERS: usize = 128;
/// Streams of one HTTP/2 connection at once.
const MAX_STREAMS: u32 = 1024;
/// Streams that an HTTP/2 client resets before they were answered; more end the connection.
const MAX_RESETS: usize = 64;
/// HTTP/2 flow control windows.
const STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;
/// An HTTP/2 connection whose client does not answer pings is closed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
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

/// Raises the limit on open files as far as this user may, and returns how many of
/// `max_connections` fit.
pub fn raise_file_limit(max_connections: usize) -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("the limit on open files cannot be raised: {error}");
    }
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files.saturating_sub(RESERVED_FILES))
        .map_or(max_connections, |files| files.clamp(1, max_connections))
}

/// Accepts connections until `stop`, then waits until their answers are out.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    lifecycle: Lifecycle,
    limits: Limits,
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    let permits = Arc::new(Semaphore::new(raise_file_limit(limits.max_connections)));
    let limits = Arc::new(limits);
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
                set_options(&stream, limits.send_timeout);
                let (router, lifecycle, limits) = (router.clone(), lifecycle.clone(), Arc::clone(&limits));
                connections.spawn(async move {
                    serve_connection(stream, &limits, router, lifecycle).await;
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

fn set_options(stream: &TcpStream, send_timeout: Duration) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("TCP_NODELAY is not to be had: {error}");
    }
    // A client that takes nothing at all holds buffers; the kernel ends its connection.
    let millis = u32::try_from(send_timeout.as_millis()).unwrap_or(u32::MAX);
    if let Err(error) = set_tcp_user_timeout(stream, millis) {
        tracing::debug!("TCP_USER_TIMEOUT is not to be had: {error}");
    }
}

async fn serve_connection(stream: TcpStream, limits: &Limits, router: Router, lifecycle: Lifecycle) {
    let opened = timeout(limits.head_timeout, speaks_http2(&stream)).await;
    let service = TowerToHyperService::new(router);
    let outcome = match opened {
        Ok(Ok(true)) => {
            // On the heap, so that connections of HTTP/1 do not have its size.
            let mut connection = Box::pin(http2_builder().serve_connection(TokioIo::new(stream), service));
            tokio::select! {
                biased;
                result = connection.as_mut() => result,
                () = lifecycle.reached(Phase::Draining) => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
        Ok(Ok(false)) => {
            // One that comes while we drain is told so, once.
            let comes_late = lifecycle.phase() != Phase::Serving;
            let builder = http1_builder(limits, !comes_late);
            let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
            tokio::select! {
                biased;
                result = connection.as_mut() => result,
                () = lifecycle.reached(Phase::Draining), if !comes_late => {
                    // The answer under way is the last; an idle connection closes now.
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            }
        }
        // Gone, or silent for too long.
        Ok(Err(_)) | Err(_) => return,
    };
    if let Err(error) = outcome {
        tracing::debug!("a connection ended early: {error}");
    }
}

/// Whether a connection begins as HTTP/2 does; known by its third byte at the latest.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    const BEGINNING: &[u8] = b"PRI";
    /// Between looks at a beginning that has not come in full.
    const PAUSE: Duration = Duration::from_millis(5);
    let mut seen = [0; BEGINNING.len()];
    loop {
        let count = stream.peek(&mut seen).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if seen[..count] != BEGINNING[..count] {
            return Ok(false);
        }
        if count == BEGINNING.len() {
            return Ok(true);
        }
        sleep(PAUSE).await;
    }
}

fn http1_builder(limits: &Limits, keep_alive: bool) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .keep_alive(keep_alive)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD_BYTES)
        // Events are small: one copy costs less than a list of buffers for the kernel to walk.
        .writev(false);
    builder
}

fn http2_builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(MAX_RESETS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_INTERVAL);
    builder
}
