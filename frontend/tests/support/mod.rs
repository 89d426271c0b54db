//! A scripted engine, small tokenizers, and HTTP by `oneshot`.

#![allow(dead_code, unreachable_pub, reason = "shared by several test files, each of which uses a part")]

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt;
use rung_frontend::chat::ChatTemplate;
use rung_frontend::config::{Config, EngineSource, Limits};
use rung_frontend::engine::types::{
    Capability, EngineError, EngineFinish, EngineLimits, GenerateRequest, ModelFacts, SampleDelta, Sampling,
    Started, TokenLogprobs,
};
use rung_frontend::engine::{AbortSink, Engine, Generation, GenerationSink};
use rung_frontend::grammar::GrammarCompiler;
use rung_frontend::keys::Keyring;
use rung_frontend::lifecycle::Lifecycle;
use rung_frontend::metrics::Metrics;
use rung_frontend::model::ServedModel;
use rung_frontend::router::router;
use rung_frontend::state::AppState;
use rung_frontend::text::Tokenizer;
use serde_json::{Value, json};
use tower::ServiceExt;

pub const MODEL: &str = "tiny";
pub const IM_START: u32 = 1;
pub const IM_END: u32 = 2;
pub const VOCAB_SIZE: u32 = 602;

/// The template of the development model.
pub const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

pub fn byte_level() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load =
        || Arc::new(Tokenizer::from_json(include_bytes!("../fixtures/byte_level.json"), VOCAB_SIZE).unwrap());
    Arc::clone(TOKENIZER.get_or_init(load))
}

pub fn byte_fallback() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let load =
        || Arc::new(Tokenizer::from_json(include_bytes!("../fixtures/byte_fallback.json"), 362).unwrap());
    Arc::clone(TOKENIZER.get_or_init(load))
}

/// The id of the token that is this one byte.
pub fn byte_id(byte: u8) -> u32 {
    let tokenizer = byte_level();
    (0..VOCAB_SIZE).find(|&id| tokenizer.vocabulary().bytes(id) == [byte]).unwrap()
}

/// One token per byte, so that characters and stop strings cross token borders.
pub fn bytes_as_ids(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&byte| byte_id(byte)).collect()
}

pub fn served_model() -> ServedModel {
    ServedModel {
        id: MODEL.to_owned(),
        created: 1_700_000_000,
        facts: ModelFacts {
            name: MODEL.to_owned(),
            architecture: "llama".to_owned(),
            weight_format: "Q4_1".to_owned(),
            num_parameters: 1,
            vocab_size: VOCAB_SIZE,
            max_model_len: 256,
            bos_token_id: None,
            eos_token_ids: vec![IM_END],
            default_sampling: Sampling::default(),
            runner: "scripted".to_owned(),
            engine_version: "0".to_owned(),
            limits: EngineLimits {
                max_submit_bytes: 1 << 20,
                max_num_seqs: 16,
                max_waiting: 64,
                max_samples: 8,
                max_top_logprobs: 20,
                max_stop_token_ids: 16,
                ..EngineLimits::default()
            },
            capabilities: [Capability::Logprobs, Capability::PromptLogprobs].into_iter().collect(),
        },
        tokenizer: byte_level(),
        grammars: GrammarCompiler::new(byte_level(), &[IM_END]),
        template: Some(ChatTemplate::compile(TEMPLATE).unwrap()),
    }
}

/// What the engine does with one request.
pub enum Reply {
    Refuse(EngineError),
    /// Per sample, its deltas; one of each sample is pushed per turn, and the reader runs between.
    Play(Vec<Vec<SampleDelta>>),
    /// Nothing by itself: the test pushes into `sinks`.
    Hold,
}

#[derive(Default)]
pub struct Record {
    pub requests: Vec<GenerateRequest>,
    pub sinks: Vec<GenerationSink>,
    /// (request, sample), in order.
    pub aborts: Vec<(usize, u32)>,
}

pub struct ScriptedEngine {
    model: Mutex<Option<Arc<ServedModel>>>,
    replies: Mutex<VecDeque<Reply>>,
    record: Arc<Mutex<Record>>,
    is_away: AtomicBool,
}

struct RecordAborts {
    request: usize,
    record: Arc<Mutex<Record>>,
}

impl AbortSink for RecordAborts {
    fn abort(&self, sample: u32) {
        self.record.lock().unwrap().aborts.push((self.request, sample));
    }
}

impl Engine for ScriptedEngine {
    fn model(&self) -> Option<Arc<ServedModel>> {
        self.model.lock().unwrap().clone()
    }

    fn ready(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        if self.is_away.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        Box::pin(std::future::ready(()))
    }

    fn submit(&self, request: GenerateRequest) -> Result<Generation, EngineError> {
        let reply = self.replies.lock().unwrap().pop_front().unwrap_or(Reply::Hold);
        if let Reply::Refuse(error) = reply {
            return Err(error);
        }
        let mut record = self.record.lock().unwrap();
        let sink = RecordAborts { request: record.requests.len(), record: Arc::clone(&self.record) };
        let (generation, sink) = Generation::new(request.samples, request.max_unread_bytes, Arc::new(sink));
        record.requests.push(request);
        record.sinks.push(sink.clone());
        if let Reply::Play(samples) = reply {
            tokio::spawn(play(sink, samples));
        }
        Ok(generation)
    }
}

async fn play(sink: GenerationSink, samples: Vec<Vec<SampleDelta>>) {
    let longest = samples.iter().map(Vec::len).max().unwrap_or(0);
    for turn in 0..longest {
        for (sample, deltas) in (0u32..).zip(&samples) {
            if let Some(delta) = deltas.get(turn) {
                sink.push(sample, delta.clone());
            }
        }
        tokio::task::yield_now().await;
    }
}

impl ScriptedEngine {
    pub fn new(replies: Vec<Reply>) -> Arc<Self> {
        Self::with_model(served_model(), replies)
    }

    pub fn with_model(model: ServedModel, replies: Vec<Reply>) -> Arc<Self> {
        Arc::new(Self {
            model: Mutex::new(Some(Arc::new(model))),
            replies: Mutex::new(replies.into()),
            record: Arc::default(),
            is_away: AtomicBool::new(false),
        })
    }

    /// Whoever waits for the engine waits for ever.
    pub fn stay_away(&self) {
        self.is_away.store(true, Ordering::Relaxed);
    }

    pub fn lose_model(&self) {
        *self.model.lock().unwrap() = None;
    }

    pub fn record(&self) -> std::sync::MutexGuard<'_, Record> {
        self.record.lock().unwrap()
    }
}

/// A server around an engine, without sockets.
#[derive(Clone)]
pub struct App {
    pub router: Router,
    pub lifecycle: Lifecycle,
    pub metrics: Arc<Metrics>,
}

pub fn config() -> Config {
    Config {
        listen: ([127, 0, 0, 1], 0).into(),
        served_model_name: None,
        keys: Arc::new(Keyring::fixed::<&str>(&[])),
        engine: EngineSource::Connect { addresses: Vec::new(), tls: None },
        drain_timeout: Duration::from_secs(30),
        limits: Limits::default(),
    }
}

pub fn app(engine: &Arc<ScriptedEngine>) -> App {
    app_with(engine, config())
}

pub fn app_with(engine: &Arc<ScriptedEngine>, config: Config) -> App {
    let lifecycle = Lifecycle::new();
    let metrics = Arc::new(Metrics::default());
    let engine: Arc<dyn Engine> = Arc::clone(engine) as Arc<dyn Engine>;
    let state = AppState::new(Arc::new(config), engine, Arc::clone(&metrics), lifecycle.clone());
    App { router: router(state), lifecycle, metrics }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// Status, then the error object; panics when it is not the OpenAI envelope.
    pub fn error(&self) -> (u16, Value) {
        let mut body = self.json();
        let error = body["error"].take();
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{}", self.body);
        assert!(error["type"].is_string() && error["code"].is_string(), "{}", self.body);
        assert!(error["param"].is_string() || error["param"].is_null(), "{}", self.body);
        assert_eq!(self.headers["content-type"], "application/json");
        (self.status.as_u16(), error)
    }

    /// The `data:` payloads of a stream, parsed strictly; the last one is `[DONE]` or an error.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.headers["content-type"], "text/event-stream");
        parse_events(&self.body)
    }
}

/// Strict: every event is one `data: ` line or one comment, and a blank line.
pub fn parse_events(body: &str) -> Vec<Value> {
    let blocks = body.strip_suffix("\n\n").expect("the stream ends with a blank line").split("\n\n");
    blocks
        .filter(|block| !block.starts_with(':'))
        .map(|block| {
            let data = block.strip_prefix("data: ").unwrap_or_else(|| panic!("not an event: {block:?}"));
            assert!(!data.contains('\n'));
            if data == "[DONE]" { json!("[DONE]") } else { serde_json::from_str(data).unwrap() }
        })
        .collect()
}

impl App {
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_raw(path, body.to_string()).await
    }

    pub async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.send(post_request(path, body)).await
    }

    pub async fn chat(&self, fields: Value) -> Answer {
        self.post("/v1/chat/completions", &chat(fields)).await
    }

    pub async fn completion(&self, fields: Value) -> Answer {
        self.post("/v1/completions", &completion(fields)).await
    }
}

pub fn post_request(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

/// A chat request; `fields` replace or add.
pub fn chat(fields: Value) -> Value {
    merged(json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}), fields)
}

/// A completion request; `fields` replace or add.
pub fn completion(fields: Value) -> Value {
    merged(json!({"model": MODEL, "prompt": "hi", "max_tokens": 64}), fields)
}

fn merged(mut base: Value, fields: Value) -> Value {
    let Value::Object(fields) = fields else { panic!("fields must be an object") };
    base.as_object_mut().unwrap().extend(fields);
    base
}

pub fn started(cached_tokens: u32) -> Started {
    Started { prompt_tokens: 0, cached_tokens, queue: Duration::ZERO, prefill: Duration::ZERO }
}

pub fn tokens(token_ids: &[u32]) -> SampleDelta {
    SampleDelta { token_ids: token_ids.to_vec(), ..SampleDelta::default() }
}

pub fn finish(finish: EngineFinish) -> SampleDelta {
    SampleDelta { finish: Some(finish), ..SampleDelta::default() }
}

/// A sample's whole life in one delta.
pub fn text_reply(text: &str, end: EngineFinish) -> Vec<SampleDelta> {
    let mut token_ids = bytes_as_ids(text.as_bytes());
    if let EngineFinish::Stop { token_id } = end {
        token_ids.push(token_id);
    }
    vec![SampleDelta { token_ids, started: Some(started(0)), finish: Some(end), ..SampleDelta::default() }]
}

/// The same sample, cut into deltas of these sizes, over and over; the finish comes alone.
pub fn chopped(whole: &SampleDelta, sizes: &[usize]) -> Vec<SampleDelta> {
    let mut deltas = Vec::new();
    let mut at = 0;
    let mut sizes = sizes.iter().copied().cycle();
    while at < whole.token_ids.len() {
        let end = (at + sizes.next().unwrap_or(1).max(1)).min(whole.token_ids.len());
        deltas.push(SampleDelta {
            token_ids: whole.token_ids[at..end].to_vec(),
            logprobs: whole.logprobs.get(at..end).unwrap_or_default().to_vec(),
            prompt_logprobs: if at == 0 { whole.prompt_logprobs.clone() } else { Vec::new() },
            started: whole.started.filter(|_| at == 0),
            ..SampleDelta::default()
        });
        at = end;
    }
    if at == 0 {
        let prompt_logprobs = whole.prompt_logprobs.clone();
        deltas.push(SampleDelta { prompt_logprobs, ..SampleDelta::default() });
    }
    deltas.push(SampleDelta { finish: whole.finish.clone(), ..SampleDelta::default() });
    deltas
}

/// Logprobs that differ by token and position, so that a shift shows.
pub fn logprobs_for(token_ids: &[u32], top: u32) -> Vec<TokenLogprobs> {
    (0u32..)
        .zip(token_ids)
        .map(|(position, &id)| TokenLogprobs {
            chosen: -((id + position) as f32) / 64.0,
            top: (0..top)
                .map(|rank| ((id + rank) % VOCAB_SIZE, -((rank + position) as f32) / 32.0))
                .collect(),
        })
        .collect()
}
