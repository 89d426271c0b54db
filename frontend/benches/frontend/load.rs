//! The load generator: many connections in one thread, which counts tokens without parsing JSON.
//!
//! The mock engine's tokens all begin with a space, and nothing else in an event's JSON holds one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const READ_BYTES: usize = 16 * 1024;
/// Ends a chunked body.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// What all connections of one run add up to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) tokens: AtomicU64,
    pub(crate) events: AtomicU64,
    pub(crate) bytes: AtomicU64,
    /// Streams that have had a token.
    pub(crate) started: AtomicU64,
    /// Answers that are complete.
    pub(crate) answers: AtomicU64,
    /// Answers with another status than 200.
    pub(crate) refused: AtomicU64,
    pub(crate) stop: AtomicBool,
}

/// When things happened to one request.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    pub(crate) seed: u64,
    pub(crate) sent: Instant,
    /// One per token; tokens that came together share an instant.
    pub(crate) arrived: Vec<Instant>,
}

impl Tally {
    fn has_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Writes requests one after the other on a connection of its own until told to stop; `body`
/// makes one from a seed. Returns the lives of its answers, the last of which may be cut.
pub(crate) async fn user(
    address: SocketAddr,
    path: &str,
    body: impl Fn(u64) -> String,
    mut seed: u64,
    tally: Arc<Tally>,
) -> std::io::Result<Vec<Life>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let mut lives = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    while !tally.has_stopped() {
        let body = body(seed);
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut life = Life { seed, sent: Instant::now(), arrived: Vec::new() };
        stream.write_all(request.as_bytes()).await?;
        let is_whole = read_answer(&mut stream, &mut buffer, &mut life, &tally).await?;
        lives.push(life);
        if !is_whole {
            break;
        }
        tally.answers.fetch_add(1, Ordering::Relaxed);
        seed += 1 << 32;
    }
    Ok(lives)
}

/// Reads one chunked answer. False when told to stop before its end.
async fn read_answer(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    life: &mut Life,
    tally: &Tally,
) -> std::io::Result<bool> {
    let mut is_first = true;
    loop {
        let count = stream.read(buffer).await?;
        if count == 0 {
            return Ok(false);
        }
        let now = Instant::now();
        let mut read = &buffer[..count];
        if is_first {
            is_first = false;
            if !read.starts_with(b"HTTP/1.1 200") {
                tally.refused.fetch_add(1, Ordering::Relaxed);
                return Ok(false);
            }
            // The head comes in one piece: it is far smaller than a segment.
            let end = read.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(0);
            read = &read[end..];
        }
        count_events(read, now, life, tally);
        if read.ends_with(LAST_CHUNK) {
            return Ok(true);
        }
        if tally.has_stopped() {
            return Ok(false);
        }
    }
}

#[expect(clippy::naive_bytecount, reason = "a crate for one line")]
fn count_events(read: &[u8], now: Instant, life: &mut Life, tally: &Tally) {
    // Each event begins with "data: ", which holds a space of its own.
    let events = read.windows(5).filter(|window| window == b"data:").count() as u64;
    let spaces = read.iter().filter(|&&byte| byte == b' ').count() as u64;
    let tokens = spaces.saturating_sub(events);
    if tokens > 0 && life.arrived.is_empty() {
        tally.started.fetch_add(1, Ordering::Relaxed);
    }
    life.arrived.extend(std::iter::repeat_n(now, tokens as usize));
    tally.tokens.fetch_add(tokens, Ordering::Relaxed);
    tally.events.fetch_add(events, Ordering::Relaxed);
    tally.bytes.fetch_add(read.len() as u64, Ordering::Relaxed);
}

/// Reads what comes as a user does; for the baseline.
pub(crate) async fn drain(stream: std::net::TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(true)?;
    let mut stream = TcpStream::from_std(stream)?;
    let mut buffer = vec![0; READ_BYTES];
    let mut life = Life { seed: 0, sent: Instant::now(), arrived: Vec::new() };
    let tally = Tally::default();
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        count_events(&buffer[..count], Instant::now(), &mut life, &tally);
    }
}
