//! Every error is one OpenAI envelope with the right status, and names the field at fault.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use http::{Request, header};
use http_body_util::BodyExt;
use rung_frontend::engine::types::{EngineError, EngineErrorCode, EngineFinish, GenerateRequest};
use rung_frontend::engine::{Engine, Generation};
use rung_frontend::error::ApiError;
use rung_frontend::keys::Keyring;
use rung_frontend::lifecycle::{Lifecycle, Phase};
use rung_frontend::model::ServedModel;
use rung_frontend::router::router;
use rung_frontend::state::AppState;
use serde_json::{Value, json};
use support::{
    App, MODEL, Reply, ScriptedEngine, app, app_with, byte_id, chat, completion, config, finish,
    post_request, served_model, text_reply, tokens,
};

fn every_error() -> Vec<ApiError> {
    let text = || "One sentence.".to_owned();
    vec![
        ApiError::malformed("The request body is empty; a JSON object is needed."),
        ApiError::invalid("temperature", "temperature must be a number from 0 to 2."),
        ApiError::unsupported("tools", "tools is not supported by this server; leave it out."),
        ApiError::ContextLength { message: text(), param: Some("messages".into()) },
        ApiError::Capacity(text()),
        ApiError::Unauthorized,
        ApiError::model_not_found("gpt-9", "tiny"),
        ApiError::UnknownUrl { method: "GET".to_owned(), path: "/v2".to_owned() },
        ApiError::MethodNotAllowed { method: "PUT".to_owned(), path: "/health".to_owned() },
        ApiError::BodyTimeout(60),
        ApiError::BodyTooLarge(1024),
        ApiError::Overloaded { message: text(), retry_after_s: 7 },
        ApiError::SlowReader(text()),
        ApiError::Unavailable(text()),
        ApiError::Draining,
        ApiError::EngineLost(text()),
        ApiError::NonFinite(text()),
        ApiError::Internal(text()),
    ]
}

#[tokio::test]
async fn the_table_is_as_recorded() {
    let mut table = Vec::new();
    for error in every_error() {
        let body_alone = error.body();
        let response = error.into_response();
        let header =
            |name| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let row = json!({
            "status": response.status().as_u16(),
            "retry_after": header(header::RETRY_AFTER),
            "connection": header(header::CONNECTION),
            "www_authenticate": header(header::WWW_AUTHENTICATE),
        });
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, body_alone, "an SSE event and a JSON answer have the same body");
        let error: Value = serde_json::from_slice(&body).unwrap();
        table.push(json!({"answer": row, "body": error}));
    }
    insta::assert_json_snapshot!(table);
}

#[tokio::test]
async fn each_bad_field_is_a_400_that_names_it() {
    let engine = ScriptedEngine::new(Vec::new());
    let app = app(&engine);
    let both = [
        (json!({"temperature": 2.5}), "temperature"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": "1"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_p": 1.01}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"n": 0}), "n"),
        (json!({"n": 9}), "n"),
        (json!({"n": true}), "n"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"seed": "x"}), "seed"),
        (json!({"max_tokens": -1}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": "8"}), "max_tokens"),
        (json!({"max_tokens": 4, "min_tokens": 5}), "min_tokens"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": ["a", ""]}), "stop"),
        (json!({"stop": [1]}), "stop"),
        (json!({"stop": {"a": 1}}), "stop"),
        (json!({"stop": vec!["a"; 17]}), "stop"),
        (json!({"stop": "a".repeat(1025)}), "stop"),
        (json!({"stop_token_ids": [602]}), "stop_token_ids"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids"),
        (json!({"stop_token_ids": [999_999_999_999_u64]}), "stop_token_ids"),
        (json!({"stop_token_ids": 1}), "stop_token_ids"),
        (json!({"stop_token_ids": vec![1; 17]}), "stop_token_ids"),
        (json!({"stream": 1}), "stream"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"stream": true, "stream_options": 1}), "stream_options"),
        (json!({"stream": true, "stream_options": {"include_usage": 1}}), "include_usage"),
        (json!({"ignore_eos": "yes"}), "ignore_eos"),
        (json!({"model": null}), "model"),
        (json!({"model": 3}), "model"),
        (json!({"logit_bias": {"5": 1}}), "logit_bias"),
        (json!({"presence_penalty": 0.5}), "presence_penalty"),
        (json!({"frequency_penalty": -2}), "frequency_penalty"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"structured_outputs": {"regex": "a"}}), "structured_outputs.regex"),
    ];
    let chat_only = [
        (json!({"messages": []}), "messages"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": {}}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
        (json!({"logprobs": 1}), "logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": -1}), "top_logprobs"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"audio": {}}), "audio"),
        (json!({"prediction": {"type": "content", "content": "x"}}), "prediction"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"chat_template": "{{ 1 }}"}), "chat_template"),
        (json!({"chat_template_kwargs": {"tokenize": true}}), "chat_template_kwargs"),
        (json!({"add_generation_prompt": false}), "add_generation_prompt"),
    ];
    let completions_only = [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": ["a", ""]}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": ["a", 1]}), "prompt"),
        (json!({"prompt": [602]}), "prompt"),
        (json!({"prompt": [[5], [-5]]}), "prompt"),
        (json!({"prompt": [1.5]}), "prompt"),
        (json!({"prompt": vec!["a"; 129]}), "prompt"),
        (json!({"prompt": vec!["a"; 100]}), "prompt"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"logprobs": -1}), "logprobs"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"best_of": 0}), "best_of"),
    ];
    for (path, request, cases) in [
        ("/v1/chat/completions", chat as fn(Value) -> Value, &chat_only[..]),
        ("/v1/completions", completion, &completions_only[..]),
    ] {
        for (fields, param) in both.iter().chain(cases) {
            for stream in [false, true] {
                let mut body = request(fields.clone());
                if stream && *param != "stream" && *param != "stream_options" {
                    body["stream"] = json!(true);
                }
                let answer = app.post(path, &body).await;
                let (status, error) = answer.error();
                assert_eq!((status, &error["param"]), (400, &json!(param)), "{path} {fields}: {error}");
                assert_eq!(error["type"], "invalid_request_error");
            }
        }
    }
    assert!(engine.record().requests.is_empty(), "nothing reached the engine");
}

#[tokio::test]
async fn b26_bodies_that_are_no_requests_are_400_in_the_envelope() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    let spaces = " ".repeat(1 << 20);
    let utf16: Vec<u8> = "{}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bodies: [&[u8]; 16] = [
        b"[]",
        b"true",
        b"null",
        b"12",
        b"\"s\"",
        b"",
        b"{",
        b"{\"model\":\"tiny\",}",
        b"\xEF\xBB\xBF{}",
        &utf16,
        b"{\"model\":\"\xFF\"}",
        b"{\"model\":\"tiny\",\"model\":\"tiny\"}",
        spaces.as_bytes(),
        b"{\"model\":\"tiny\"} trailing",
        b"{\"model\":\"tiny\",\"temperature\":NaN}",
        b"{\"model\":\"tiny\",\"temperature\":1e999}",
    ];
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for body in bodies {
            let (status, error) = app.post_raw(path, body.to_vec()).await.error();
            assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
            let message = error["message"].as_str().unwrap();
            assert!(!message.contains("::") && !message.contains("struct"), "{message}");
        }
    }
}

#[tokio::test]
async fn b26_routes_and_methods_that_do_not_exist_are_in_the_envelope() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    for (method, path, status, code) in [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/chat/completion", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let answer = app.send(request).await;
        assert!(status != 405 || answer.headers.contains_key("allow"), "{method} {path}");
        let (got, error) = answer.error();
        assert_eq!((got, &error["code"]), (status, &json!(code)), "{method} {path}");
    }
}

#[tokio::test]
async fn b26_content_type_is_not_asked_for() {
    for content_type in [None, Some("text/plain"), Some("application/json; charset=utf-8")] {
        let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![text_reply("a", EngineFinish::Length)])]));
        let mut request = post_request("/v1/completions", completion(json!({})).to_string());
        request.headers_mut().remove("content-type");
        if let Some(content_type) = content_type {
            request.headers_mut().insert("content-type", content_type.parse().unwrap());
        }
        assert_eq!(app.send(request).await.status, 200, "{content_type:?}");
    }
}

#[tokio::test]
async fn b27_a_body_over_the_limit_is_413_and_under_it_is_read() {
    let mut config = config();
    config.limits.max_body_bytes = 4 << 20;
    let app = app_with(&ScriptedEngine::new(Vec::new()), config);
    // Above the web framework's own default, below ours: too long for the model, not for the server.
    let (status, error) = app.completion(json!({"prompt": "a".repeat(3_000_000)})).await.error();
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")));
    let one_over = completion(
        json!({"prompt": "a".repeat((4 << 20) - completion(json!({"prompt": ""})).to_string().len() + 1)}),
    );
    assert_eq!(one_over.to_string().len(), (4 << 20) + 1);
    let (status, error) = app.post("/v1/completions", &one_over).await.error();
    assert_eq!((status, &error["code"]), (413, &json!("request_too_large")));
    // Without a Content-Length the limit holds too.
    let chunks = (0..5).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1 << 20]));
    let body = Body::from_stream(futures_util::stream::iter(chunks));
    assert_eq!(app.post_raw("/v1/completions", body).await.error().0, 413);
}

#[tokio::test]
async fn b39_a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    for ids in [256, 257, 1000] {
        let answer = app.completion(json!({"prompt": vec![byte_id(b'a'); ids]})).await;
        let (status, error) = answer.error();
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (400, &json!("context_length_exceeded"), &json!("prompt"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&ids.to_string()) && message.contains("256"), "{message}");
    }
    let (status, error) =
        app.chat(json!({"messages": [{"role": "user", "content": "é€ ".repeat(200)}]})).await.error();
    assert_eq!(
        (status, &error["code"], &error["param"]),
        (400, &json!("context_length_exceeded"), &json!("messages"))
    );
}

#[tokio::test]
async fn an_unknown_model_is_404() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    for answer in [
        app.chat(json!({"model": "gpt-9"})).await,
        app.completion(json!({"model": "gpt-9", "stream": true})).await,
        app.get("/v1/models/gpt-9").await,
        app.get("/v1/models/org/name").await,
    ] {
        let (status, error) = answer.error();
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (404, &json!("model_not_found"), &json!("model"))
        );
    }
}

#[tokio::test]
async fn without_an_engine_requests_get_503_with_retry_after() {
    let engine = ScriptedEngine::new(Vec::new());
    engine.lose_model();
    let app = app(&engine);
    for answer in [
        app.chat(json!({})).await,
        app.completion(json!({})).await,
        app.get("/v1/models").await,
        app.get("/readyz").await,
    ] {
        assert!(answer.headers.contains_key("retry-after"));
        assert_eq!(answer.error().0, 503);
    }
    assert_eq!(app.get("/livez").await.status, 200);
}

#[tokio::test]
async fn what_the_engine_refuses_is_a_plain_http_error_in_both_modes() {
    let cases = [
        (EngineErrorCode::InvalidArgument, 400, "invalid_request"),
        (EngineErrorCode::ContextLength, 400, "context_length_exceeded"),
        (EngineErrorCode::Capacity, 400, "capacity_exceeded"),
        (EngineErrorCode::Overloaded, 429, "overloaded"),
        (EngineErrorCode::Draining, 503, "engine_unavailable"),
        (EngineErrorCode::NonFinite, 500, "non_finite_logits"),
        (EngineErrorCode::Internal, 500, "internal_error"),
        (EngineErrorCode::Unavailable, 503, "engine_unavailable"),
        (EngineErrorCode::Lost, 503, "engine_lost"),
    ];
    for (code, status, name) in cases {
        let error = EngineError { code, message: "Not now.".to_owned() };
        for stream in [false, true] {
            // At submission, and as the first event.
            let first = vec![finish(EngineFinish::Error(error.clone()))];
            for reply in [Reply::Refuse(error.clone()), Reply::Play(vec![first.clone()])] {
                let mut config = config();
                config.limits.replay_wait = Duration::ZERO;
                let app = app_with(&ScriptedEngine::new(vec![reply]), config);
                let answer = app.chat(json!({"stream": stream})).await;
                assert_eq!(answer.headers.contains_key("retry-after"), status == 429 || status == 503);
                let (got, body) = answer.error();
                assert_eq!(
                    (got, &body["code"], &body["message"]),
                    (status, &json!(name), &json!("Not now."))
                );
            }
        }
    }
}

#[tokio::test]
async fn one_refused_prompt_of_several_ends_the_others() {
    let error = EngineError { code: EngineErrorCode::Overloaded, message: "Full.".to_owned() };
    let engine = ScriptedEngine::new(vec![Reply::Hold, Reply::Refuse(error)]);
    let app = app(&engine);
    assert_eq!(app.completion(json!({"prompt": ["a", "b", "c"], "n": 2})).await.error().0, 429);
    assert_eq!(engine.record().aborts, [(0, 0), (0, 1)]);
}

#[tokio::test]
async fn tokens_without_their_logprobs_fail_the_request_alone() {
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![vec![tokens(&[5, 6])]])]));
    assert_eq!(app.completion(json!({"logprobs": 1})).await.error().0, 500);
}

#[tokio::test]
async fn a_row_the_engine_cancelled_by_itself_is_an_error() {
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![vec![finish(EngineFinish::Cancelled)]])]));
    assert_eq!(app.chat(json!({})).await.error().0, 500);
}

#[tokio::test]
async fn a_panic_in_a_handler_is_that_requests_500() {
    struct Panics;
    impl Engine for Panics {
        fn model(&self) -> Option<Arc<ServedModel>> {
            Some(Arc::new(served_model()))
        }

        fn ready(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(std::future::pending())
        }

        fn submit(&self, _: GenerateRequest) -> Result<Generation, EngineError> {
            panic!("a bug");
        }
    }
    let lifecycle = Lifecycle::new();
    let state = AppState::new(Arc::new(config()), Arc::new(Panics), Arc::default(), lifecycle.clone());
    let app = App { router: router(state), lifecycle, metrics: Arc::default() };
    for stream in [false, true] {
        let answer = app.chat(json!({"stream": stream})).await;
        assert!(answer.headers.contains_key("x-request-id"));
        let (status, error) = answer.error();
        assert_eq!((status, &error["code"]), (500, &json!("internal_error")));
        assert!(!error["message"].as_str().unwrap().contains("bug"));
    }
    assert_eq!(app.lifecycle.num_open(), 0);
    assert_eq!(app.get("/livez").await.status, 200);
}

#[tokio::test]
async fn more_requests_than_the_limit_get_429_and_their_place_comes_free() {
    let mut config = config();
    config.limits.max_inflight_requests = 1;
    let engine =
        ScriptedEngine::new(vec![Reply::Hold, Reply::Play(vec![text_reply("a", EngineFinish::Length)])]);
    let app = app_with(&engine, config);
    let first = tokio::spawn({
        let app = app.clone();
        async move { app.chat(json!({})).await }
    });
    while engine.record().sinks.is_empty() {
        tokio::task::yield_now().await;
    }
    let refused = app.chat(json!({})).await;
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.error().1["code"], "overloaded");
    assert!(app.metrics.render("").contains("rung_requests_in_flight 1"));
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert_eq!(engine.record().aborts, [(0, 0)]);
    assert_eq!(app.chat(json!({})).await.status, 200);
    assert!(app.metrics.render("").contains("rung_requests_in_flight 0"));
    assert_eq!(app.lifecycle.num_open(), 0);
}

#[tokio::test]
async fn b71_a_draining_server_refuses_new_work_and_closes_connections() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    app.lifecycle.advance(Phase::Draining);
    for answer in [
        app.chat(json!({})).await,
        app.completion(json!({})).await,
        app.get("/readyz").await,
        app.get("/health").await,
    ] {
        assert_eq!(answer.headers["connection"], "close");
        assert!(answer.headers.contains_key("retry-after"));
        assert_eq!(answer.error().1["code"], "server_draining");
    }
    assert_eq!(app.get("/livez").await.status, 200);
    assert_eq!(app.get("/v1/models").await.status, 200);
}

#[tokio::test]
async fn keys_guard_everything_but_probes() {
    let mut config = config();
    config.keys = Arc::new(Keyring::fixed(&["first-key", "second"]));
    let app = app_with(&ScriptedEngine::new(Vec::new()), config);
    for path in ["/livez", "/readyz", "/health", "/version", "/metrics"] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/v1/models/tiny", "/nothing", "/"] {
        let answer = app.get(path).await;
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert_eq!(answer.error().1["code"], "invalid_api_key", "{path}");
    }
    let with = |authorization: &str| {
        Request::get("/v1/models").header("authorization", authorization).body(Body::empty()).unwrap()
    };
    for good in ["Bearer first-key", "bearer second", "BEARER  second "] {
        assert_eq!(app.send(with(good)).await.status, 200, "{good}");
    }
    for bad in [
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-keys",
        "Basic second",
        "second",
        "Bearer é",
    ] {
        assert_eq!(app.send(with(bad)).await.status, 401, "{bad}");
    }
}

#[tokio::test]
async fn b51_request_ids_are_echoed_only_when_well_formed() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    let with = |id: &[u8]| {
        let id = http::HeaderValue::from_bytes(id).unwrap();
        Request::get("/nothing").header("x-request-id", id).body(Body::empty()).unwrap()
    };
    for good in ["dup-1", "a", "0b6f/c_d.e:f", &"x".repeat(128)] {
        assert_eq!(app.send(with(good.as_bytes())).await.headers["x-request-id"], good);
    }
    let long = "x".repeat(10_000);
    for bad in [&b""[..], b"a b", b"\xC3\xA9", b"<script>", long.as_bytes()] {
        let answer = app.send(with(bad)).await;
        let made = answer.headers["x-request-id"].to_str().unwrap();
        assert!(made.starts_with("req-") && made.len() == 36, "{made}");
    }
    assert!(app.get("/livez").await.headers.contains_key("x-request-id"));
}

#[tokio::test]
async fn a_model_without_a_template_refuses_chats_in_words() {
    let mut model = served_model();
    model.template = None;
    let app = app(&ScriptedEngine::with_model(model, Vec::new()));
    let (status, error) = app.chat(json!({})).await.error();
    assert_eq!((status, &error["param"]), (400, &json!("messages")));
    assert!(error["message"].as_str().unwrap().contains("/v1/completions"));
    assert_eq!(app.chat(json!({"model": MODEL, "messages": 1})).await.error().0, 400);
}
