//! More work than there is room for, clients that are too slow, and engines that are lost.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt;
use rung_frontend::engine::Push;
use rung_frontend::engine::types::{EngineError, EngineErrorCode, EngineFinish, SampleDelta};
use serde_json::{Value, json};
use support::{
    Answer, App, IM_END, Reply, ScriptedEngine, app, app_with, bytes_as_ids, chat, completion, config,
    finish, parse_events, post_request, text_reply, tokens,
};
use tower::ServiceExt;

const STOP: EngineFinish = EngineFinish::Stop { token_id: IM_END };

fn lost() -> EngineFinish {
    let message = "The engine was lost while it worked on this request.".to_owned();
    EngineFinish::Error(EngineError { code: EngineErrorCode::Lost, message })
}

/// A request under way in a task of its own.
fn begin(app: &App, body: Value) -> tokio::task::JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { app.post("/v1/completions", &body).await })
}

async fn submitted(engine: &ScriptedEngine, count: usize) {
    while engine.record().sinks.len() < count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn b74_prompts_beyond_the_queue_get_429_and_places_come_free_with_first_tokens() {
    let mut config = config();
    config.limits.max_queued_tokens = 10;
    let engine =
        ScriptedEngine::new(vec![Reply::Hold, Reply::Hold, Reply::Play(vec![text_reply("x", STOP)])]);
    let app = app_with(&engine, config);
    let prompt = |count| completion(json!({"prompt": vec![5; count], "stream": true}));
    let first = begin(&app, prompt(6));
    submitted(&engine, 1).await;
    let refused = app.post("/v1/completions", &prompt(5)).await;
    assert_eq!(refused.headers["retry-after"], "1");
    let (status, error) = refused.error();
    assert_eq!((status, error["code"].as_str()), (429, Some("overloaded")));
    assert!(error["message"].as_str().unwrap().contains("--max-queued-tokens"), "{error}");
    assert!(app.metrics.render("").contains("reason=\"overloaded\"} 1"));
    // One that is small enough still fits.
    let second = begin(&app, prompt(4));
    submitted(&engine, 2).await;
    assert_eq!(
        app.get("/metrics").await.body.lines().filter(|line| *line == "rung_queued_prompt_tokens 10").count(),
        1
    );
    // With its first token the first request has left the queue, though it goes on.
    engine.record().sinks[0].push(0, tokens(&bytes_as_ids(b"a")));
    while app.get("/metrics").await.body.contains("rung_queued_prompt_tokens 10") {
        tokio::task::yield_now().await;
    }
    assert_eq!(app.post("/v1/completions", &prompt(5)).await.status, 200);
    for sink in &engine.record().sinks {
        sink.push(0, finish(EngineFinish::Length));
    }
    assert_eq!((first.await.unwrap().status.as_u16(), second.await.unwrap().status.as_u16()), (200, 200));
    assert!(app.get("/metrics").await.body.contains("rung_queued_prompt_tokens 0"));
}

#[tokio::test]
async fn b02_a_request_that_leaves_the_queue_gives_its_place_back() {
    let mut config = config();
    config.limits.max_queued_tokens = 10;
    let engine = ScriptedEngine::new(vec![Reply::Hold, Reply::Play(vec![text_reply("x", STOP)])]);
    let app = app_with(&engine, config);
    let first = begin(&app, completion(json!({"prompt": vec![5; 9]})));
    submitted(&engine, 1).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert_eq!(app.completion(json!({"prompt": vec![5; 9]})).await.status, 200);
    assert!(app.metrics.render("").contains("rung_samples_aborted_total{cause=\"client\"} 1"));
}

#[tokio::test]
async fn a_reader_that_leaves_too_much_unread_is_cut_off_with_a_reason() {
    let mut config = config();
    config.limits.max_unread_bytes = 400;
    let engine = ScriptedEngine::new(vec![Reply::Hold]);
    let app = app_with(&engine, config);
    let request = post_request("/v1/completions", completion(json!({"stream": true, "n": 2})).to_string());
    let response = tokio::spawn(app.router.clone().oneshot(request));
    submitted(&engine, 1).await;
    let sink = engine.record().sinks[0].clone();
    assert_eq!(sink.push(0, tokens(&bytes_as_ids(b"a"))), Push::Kept);
    let mut body = response.await.unwrap().unwrap().into_body().into_data_stream();
    assert!(body.next().await.unwrap().unwrap().starts_with(b"data: "));
    // 100 tokens are 400 bytes; one more is too many, for both samples.
    assert_eq!(sink.push(1, tokens(&[5; 100])), Push::Kept);
    assert_eq!(sink.push(0, tokens(&[5])), Push::Overfull);
    assert_eq!(sink.push(0, tokens(&[5])), Push::Dropped);
    assert_eq!(sink.push(1, tokens(&[5])), Push::Overfull, "told once for each sample");
    assert_eq!(sink.push(1, tokens(&[5])), Push::Dropped);
    let rest = body.next().await.unwrap().unwrap();
    let error = parse_events(std::str::from_utf8(&rest).unwrap()).remove(0);
    assert_eq!(error["error"]["code"], "slow_reader");
    assert!(error["error"]["message"].as_str().unwrap().contains("--max-unread-bytes"));
    assert!(body.next().await.is_none());
    assert!(engine.record().aborts.is_empty(), "who pushes aborts");
    drop(body);
    assert!(app.metrics.render("").contains("rung_samples_aborted_total{cause=\"slow_reader\"} 2"));
}

#[tokio::test]
async fn reading_in_time_makes_room_again() {
    let mut config = config();
    config.limits.max_unread_bytes = 8;
    let engine = ScriptedEngine::new(vec![Reply::Hold]);
    let app = app_with(&engine, config);
    let request = post_request("/v1/completions", completion(json!({"stream": true})).to_string());
    let response = tokio::spawn(app.router.clone().oneshot(request));
    submitted(&engine, 1).await;
    let sink = engine.record().sinks[0].clone();
    assert_eq!(sink.push(0, tokens(&[5])), Push::Kept);
    let mut body = response.await.unwrap().unwrap().into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    for _ in 0..10 {
        assert_eq!(sink.push(0, tokens(&[5, 5])), Push::Kept);
        body.next().await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_request_that_showed_nothing_outlives_its_engine() {
    for stream in [false, true] {
        // Without a stream, what was read before the loss was shown to nobody.
        let begun =
            if stream { vec![finish(lost())] } else { vec![tokens(&bytes_as_ids(b"old ")), finish(lost())] };
        let engine =
            ScriptedEngine::new(vec![Reply::Play(vec![begun]), Reply::Play(vec![text_reply("new", STOP)])]);
        let app = app(&engine);
        let answer = app.chat(json!({"stream": stream, "seed": 7})).await;
        let text = if stream {
            let events = answer.events();
            assert_eq!(events.last().unwrap(), "[DONE]");
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
        } else {
            let body = answer.json();
            assert_eq!(body["usage"]["completion_tokens"], 4);
            body["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(text, "new");
        let record = engine.record();
        assert_eq!(record.requests.len(), 2);
        assert_eq!(record.requests[0].prompt_ids, record.requests[1].prompt_ids);
        assert_eq!(record.requests[1].sampling.seed, Some(7));
        assert!(app.metrics.render("").contains("rung_requests_replayed_total 1"));
        assert!(app.metrics.render("").contains("rung_samples_finished_total{reason=\"stop\"} 1"));
    }
}

#[tokio::test]
async fn b16_a_stream_that_showed_text_ends_with_one_error_when_its_engine_is_lost() {
    let begun = vec![tokens(&bytes_as_ids(b"a")), finish(lost())];
    let engine = ScriptedEngine::new(vec![Reply::Play(vec![begun])]);
    let events = app(&engine).chat(json!({"stream": true})).await.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "engine_lost");
    assert_eq!(events.iter().filter(|event| event.get("error").is_some()).count(), 1);
    assert_eq!(engine.record().requests.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_second_loss_and_an_engine_that_does_not_come_back_are_errors() {
    let twice = || Reply::Play(vec![vec![finish(lost())]]);
    let engine = ScriptedEngine::new(vec![twice(), twice(), Reply::Hold]);
    let (status, error) = app(&engine).chat(json!({})).await.error();
    assert_eq!((status, error["code"].as_str()), (503, Some("engine_lost")));
    assert_eq!(engine.record().requests.len(), 2);

    let mut config = config();
    config.limits.replay_wait = Duration::from_secs(3);
    let engine = ScriptedEngine::new(vec![twice()]);
    engine.stay_away();
    let asked = tokio::time::Instant::now();
    let (status, error) = app_with(&engine, config.clone()).chat(json!({"stream": true})).await.error();
    assert_eq!((status, error["code"].as_str()), (503, Some("engine_lost")));
    assert_eq!(asked.elapsed().as_secs(), 3);

    config.limits.replay_wait = Duration::ZERO;
    let engine = ScriptedEngine::new(vec![twice(), Reply::Hold]);
    assert_eq!(app_with(&engine, config).chat(json!({})).await.error().0, 503);
    assert_eq!(engine.record().requests.len(), 1);
}

#[tokio::test]
async fn b72_what_is_counted_adds_up_after_a_mix_of_ends() {
    let merged = SampleDelta {
        token_ids: bytes_as_ids(b"abc"),
        finish: Some(EngineFinish::Length),
        ..SampleDelta::default()
    };
    let engine = ScriptedEngine::new(vec![
        Reply::Play(vec![text_reply("x", STOP)]),
        Reply::Play(vec![vec![merged]]),
        Reply::Play(vec![text_reply("aab", STOP)]),
        Reply::Hold,
    ]);
    let app = app(&engine);
    for fields in [json!({}), json!({}), json!({"stop": "b"})] {
        assert_eq!(app.chat(fields).await.status, 200);
    }
    let waiting = begin(&app, completion(json!({})));
    submitted(&engine, 4).await;
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(
        app.post_raw("/v1/chat/completions", Body::from(chat(json!({"n": 0})).to_string())).await.status,
        400
    );
    let text = app.get("/metrics").await.body;
    for line in [
        "rung_samples_finished_total{reason=\"stop\"} 2",
        "rung_samples_finished_total{reason=\"length\"} 1",
        "rung_samples_finished_total{reason=\"abort\"} 1",
        "rung_samples_aborted_total{cause=\"stop_string\"} 1",
        "rung_samples_aborted_total{cause=\"client\"} 1",
        "rung_http_requests_rejected_total{reason=\"invalid_request\"} 1",
        "rung_requests_in_flight 0",
        "rung_queued_prompt_tokens 0",
        "rung_oldest_request_age_seconds 0.0",
        "rung_merged_tokens_total 4",
        "rung_stage_parse_seconds_count 4",
        "vllm:request_success_total{model_name=\"tiny\",finished_reason=\"stop\"} 2",
        "vllm:time_to_first_token_seconds_count{model_name=\"tiny\"} 3",
    ] {
        assert!(text.lines().any(|present| present == line), "{line} is not in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    assert_eq!(text.matches("# EOF").count(), 1);
}
