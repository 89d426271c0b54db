//! The frontend under load, in front of a mock engine: CPU, memory and added latency per stream,
//! beside a bare `write()` of the same bytes to as many sockets.
//!
//! `cargo bench -p rung-frontend --bench frontend -- [STREAMS…]`

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints")]

mod load;
#[expect(dead_code, reason = "shared with the tests")]
#[path = "../../tests/engine/mock_engine.rs"]
mod mock_engine;
#[path = "../../tests/engine/player.rs"]
mod player;
mod scenario;
mod usage;

use std::io::Write;
use std::time::Duration;

use scenario::{Bench, Figures, bare_write};

const STREAMS: [u64; 5] = [1, 64, 256, 1024, 4096];

fn main() {
    let asked: Vec<u64> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let streams = if asked.is_empty() { STREAMS.to_vec() } else { asked };
    rung_frontend::listener::raise_file_limit(1 << 16);
    println!(
        "Chat streams of one token an event; a mock engine, the load generator and the frontend share {} cores.\n\
         CPU in us, user + kernel, of the frontend alone; \"bare\": a thread that writes the same bytes to as many \
         sockets.\nAdded latency in ms, p50 / p99: what comes on top of the mock engine's own time.\n",
        std::thread::available_parallelism().map_or(1, usize::from)
    );
    println!(
        "{:>7} | {:>9} | {:>11} | {:>11} | {:>13} | {:>8} | {:>8} | {:>9} | {:>13} | {:>13}",
        "streams",
        "paced t/s",
        "CPU/token",
        "bare/token",
        "CPU/request",
        "req/s",
        "tok/s",
        "KiB/strm",
        "TTFT",
        "ITL"
    );
    for streams in streams {
        let figures = Bench::start().run(streams);
        let bare = bare_write(streams, &figures);
        print(streams, &figures, &bare);
    }
}

fn print(streams: u64, figures: &Figures, bare: &str) {
    let pair = |(middle, tail): (Duration, Duration)| {
        format!("{:.2} / {:.2}", middle.as_secs_f64() * 1e3, tail.as_secs_f64() * 1e3)
    };
    println!(
        "{streams:>7} | {:>9.0} | {:>11} | {bare:>11} | {:>13} | {:>8.0} | {:>8.0} | {:>9.1} | {:>13} | {:>13}",
        figures.paced_tokens_per_s,
        figures.cpu_per_token,
        figures.cpu_per_request,
        figures.requests_per_s,
        figures.tokens_per_s,
        figures.kib_per_stream,
        pair(figures.added_ttft),
        pair(figures.added_itl),
    );
    let _ = std::io::stdout().flush();
}
