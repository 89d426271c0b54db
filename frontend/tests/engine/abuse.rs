//! The server process against clients that misbehave, in front of an engine that plays by itself:
//! whatever one of them does, the others are served.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::mock_engine::{MockEngine, Script};
use crate::player::{Controls, Faults, Player};
use crate::process::Server;

const ENDLESS: &str =
    r#"{"model": "mock", "prompt": [300, 301], "max_tokens": 1000000, "stream": true, "ignore_eos": true}"#;
const SHORT: &str = r#"{"model": "mock", "prompt": [300], "max_tokens": 3}"#;

/// A server, and an engine that plays one session after the other, each with its own faults.
struct Stage {
    server: Server,
    _engine: JoinHandle<()>,
}

impl Stage {
    async fn open(options: &[&str], faults: Vec<Faults>) -> Self {
        let mut engine = MockEngine::start(Script::default());
        let address = engine.address.to_string();
        let controls = Arc::new(Controls::default());
        controls.set_step(Duration::from_millis(1));
        let playing = tokio::spawn(async move {
            let mut faults = faults.into_iter();
            loop {
                let session = engine.session().await;
                let player = Player {
                    controls: Arc::clone(&controls),
                    max_rows: 4,
                    tokens: vec![300, 301, 302],
                    faults: faults.next().unwrap_or_default(),
                };
                player.play(session).await;
            }
        });
        let mut arguments = vec!["--port", "0", "--engine", &address];
        arguments.extend_from_slice(options);
        let mut server = Server::with(&arguments).await;
        server.line("Ready: ").await;
        Self { server, _engine: playing }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.server.address).await.unwrap()
    }

    async fn alive(&self) {
        let answer = self.server.send("POST", "/v1/completions", SHORT).await;
        assert_eq!(answer.status, 200);
        assert!(answer.rest().await.contains("\"completion_tokens\":3"));
    }

    /// Waits until `/metrics` has this line.
    async fn metric(&self, line: &str) {
        while !self
            .server
            .send("GET", "/metrics", "")
            .await
            .rest()
            .await
            .lines()
            .any(|present| present == line)
        {
            tokio::task::yield_now().await;
        }
    }
}

fn post(body: &str) -> String {
    format!(
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// What the server says until it closes; a reset counts as closing.
async fn until_closed(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error}"),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn heads_that_do_not_come_and_bodies_that_do_not_end_are_given_up() {
    let stage = Stage::open(&["--head-timeout", "0.2", "--body-timeout", "0.2"], Vec::new()).await;
    for beginning in ["", "P", "PR", "PRI * HTTP/2.0\r\n", "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"] {
        let mut stream = stage.connect().await;
        stream.write_all(beginning.as_bytes()).await.unwrap();
        if beginning.starts_with("PRI") {
            // The rest of the preface may come later, but then a client must answer pings.
            stream.shutdown().await.unwrap();
        }
        until_closed(&mut stream).await;
    }
    let mut stream = stage.connect().await;
    stream.write_all(post(SHORT).trim_end_matches('}').as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 408");
    stage.alive().await;
}

#[tokio::test]
async fn b27_what_is_too_large_or_no_http_is_refused_and_the_rest_is_served() {
    let stage = Stage::open(&["--max-body-bytes", "100000"], Vec::new()).await;
    let long_header =
        format!("GET /livez HTTP/1.1\r\nHost: test\r\nX-Long: {}\r\n\r\n", "x".repeat(1_000_000));
    let many_headers = format!("GET /livez HTTP/1.1\r\nHost: test\r\n{}\r\n", "X-H: 1\r\n".repeat(1000));
    for (request, status) in
        [(long_header, " 431 "), (many_headers, " 431 "), ("\x16\x03\x01 hello\r\n\r\n".to_owned(), " 400 ")]
    {
        let mut stream = stage.connect().await;
        // The server may close before it has read all.
        let _ = stream.write_all(request.as_bytes()).await;
        let answer = until_closed(&mut stream).await;
        assert!(answer.is_empty() || answer.contains(status), "{answer}");
    }
    let large = "x".repeat(100_001);
    assert_eq!(stage.server.send("POST", "/v1/completions", &large).await.status, 413);
    let mut chunked = stage.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n";
    let body = format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len());
    let _ = chunked.write_all((head.to_owned() + &body).as_bytes()).await;
    let mut answer = [0; 12];
    chunked.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    stage.alive().await;
}

#[tokio::test]
async fn b02_clients_that_go_at_any_moment_leave_no_row_behind() {
    let stage = Stage::open(&[], Vec::new()).await;
    // Four run, two wait in the engine.
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut stream = stage.connect().await;
        stream.write_all(post(ENDLESS).as_bytes()).await.unwrap();
        streams.push(stream);
    }
    stage.metric("rung_requests_in_flight 6").await;
    // Half-closed counts as gone.
    streams[0].shutdown().await.unwrap();
    until_closed(&mut streams[0]).await;
    drop(streams);
    stage.metric("rung_requests_in_flight 0").await;
    stage.alive().await;
}

#[tokio::test]
async fn b74_twenty_times_the_limit_is_refused_at_once_and_the_accepted_finish() {
    let stage = Stage::open(&["--max-inflight-requests", "4"], Vec::new()).await;
    let request = r#"{"model": "mock", "prompt": [300], "max_tokens": 200, "ignore_eos": true}"#;
    let mut accepted = Vec::new();
    for _ in 0..4 {
        let mut stream = stage.connect().await;
        stream.write_all(post(request).as_bytes()).await.unwrap();
        accepted.push(stream);
    }
    stage.metric("rung_requests_in_flight 4").await;
    for _ in 0..80 {
        let answer = stage.server.send("POST", "/v1/completions", request).await;
        assert_eq!(answer.status, 429);
        let text = answer.rest().await;
        assert!(text.contains("retry-after: ") && text.contains("--max-inflight-requests"), "{text}");
    }
    for mut stream in accepted {
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
    }
    stage.metric("rung_requests_in_flight 0").await;
    stage.alive().await;
}

#[tokio::test]
async fn http2_is_spoken_and_a_flood_of_resets_ends_its_connection_alone() {
    let stage = Stage::open(&[], Vec::new()).await;
    let open = async || {
        let (send, connection) = h2::client::handshake(stage.connect().await).await.unwrap();
        (send, tokio::spawn(connection))
    };
    let request = || {
        let uri = format!("http://{}/v1/completions", stage.server.address);
        Request::post(uri).header("content-type", "application/json").body(()).unwrap()
    };
    let (mut client, _connection) = open().await;
    let (answer, mut body) = client.send_request(request(), false).unwrap();
    body.send_data(SHORT.into(), true).unwrap();
    let answer = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    let (flood, connection) = open().await;
    let mut flood = Some(flood);
    for _ in 0..10_000 {
        let Some(client) = flood.take() else { break };
        let Ok(mut ready) = client.ready().await else { break };
        let Ok((_, mut body)) = ready.send_request(request(), false) else { break };
        body.send_reset(h2::Reason::CANCEL);
        flood = Some(ready);
    }
    drop(flood);
    // Either the server has had enough of it, or it has kept up; it lives in both cases.
    let _ = connection.await.unwrap();
    stage.metric("rung_requests_in_flight 0").await;
    let (answer, mut body) = client.ready().await.unwrap().send_request(request(), false).unwrap();
    body.send_data(SHORT.into(), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), 200);
    stage.alive().await;
}

#[tokio::test]
async fn a_request_that_showed_nothing_is_given_to_the_engine_that_comes_back() {
    let dies = Faults { end_after_steps: Some(0), ..Faults::default() };
    let stage = Stage::open(&[], vec![dies]).await;
    stage.alive().await;
    stage.metric("rung_requests_replayed_total 1").await;
}

#[tokio::test]
async fn what_the_engine_rejects_as_overload_is_a_429() {
    let rejects = Faults { reject_every: Some(2), ..Faults::default() };
    let stage = Stage::open(&[], vec![rejects]).await;
    for status in [200, 429, 200, 429] {
        assert_eq!(stage.server.send("POST", "/v1/completions", SHORT).await.status, status);
    }
}

#[tokio::test]
async fn keys_are_read_again_at_sighup() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "old-key\n").unwrap();
    let mut stage = Stage::open(&["--api-key-file", file.path().to_str().unwrap()], Vec::new()).await;
    let status = async |stage: &Stage, key: &str| {
        let mut stream = stage.connect().await;
        let request = format!(
            "GET /v1/models HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        until_closed(&mut stream).await[9..12].to_owned()
    };
    assert_eq!(
        (status(&stage, "old-key").await, status(&stage, "new-key").await),
        ("200".into(), "401".into())
    );
    std::fs::write(file.path(), "new-key\n").unwrap();
    stage.server.signal(Signal::HUP);
    stage.server.line("read the API keys again").await;
    assert_eq!(
        (status(&stage, "old-key").await, status(&stage, "new-key").await),
        ("401".into(), "200".into())
    );
}
