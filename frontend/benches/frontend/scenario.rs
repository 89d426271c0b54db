//! One frontend process through the phases of a run: idle streams, a steady pace, flat out, short
//! requests. The engine and the load are threads of this process and share its clock.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use crate::load::{self, Life, Tally};
use crate::mock_engine::{MockEngine, Script};
use crate::player::{Controls, Faults, Player, RowLife};
use crate::usage::{Cpu, resident_kib};

const TEMPLATE: &[u8] =
    b"{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}";
/// Tokens a second of all streams together at the steady pace: far below what two cores can do.
const PACED_TOKENS_PER_S: u64 = 8000;
const WINDOW: Duration = Duration::from_secs(5);
const SHORT_WINDOW: Duration = Duration::from_secs(3);
const SETTLE: Duration = Duration::from_millis(300);
const START_LIMIT: Duration = Duration::from_mins(1);
const ENDLESS: u32 = 1 << 24;
/// Seeds of requests that measure the time to the first token.
const PROBES: u64 = 1 << 20;

/// What one run gave.
#[derive(Default)]
pub(crate) struct Figures {
    pub(crate) paced_tokens_per_s: f64,
    pub(crate) cpu_per_token: String,
    pub(crate) bytes_per_event: usize,
    pub(crate) kib_per_stream: f64,
    pub(crate) tokens_per_s: f64,
    pub(crate) requests_per_s: f64,
    pub(crate) cpu_per_request: String,
    /// Median and 99th percentile.
    pub(crate) added_ttft: (Duration, Duration),
    pub(crate) added_itl: (Duration, Duration),
}

/// A frontend with its engine.
pub(crate) struct Bench {
    process: Child,
    address: SocketAddr,
    controls: Arc<Controls>,
}

/// Users that run in a thread of their own.
struct Load {
    tally: Arc<Tally>,
    thread: JoinHandle<Vec<Life>>,
}

impl Load {
    /// `count` users; each gets a seed from `first_seed` on.
    fn start(
        address: SocketAddr,
        path: &'static str,
        body: fn(u64) -> String,
        first_seed: u64,
        count: u64,
    ) -> Self {
        let tally = Arc::new(Tally::default());
        let shared = Arc::clone(&tally);
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let users: Vec<_> = (first_seed..first_seed + count)
                    .map(|seed| tokio::spawn(load::user(address, path, body, seed, Arc::clone(&shared))))
                    .collect();
                let mut lives = Vec::new();
                for user in users {
                    lives.extend(user.await.unwrap().unwrap());
                }
                lives
            })
        });
        Self { tally, thread }
    }

    fn tokens(&self) -> u64 {
        self.tally.tokens.load(Ordering::Relaxed)
    }

    fn wait_started(&self, count: u64) {
        let limit = Instant::now() + START_LIMIT;
        while self.tally.started.load(Ordering::Relaxed) < count {
            let refused = self.tally.refused.load(Ordering::Relaxed);
            assert!(refused == 0, "{refused} requests were refused");
            assert!(Instant::now() < limit, "not all of {count} streams have started in time");
            sleep(Duration::from_millis(5));
        }
    }

    fn stop(self) -> Vec<Life> {
        self.tally.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn endless_chat(seed: u64) -> String {
    chat(seed, ENDLESS)
}

fn one_token_chat(seed: u64) -> String {
    chat(seed, 1)
}

fn chat(seed: u64, max_tokens: u32) -> String {
    format!(
        r#"{{"model":"mock","messages":[{{"role":"user","content":"hi"}}],"stream":true,"max_tokens":{max_tokens},"seed":{seed}}}"#
    )
}

/// Ids, so that nothing is tokenized.
fn one_token_completion(seed: u64) -> String {
    format!(
        r#"{{"model":"mock","prompt":[300,301,302,303],"stream":true,"max_tokens":1,"ignore_eos":true,"temperature":0.7,"seed":{seed}}}"#
    )
}

fn pace(streams: u64) -> Duration {
    (Duration::from_secs(1) * streams as u32 / PACED_TOKENS_PER_S as u32).max(Duration::from_millis(1))
}

impl Bench {
    /// Starts both and waits until the server is ready.
    pub(crate) fn start() -> Self {
        let controls = Arc::new(Controls::default());
        let shared = Arc::clone(&controls);
        let (sender, receiver) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut engine = MockEngine::start(script());
                sender.send(engine.address.to_string()).unwrap();
                let player = Player {
                    controls: shared,
                    max_rows: 1 << 16,
                    tokens: word_ids(),
                    faults: Faults::default(),
                };
                loop {
                    let session = engine.session().await;
                    player.play(session).await;
                }
            });
        });
        let engine = receiver.recv().unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_rung-frontend"))
            .args(["--port", "0", "--engine", &engine, "--max-inflight-requests", "16384"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.next().unwrap().rsplit('/').next().unwrap().parse().unwrap();
        lines.find(|line| line.starts_with("Ready")).unwrap();
        // What it says later must not fill the pipe.
        thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Self { process, address, controls }
    }

    /// All phases with so many streams; ends the server.
    pub(crate) fn run(mut self, streams: u64) -> Figures {
        let mut figures = Figures::default();
        self.short_requests(8, &mut Figures::default());
        self.paced(streams, &mut figures);
        self.flat_out(streams, &mut figures);
        self.short_requests(streams, &mut figures);
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        figures
    }

    fn cpu(&self) -> Cpu {
        Cpu::of_process(self.process.id())
    }

    fn paced(&self, streams: u64, figures: &mut Figures) {
        self.controls.set_step(pace(streams));
        self.controls.record(true);
        let idle_kib = resident_kib(self.process.id());
        let load = Load::start(self.address, "/v1/chat/completions", endless_chat, 1, streams);
        load.wait_started(streams);
        self.controls.pause(true);
        sleep(SETTLE);
        figures.kib_per_stream = (resident_kib(self.process.id()) as f64 - idle_kib as f64) / streams as f64;
        self.controls.pause(false);
        sleep(SETTLE);

        let before = (self.cpu(), load.tokens(), load.tally.bytes.load(Ordering::Relaxed), Instant::now());
        sleep(WINDOW);
        let cpu = self.cpu() - before.0;
        let tokens = load.tokens() - before.1;
        figures.paced_tokens_per_s = tokens as f64 / before.3.elapsed().as_secs_f64();
        figures.cpu_per_token = cpu.per(tokens);
        figures.bytes_per_event =
            ((load.tally.bytes.load(Ordering::Relaxed) - before.2) / tokens.max(1)) as usize;

        let probes = Load::start(self.address, "/v1/chat/completions", one_token_chat, PROBES, 1);
        sleep(SHORT_WINDOW);
        let probes = probes.stop();
        let lives = load.stop();
        // For the aborts to reach the engine, which ends the rows' records.
        sleep(SETTLE);
        let engine = self.controls.record(false);
        figures.added_ttft = added_ttft(&probes, &engine);
        figures.added_itl = added_itl(&lives, &engine);
    }

    fn flat_out(&self, streams: u64, figures: &mut Figures) {
        // Those that are there already would keep the last ones waiting.
        self.controls.set_step(pace(streams));
        let load = Load::start(self.address, "/v1/chat/completions", endless_chat, 1, streams);
        load.wait_started(streams);
        self.controls.set_step(Duration::ZERO);
        let (tokens, begun) = (load.tokens(), Instant::now());
        sleep(SHORT_WINDOW);
        figures.tokens_per_s = (load.tokens() - tokens) as f64 / begun.elapsed().as_secs_f64();
        load.stop();
        sleep(SETTLE);
    }

    fn short_requests(&self, users: u64, figures: &mut Figures) {
        self.controls.set_step(Duration::ZERO);
        let load = Load::start(self.address, "/v1/completions", one_token_completion, 1, users);
        load.wait_started(users);
        let answers = || load.tally.answers.load(Ordering::Relaxed);
        let before = (self.cpu(), answers(), Instant::now());
        sleep(SHORT_WINDOW);
        let count = answers() - before.1;
        figures.requests_per_s = count as f64 / before.2.elapsed().as_secs_f64();
        figures.cpu_per_request = (self.cpu() - before.0).per(count);
        load.stop();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Ended already, unless a phase has panicked.
        let _ = self.process.kill();
    }
}

fn script() -> Script {
    let mut script = Script::default();
    script.add_file("chat_template.jinja", TEMPLATE);
    if let Some(limits) = &mut script.describe.limits {
        limits.max_num_seqs = 1 << 16;
        limits.max_waiting = 1 << 16;
    }
    script
}

/// Tokens of one space and letters.
fn word_ids() -> Vec<u32> {
    let json: serde_json::Value =
        serde_json::from_slice(include_bytes!("../../tests/fixtures/byte_level.json")).unwrap();
    let is_word = |token: &str| {
        let letters = token.strip_prefix('Ġ').unwrap_or_default();
        letters.len() > 1 && letters.bytes().all(|byte| byte.is_ascii_alphabetic())
    };
    let vocabulary = json["model"]["vocab"].as_object().unwrap();
    vocabulary.iter().filter(|(token, _)| is_word(token)).map(|(_, id)| id.as_u64().unwrap() as u32).collect()
}

fn percentiles(mut values: Vec<Duration>) -> (Duration, Duration) {
    values.sort_unstable();
    let at = |share: f64| values.get((values.len() as f64 * share) as usize).copied().unwrap_or_default();
    (at(0.5), at(0.99))
}

/// From the request's first byte to the engine, and from the first token to the client.
fn added_ttft(lives: &[Life], engine: &HashMap<u64, RowLife>) -> (Duration, Duration) {
    let added = |life: &Life| {
        let row = engine.get(&life.seed)?;
        let seen = *life.arrived.first()? - life.sent;
        Some(seen.saturating_sub(*row.emitted.first()? - row.submitted))
    };
    percentiles(lives.iter().filter_map(added).collect())
}

/// How much longer each gap between two tokens was for the client than for the engine.
fn added_itl(lives: &[Life], engine: &HashMap<u64, RowLife>) -> (Duration, Duration) {
    let mut added = Vec::new();
    for life in lives {
        let Some(row) = engine.get(&life.seed) else { continue };
        let gaps = |times: &[Instant]| -> Vec<Duration> {
            times.array_windows().map(|[earlier, later]| *later - *earlier).collect()
        };
        let pairs = gaps(&life.arrived).into_iter().zip(gaps(&row.emitted));
        added.extend(pairs.map(|(seen, own)| seen.saturating_sub(own)));
    }
    percentiles(added)
}

/// CPU per event of a thread that writes events of the same size at the same pace.
pub(crate) fn bare_write(streams: u64, figures: &Figures) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    // One after the other: more than the backlog at once would leave some waiting for ever.
    let connect = |_| (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
    let (readers, mut sockets): (Vec<_>, Vec<_>) = (0..streams).map(connect).unzip();
    let readers = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let readers = readers.into_iter().map(|stream| tokio::spawn(load::drain(stream)));
            for reader in readers.collect::<Vec<_>>() {
                reader.await.unwrap().unwrap();
            }
        });
    });
    for socket in &sockets {
        socket.set_nodelay(true).unwrap();
    }
    let mut event = vec![b'x'; figures.bytes_per_event];
    event[..6].copy_from_slice(b"data: ");
    let begun = Instant::now();
    let before = Cpu::of_this_thread();
    let mut next = begun;
    let mut written = 0;
    while begun.elapsed() < WINDOW {
        for socket in &mut sockets {
            socket.write_all(&event).unwrap();
            written += 1;
        }
        next += pace(streams);
        sleep(next.saturating_duration_since(Instant::now()));
    }
    let cpu = Cpu::of_this_thread() - before;
    drop(sockets);
    readers.join().unwrap();
    cpu.per(written)
}
