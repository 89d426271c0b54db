//! The server as a process: exit statuses, what it prints, how it drains, what it leaves behind.

use std::process::{ExitStatus, Stdio};

use rung_frontend::engine::proto::Started;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStderr, Command};

use crate::child::{LIVE, Reports, answer_as};
use crate::mock_engine::{MockEngine, MockSession, Script, length, rows};

const STREAM: &str = r#"{"model": "mock", "prompt": [300, 301], "max_tokens": 100, "stream": true}"#;

const WHOLE: &str = r#"{"model": "mock", "prompt": [300], "max_tokens": 1}"#;

/// A running server.
pub(crate) struct Server {
    process: Child,
    stderr: Lines<BufReader<ChildStderr>>,
    pub(crate) address: String,
}

fn spawn(arguments: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_rung-frontend"))
        .args(arguments)
        .env_remove("RUNG_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Runs the server until it ends by itself; returns its status and what it printed.
async fn run(arguments: &[&str]) -> (i32, String, String) {
    let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    let output = spawn(&arguments).wait_with_output().await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn with_engine(options: &[&str], command: Vec<String>) -> Vec<String> {
    let options = ["--port", "0"].iter().chain(options).chain(&["--"]);
    options.map(|option| (*option).to_owned()).chain(command).collect()
}

impl Server {
    async fn start(options: &[&str], command: Vec<String>) -> Self {
        Self::listening(spawn(&with_engine(options, command))).await
    }

    /// With these arguments, once it listens.
    pub(crate) async fn with(arguments: &[&str]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self::listening(spawn(&arguments)).await
    }

    async fn listening(mut process: Child) -> Self {
        let mut stderr = BufReader::new(process.stderr.take().unwrap()).lines();
        let line = stderr.next_line().await.unwrap().unwrap();
        let address = line.strip_prefix("Listening on http://").unwrap().to_owned();
        Self { process, stderr, address }
    }

    /// With a scripted engine, once it is ready.
    async fn ready(options: &[&str], engine: &MockEngine, reports: &mut Reports) -> Self {
        let mut server = Self::start(options, reports.command(&(answer_as(engine) + LIVE))).await;
        reports.started().await;
        server.line("Ready: ").await;
        server
    }

    /// The next line that contains `part`.
    pub(crate) async fn line(&mut self, part: &str) -> String {
        loop {
            let line = self.stderr.next_line().await.unwrap().unwrap();
            if line.contains(part) {
                return line;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    async fn wait(mut self) -> ExitStatus {
        self.process.wait().await.unwrap()
    }

    /// Sends a request; the answer's head has arrived when this returns.
    pub(crate) async fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + body).as_bytes()).await.unwrap();
        let mut answer = BufReader::new(stream);
        let mut line = String::new();
        answer.read_line(&mut line).await.unwrap();
        Answer { status: line.split(' ').nth(1).unwrap().parse().unwrap(), rest: answer }
    }

    async fn status(&self, path: &str) -> u16 {
        self.send("GET", path, "").await.status
    }
}

/// An HTTP answer under way.
pub(crate) struct Answer {
    pub(crate) status: u16,
    rest: BufReader<TcpStream>,
}

impl Answer {
    pub(crate) async fn rest(mut self) -> String {
        let mut text = String::new();
        self.rest.read_to_string(&mut text).await.unwrap();
        text
    }
}

/// A stream that the engine has begun to answer.
async fn open_stream(server: &Server, engine: &mut MockEngine) -> (Answer, MockSession, u32) {
    let mut session = engine.session().await;
    let (answer, (session, handle)) = tokio::join!(server.send("POST", "/v1/completions", STREAM), async {
        let handle = session.submit().await.handles[0];
        let started = Started { handle, prompt_tokens: 2, ..Started::default() };
        session
            .step(|step| {
                step.started = vec![started];
                rows(step, &[(handle, &[310])]);
            })
            .await;
        (session, handle)
    });
    assert_eq!(answer.status, 200);
    (answer, session, handle)
}

#[tokio::test]
async fn version_and_help_are_printed() {
    let (status, stdout, _) = run(&["--version"]).await;
    assert_eq!((status, stdout.trim()), (0, concat!("rung-frontend ", env!("CARGO_PKG_VERSION"))));
    let (status, stdout, _) = run(&["--help"]).await;
    assert!(status == 0 && stdout.contains("--api-key-file"));
}

#[tokio::test]
async fn wrong_settings_exit_64_before_anything_is_bound_or_started() {
    let mut reports = Reports::new();
    let command = reports.command(LIVE);
    let arguments = with_engine(&["--host", "0.0.0.0"], command);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (status, _, stderr) = run(&arguments).await;
    assert_eq!(status, 64);
    assert!(stderr.contains("--insecure") && !stderr.contains("Listening"), "{stderr}");
    assert_eq!(reports.ended().await, Vec::<String>::new());
    let (status, _, stderr) = run(&["--no-such-option"]).await;
    assert!(status == 64 && stderr.contains("--no-such-option"), "{stderr}");
}

#[tokio::test]
async fn a_busy_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (status, _, stderr) = run(&["--port", &port, "--", "/no/such/engine"]).await;
    assert_eq!(status, 69);
    assert!(stderr.contains(&port) && stderr.contains("--port"), "{stderr}");
}

#[tokio::test]
async fn an_engine_that_cannot_start_ends_the_server_with_its_status() {
    for (script, expected, said) in [("exit 64", 64, false), ("exit 3", 70, true)] {
        let reports = Reports::new();
        let arguments = with_engine(&[], reports.command(script));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (status, _, stderr) = run(&arguments).await;
        assert_eq!(status, expected);
        assert_eq!(stderr.contains("rung-frontend: "), said, "{stderr}");
    }
}

#[tokio::test]
async fn while_the_engine_loads_the_server_lives_but_is_not_ready() {
    let mut reports = Reports::new();
    let server = Server::start(&[], reports.command(LIVE)).await;
    reports.started().await;
    assert_eq!(server.status("/livez").await, 200);
    assert_eq!(server.status("/readyz").await, 503);
    assert_eq!(server.send("POST", "/v1/completions", STREAM).await.status, 503);
    server.signal(Signal::TERM);
    assert_eq!(server.wait().await.code(), Some(0));
    reports.ended().await;
}

#[tokio::test]
async fn the_ready_line_says_what_is_served() {
    let engine = MockEngine::start(Script::default());
    let reports = Reports::new();
    let command = reports.command(&(answer_as(&engine) + LIVE));
    let mut server = Server::start(&["--served-model-name", "mine"], command).await;
    let line = server.line("Ready: ").await;
    let address = server.address.clone();
    let expected =
        format!("Ready: http://{address}/v1 serving mine (mock, context 33554432 tokens, 4 sequences)");
    assert_eq!(line, expected);
    assert_eq!(server.status("/readyz").await, 200);
}

#[tokio::test]
async fn a_drain_lets_streams_finish_and_refuses_new_requests() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let mut server = Server::ready(&[], &engine, &mut reports).await;
    let (answer, mut session, handle) = open_stream(&server, &mut engine).await;
    server.signal(Signal::TERM);
    server.line("finishing 1 requests").await;
    assert_eq!(server.status("/readyz").await, 503);
    assert_eq!(server.status("/livez").await, 200);
    assert_eq!(server.send("POST", "/v1/completions", STREAM).await.status, 503);
    session
        .step(|step| {
            rows(step, &[(handle, &[311])]);
            step.finished = vec![length(handle, 2)];
        })
        .await;
    let events = answer.rest().await;
    assert!(events.contains("[DONE]") && !events.contains("\"error\""), "{events}");
    assert_eq!(server.wait().await.code(), Some(0));
    reports.ended().await;
}

#[tokio::test]
async fn a_drain_deadline_ends_streams_with_an_error() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let server = Server::ready(&["--drain-timeout", "0"], &engine, &mut reports).await;
    let (answer, _session, _) = open_stream(&server, &mut engine).await;
    server.signal(Signal::INT);
    let events = answer.rest().await;
    assert!(events.contains("\"error\"") && !events.contains("[DONE]"), "{events}");
    assert_eq!(server.wait().await.code(), Some(0));
    reports.ended().await;
}

#[tokio::test]
async fn a_second_signal_ends_everything_at_once() {
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut engine = MockEngine::start(Script::default());
        let mut reports = Reports::new();
        let script = format!("trap '' TERM; sleep 100 & {}wait", answer_as(&engine));
        let mut server = Server::start(&[], reports.command(&script)).await;
        server.line("Ready: ").await;
        let (_answer, _session, _) = open_stream(&server, &mut engine).await;
        server.signal(signal);
        server.line("finishing 1 requests").await;
        server.signal(signal);
        assert_eq!(server.wait().await.code(), Some(status));
        reports.started().await;
        reports.ended().await;
    }
}

#[tokio::test]
async fn a_killed_server_leaves_no_engine() {
    let engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let server = Server::ready(&[], &engine, &mut reports).await;
    server.signal(Signal::KILL);
    server.wait().await;
    reports.ended().await;
}

#[tokio::test]
async fn engines_that_run_elsewhere_are_shared_and_left_running() {
    let mut engines = [MockEngine::start(Script::default()), MockEngine::start(Script::default())];
    let mut arguments = vec!["--port".to_owned(), "0".to_owned()];
    for engine in &engines {
        arguments.extend(["--engine".to_owned(), engine.address.to_string()]);
    }
    let mut server = Server::listening(spawn(&arguments)).await;
    for _ in &engines {
        server.line("connected").await;
    }
    let mut sessions = [engines[0].session().await, engines[1].session().await];
    let [first, second] = &mut sessions;
    let answers = async {
        tokio::join!(
            server.send("POST", "/v1/completions", WHOLE),
            server.send("POST", "/v1/completions", WHOLE)
        )
    };
    let (answers, (), ()) = tokio::join!(answers, answer_one(first), answer_one(second));
    assert_eq!((answers.0.status, answers.1.status), (200, 200));
    let metrics = server.send("GET", "/metrics", "").await.rest().await;
    assert_eq!(metrics.matches("\nrung_engine_up{").count(), 2);
    server.signal(Signal::TERM);
    assert_eq!(server.wait().await.code(), Some(0));
    assert_eq!(first.next().await, None, "its session has ended");
}

async fn answer_one(session: &mut MockSession) {
    let handle = session.submit().await.handles[0];
    session
        .step(|step| {
            rows(step, &[(handle, &[310])]);
            step.finished = vec![length(handle, 1)];
        })
        .await;
}

#[tokio::test]
async fn a_client_that_leaves_is_aborted_in_the_engine() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let server = Server::ready(&[], &engine, &mut reports).await;
    let (answer, mut session, handle) = open_stream(&server, &mut engine).await;
    drop(answer);
    assert_eq!(session.abort().await, [handle]);
}

#[tokio::test]
async fn a_lost_engine_ends_streams_with_an_error_and_readiness() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    // The second life never answers, so that the server stays unready.
    let directory = tempfile::tempdir().unwrap();
    let once = format!("mkdir {}/once 2>/dev/null || {LIVE}; ", directory.path().display());
    let mut server = Server::start(&[], reports.command(&(once + &answer_as(&engine) + LIVE))).await;
    reports.started().await;
    server.line("Ready: ").await;
    let (answer, session, _) = open_stream(&server, &mut engine).await;
    session.fail(tonic::Status::internal("it fell over")).await;
    let events = answer.rest().await;
    assert!(events.contains("\"error\"") && !events.contains("[DONE]"), "{events}");
    assert_eq!(server.status("/readyz").await, 503);
    reports.started().await;
}
