//! A scripted engine: a real gRPC server on a Unix socket whose every message a test decides.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::{Stream, stream};
use rung_frontend::engine::proto::engine_service_server::{EngineService, EngineServiceServer};
use rung_frontend::engine::proto::session_request::Message as Request;
use rung_frontend::engine::proto::session_response::Message as Response;
use rung_frontend::engine::{EngineAddress, EngineClient, proto};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Status, Streaming};

const MAX_MESSAGE_BYTES: usize = 256 * 1024 * 1024;
const TOKENIZER: &[u8] = include_bytes!("../fixtures/byte_level.json");
pub(crate) const VOCAB_SIZE: u32 = 640;
pub(crate) const MAX_MODEL_LEN: u32 = 1 << 25;

type Outbound<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the engine says of itself; tests change it before they connect.
pub(crate) struct Script {
    pub(crate) describe: proto::DescribeResponse,
    pub(crate) files: BTreeMap<String, Bytes>,
    /// Refuses sessions with this.
    pub(crate) refuse: Option<Status>,
}

impl Default for Script {
    fn default() -> Self {
        let describe = proto::DescribeResponse {
            protocol: 1,
            engine_version: "0.1.0".to_owned(),
            model: Some(proto::ModelFacts {
                name: "mock".to_owned(),
                architecture: "llama".to_owned(),
                weight_format: "F32".to_owned(),
                num_parameters: 1,
                vocab_size: VOCAB_SIZE,
                max_model_len: MAX_MODEL_LEN,
                bos_token_id: None,
                eos_token_ids: vec![0],
                default_sampling: None,
                runner: "mock".to_owned(),
            }),
            limits: Some(proto::Limits {
                max_submit_bytes: 1 << 20,
                max_num_seqs: 4,
                max_waiting: 16,
                max_samples: 8,
                max_top_logprobs: 5,
                max_stop_token_ids: 4,
                ..proto::Limits::default()
            }),
            capabilities: vec![proto::Capability::Logprobs.into()],
            tokenizer_files: Vec::new(),
        };
        let mut script = Self { describe, files: BTreeMap::new(), refuse: None };
        script.add_file("tokenizer.json", TOKENIZER);
        script
    }
}

impl Script {
    /// Adds a file to the tokenizer bundle.
    pub(crate) fn add_file(&mut self, name: &str, content: &'static [u8]) {
        self.describe.tokenizer_files.push(proto::TokenizerFile {
            name: name.to_owned(),
            size_bytes: content.len() as u64,
            sha256: Bytes::copy_from_slice(&Sha256::digest(content)),
        });
        self.files.insert(name.to_owned(), Bytes::from_static(content));
    }
}

/// The engine. Dropping it ends the server and its connections.
pub(crate) struct MockEngine {
    pub(crate) address: EngineAddress,
    sessions: mpsc::UnboundedReceiver<MockSession>,
    server: JoinHandle<()>,
    _directory: TempDir,
}

/// One session, from the engine's side.
pub(crate) struct MockSession {
    requests: Streaming<proto::SessionRequest>,
    responses: mpsc::Sender<Result<proto::SessionResponse, Status>>,
    seq: u64,
}

struct Service {
    script: Arc<Mutex<Script>>,
    sessions: mpsc::UnboundedSender<MockSession>,
}

impl MockEngine {
    pub(crate) fn start(script: Script) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("engine.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (sender, sessions) = mpsc::unbounded_channel();
        let service = Service { script: Arc::new(Mutex::new(script)), sessions: sender };
        let service = EngineServiceServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let serving =
            Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener));
        let server = tokio::spawn(async move { serving.await.unwrap() });
        Self { address: EngineAddress::Unix(path), sessions, server, _directory: directory }
    }

    pub(crate) async fn client(&self) -> EngineClient {
        EngineClient::connect(&self.address, None).await.unwrap()
    }

    /// The next session that a frontend opens.
    pub(crate) async fn session(&mut self) -> MockSession {
        self.sessions.recv().await.unwrap()
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl MockSession {
    pub(crate) async fn next(&mut self) -> Option<Request> {
        self.requests.message().await.ok().flatten().and_then(|request| request.message)
    }

    pub(crate) async fn submit(&mut self) -> proto::Submit {
        match self.next().await {
            Some(Request::Submit(submit)) => submit,
            other => panic!("expected a Submit, got {other:?}"),
        }
    }

    pub(crate) async fn abort(&mut self) -> Vec<u32> {
        match self.next().await {
            Some(Request::Abort(abort)) => values(&abort.handles),
            other => panic!("expected an Abort, got {other:?}"),
        }
    }

    /// Sends a Step with the next number; `fill` writes the rest of it.
    pub(crate) async fn step(&mut self, fill: impl FnOnce(&mut proto::Step)) {
        self.seq += 1;
        let mut step = proto::Step { seq: self.seq, loop_seq: self.seq, ..proto::Step::default() };
        fill(&mut step);
        self.send(Response::Step(step)).await;
    }

    pub(crate) async fn reject(&mut self, handles: &[u32], error: proto::EngineError) {
        let rejected = proto::Rejected { handles: column(handles.iter().copied()), error: Some(error) };
        self.send(Response::Rejected(rejected)).await;
    }

    pub(crate) async fn send(&mut self, message: Response) {
        // A frontend that has gone reads nothing; tests look at what it did before.
        let _ = self.responses.send(Ok(proto::SessionResponse { message: Some(message) })).await;
    }

    /// Ends the stream with an error.
    pub(crate) async fn fail(self, status: Status) {
        let _ = self.responses.send(Err(status)).await;
    }
}

#[tonic::async_trait]
impl EngineService for Service {
    async fn describe(
        &self,
        _: tonic::Request<proto::DescribeRequest>,
    ) -> Result<tonic::Response<proto::DescribeResponse>, Status> {
        Ok(tonic::Response::new(self.script.lock().unwrap().describe.clone()))
    }

    type FetchTokenizerStream = Outbound<proto::FetchTokenizerResponse>;

    async fn fetch_tokenizer(
        &self,
        request: tonic::Request<proto::FetchTokenizerRequest>,
    ) -> Result<tonic::Response<Self::FetchTokenizerStream>, Status> {
        let name = request.into_inner().name;
        let content = self.script.lock().unwrap().files.get(&name).cloned();
        let content = content.ok_or(Status::not_found("no such file"))?;
        let chunks: Vec<_> = content
            .chunks(1000)
            .map(|chunk| Ok(proto::FetchTokenizerResponse { chunk: Bytes::copy_from_slice(chunk) }))
            .collect();
        Ok(tonic::Response::new(Box::pin(stream::iter(chunks))))
    }

    type SessionStream = Outbound<proto::SessionResponse>;

    async fn session(
        &self,
        request: tonic::Request<Streaming<proto::SessionRequest>>,
    ) -> Result<tonic::Response<Self::SessionStream>, Status> {
        if let Some(status) = self.script.lock().unwrap().refuse.clone() {
            return Err(status);
        }
        let (responses, outbound) = mpsc::channel(64);
        let session = MockSession { requests: request.into_inner(), responses, seq: 0 };
        self.sessions.send(session).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(outbound))))
    }
}

/// A column of little-endian u32.
pub(crate) fn column(values: impl IntoIterator<Item = u32>) -> Bytes {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// A column of little-endian f32.
pub(crate) fn real_column(values: impl IntoIterator<Item = f32>) -> Bytes {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The values of a column.
pub(crate) fn values(column: &[u8]) -> Vec<u32> {
    column.chunks_exact(4).map(|chunk| u32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

/// Adds rows of (handle, token ids) to a Step.
pub(crate) fn rows(step: &mut proto::Step, rows: &[(u32, &[u32])]) {
    step.handles = column(rows.iter().map(|(handle, _)| *handle));
    step.token_counts = column(rows.iter().map(|(_, ids)| ids.len() as u32));
    step.token_ids = column(rows.iter().flat_map(|(_, ids)| ids.iter().copied()));
}

/// A terminal row that ended because of its length.
pub(crate) fn length(handle: u32, completion_tokens: u32) -> proto::Finished {
    proto::Finished {
        handle,
        reason: proto::FinishReason::Length.into(),
        completion_tokens,
        ..proto::Finished::default()
    }
}

/// A terminal row of another reason.
pub(crate) fn finished(handle: u32, reason: proto::FinishReason) -> proto::Finished {
    proto::Finished { handle, reason: reason.into(), ..proto::Finished::default() }
}
