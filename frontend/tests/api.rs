//! Whole answers of every route, and what requests become for the engine.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use insta::assert_json_snapshot;
use rung_frontend::engine::types::{EngineFinish, GenerateRequest, SampleDelta, Sampling};
use rung_frontend::text::SpecialTokens;
use serde_json::{Value, json};
use support::{
    IM_END, MODEL, Reply, ScriptedEngine, app, byte_id, byte_level, bytes_as_ids, logprobs_for, served_model,
    started, text_reply,
};

const STOP: EngineFinish = EngineFinish::Stop { token_id: IM_END };

/// One request, and what the engine was asked.
async fn submitted(path: &str, body: Value) -> GenerateRequest {
    submitted_to(served_model(), path, body).await
}

async fn submitted_to(model: rung_frontend::model::ServedModel, path: &str, body: Value) -> GenerateRequest {
    let engine = ScriptedEngine::with_model(model, vec![Reply::Play(vec![text_reply("x", STOP); 8])]);
    let answer = app(&engine).post(path, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    engine.record().requests.remove(0)
}

fn redacted(mut body: Value, prefix: &str) -> Value {
    let id = body["id"].take();
    let id = id.as_str().unwrap();
    assert!(id.starts_with(prefix) && id.len() == prefix.len() + 24, "{id}");
    assert!(body["created"].take().as_u64().unwrap() > 1_600_000_000);
    body
}

#[tokio::test]
async fn a_chat_completion_is_as_recorded() {
    let mut reply = text_reply("Hé 🌊", STOP);
    reply[0].logprobs = logprobs_for(&reply[0].token_ids, 2);
    reply[0].started = Some(started(3));
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply])]));
    let answer = app.chat(json!({"logprobs": true, "top_logprobs": 2, "return_token_ids": true})).await;
    assert_json_snapshot!(redacted(answer.json(), "chatcmpl-"));
}

#[tokio::test]
async fn a_completion_is_as_recorded() {
    let mut reply = text_reply("a é", EngineFinish::Length);
    reply[0].logprobs = logprobs_for(&reply[0].token_ids, 1);
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply])]));
    let answer = app.completion(json!({"logprobs": 1, "return_token_ids": true})).await;
    assert_json_snapshot!(redacted(answer.json(), "cmpl-"));
}

#[tokio::test]
async fn the_plainest_chat_holds_nothing_of_ours() {
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![text_reply("Paris", STOP)])]));
    assert_json_snapshot!(redacted(app.chat(json!({})).await.json(), "chatcmpl-"));
}

#[tokio::test]
async fn models_health_version_and_metrics() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    let model = json!({"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "rung", "max_model_len": 256});
    assert_eq!(app.get("/v1/models").await.json(), json!({"object": "list", "data": [model]}));
    assert_eq!(app.get("/v1/models/tiny").await.json(), model);
    for path in ["/livez", "/readyz", "/health"] {
        let answer = app.get(path).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["status"]), (200, &json!("ok")), "{path}");
    }
    assert_eq!(app.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    let metrics = app.get("/metrics").await;
    assert!(metrics.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    assert!(metrics.body.ends_with("# EOF\n"));
    assert!(
        metrics.body.contains("rung_http_requests_total{endpoint=\"/v1/models\",status=\"200\"} 2"),
        "{}",
        metrics.body
    );
}

#[tokio::test]
async fn model_names_with_slashes_are_found() {
    let mut model = served_model();
    model.id = "org/name".to_owned();
    let app = app(&ScriptedEngine::with_model(model, Vec::new()));
    assert_eq!(app.get("/v1/models/org/name").await.json()["id"], "org/name");
    assert_eq!(app.get("/v1/models/org%2Fname").await.json()["id"], "org/name");
}

#[tokio::test]
async fn the_chat_prompt_is_rendered_and_encoded_without_added_tokens() {
    let request = submitted("/v1/chat/completions", support::chat(json!({}))).await;
    let rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(*request.prompt_ids, byte_level().encode(rendered, SpecialTokens::Omit).unwrap());
}

#[tokio::test]
async fn prompts_come_as_text_or_ids() {
    let text = submitted("/v1/completions", support::completion(json!({"prompt": "The capital"}))).await;
    let ids = byte_level().encode("The capital", SpecialTokens::Add).unwrap();
    assert_eq!(*text.prompt_ids, ids);
    for prompt in [json!(ids), json!([ids])] {
        assert_eq!(
            *submitted("/v1/completions", support::completion(json!({"prompt": prompt}))).await.prompt_ids,
            ids
        );
    }
}

#[tokio::test]
async fn parameters_reach_the_engine() {
    let fields = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -1, "n": 3, "max_tokens": 9, "min_tokens": 2,
        "stop_token_ids": [5, 6], "ignore_eos": true,
    });
    let chat = submitted("/v1/chat/completions", support::chat(fields.clone())).await;
    let completion = submitted("/v1/completions", support::completion(fields)).await;
    for request in [chat, completion] {
        let expected = Sampling {
            temperature: Some(0.5),
            top_k: Some(7),
            top_p: Some(0.25),
            seed: Some(u64::MAX),
            ..Sampling::default()
        };
        assert_eq!(request.sampling, expected);
        assert_eq!(request.samples, 3);
        assert_eq!(request.top_logprobs, None);
        let stopping = request.stopping;
        assert_eq!((stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos), (Some(9), 2, true));
        assert_eq!(stopping.stop_token_ids, [5, 6]);
    }
}

#[tokio::test]
async fn silent_requests_get_the_models_recommendation() {
    let mut model = served_model();
    model.facts.default_sampling =
        Sampling { temperature: Some(0.2), top_k: Some(50), ..Sampling::default() };
    let request =
        submitted_to(model, "/v1/chat/completions", support::chat(json!({"top_k": -1, "seed": u64::MAX})))
            .await;
    let expected =
        Sampling { temperature: Some(0.2), top_k: Some(0), seed: Some(u64::MAX), ..Sampling::default() };
    assert_eq!(request.sampling, expected);
    let request = submitted("/v1/chat/completions", support::chat(json!({"temperature": null}))).await;
    assert_eq!(request.sampling, Sampling::default());
}

#[tokio::test]
async fn b41_max_tokens_above_the_room_is_an_upper_bound() {
    let prompt = vec![byte_id(b'a'); 246];
    for (asked, given) in
        [(json!(5), 5), (json!(10), 10), (json!(11), 10), (json!(100_000_000), 10), (json!(u64::MAX), 10)]
    {
        let body = support::completion(json!({"prompt": prompt, "max_tokens": asked}));
        assert_eq!(submitted("/v1/completions", body).await.stopping.max_tokens, Some(given));
    }
    let silent = support::completion(json!({"max_tokens": null}));
    assert_eq!(submitted("/v1/completions", silent).await.stopping.max_tokens, Some(16));
    let silent = submitted("/v1/chat/completions", support::chat(json!({"max_tokens": null}))).await;
    assert_eq!(silent.stopping.max_tokens, Some(256 - silent.prompt_ids.len() as u32));
    let both = support::chat(json!({"max_tokens": 5, "max_completion_tokens": 7}));
    assert_eq!(submitted("/v1/chat/completions", both).await.stopping.max_tokens, Some(7));
}

#[tokio::test]
async fn b37_unknown_fields_and_neutral_values_are_tolerated() {
    let fields = json!({
        "user": "u", "store": false, "metadata": {"a": "b"}, "service_tier": "auto", "temprature": 0.1, "request_id": "dup-1",
        "messages": [{"role": "user", "content": "hi", "id": 17, "opts": {"v": false}, "name": "n"}],
        "tools": [], "tool_choice": "none", "parallel_tool_calls": true, "response_format": {"type": "text"},
        "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0,
        "modalities": ["text"], "audio": null, "prediction": null, "logprobs": false, "top_logprobs": null, "n": null,
        "stop": null, "seed": null, "stream": null, "stream_options": null, "functions": [], "function_call": "auto",
        "chat_template_kwargs": {}, "skip_special_tokens": true, "reasoning_effort": "medium", "verbosity": "medium",
    });
    submitted("/v1/chat/completions", support::chat(fields)).await;
    let fields =
        json!({"suffix": null, "echo": false, "best_of": 1, "logprobs": null, "user": "u", "stop": []});
    submitted("/v1/completions", support::completion(fields)).await;
}

#[tokio::test]
async fn b32_assistant_turns_without_content_render_alike() {
    let mut prompts = Vec::new();
    for assistant in [json!({}), json!({"content": null}), json!({"content": ""}), json!({"content": []})] {
        let mut assistant = assistant;
        assistant["role"] = json!("assistant");
        let messages =
            json!([{"role": "user", "content": "a"}, assistant, {"role": "user", "content": "go on"}]);
        prompts.push(
            submitted("/v1/chat/completions", support::chat(json!({"messages": messages}))).await.prompt_ids,
        );
    }
    assert!(prompts.iter().all(|prompt| *prompt == prompts[0]));
}

#[tokio::test]
async fn b12_empty_content_is_a_prompt() {
    for content in [json!(""), json!([])] {
        submitted(
            "/v1/chat/completions",
            support::chat(json!({"messages": [{"role": "user", "content": content}]})),
        )
        .await;
    }
    submitted(
        "/v1/chat/completions",
        support::chat(json!({"messages": [{"role": "assistant", "content": "a"}]})),
    )
    .await;
}

#[tokio::test]
async fn b56_lone_surrogates_are_one_outcome_in_both_modes() {
    for stream in [false, true] {
        let engine = ScriptedEngine::new(vec![Reply::Play(vec![text_reply("x", STOP)])]);
        let body = format!(
            r#"{{"model":"tiny","stream":{stream},"stop":"\ude00","messages":[{{"role":"user","content":"x \ud83d y \u0000 \ud83d\ude00"}}]}}"#
        );
        assert_eq!(app(&engine).post_raw("/v1/chat/completions", body).await.status, 200);
        let rendered = "<|im_start|>user\nx \u{FFFD} y \0 😀<|im_end|>\n<|im_start|>assistant\n";
        let expected = byte_level().encode(rendered, SpecialTokens::Omit).unwrap();
        assert_eq!(*engine.record().requests[0].prompt_ids, expected);
    }
}

#[tokio::test]
async fn b49_choices_of_several_prompts_are_in_order() {
    // Later prompts and samples end first.
    let reply = |name: &str, turns: usize| {
        let mut deltas = vec![SampleDelta::default(); turns];
        deltas.extend(text_reply(name, EngineFinish::Length));
        deltas
    };
    let replies = [("A", 9), ("B", 4), ("C", 0)].map(|(name, turns)| {
        Reply::Play(vec![reply(&format!("{name}0"), turns + 2), reply(&format!("{name}1"), turns)])
    });
    let engine = ScriptedEngine::new(replies.into());
    let body =
        app(&engine).completion(json!({"prompt": ["alpha ", "beta", "gamma gamma"], "n": 2})).await.json();
    let choices = body["choices"].as_array().unwrap();
    let got: Vec<(u64, &str)> = choices
        .iter()
        .map(|choice| (choice["index"].as_u64().unwrap(), choice["text"].as_str().unwrap()))
        .collect();
    assert_eq!(got, [(0, "A0"), (1, "A1"), (2, "B0"), (3, "B1"), (4, "C0"), (5, "C1")]);
    let prompt_tokens: usize = engine.record().requests.iter().map(|request| request.prompt_ids.len()).sum();
    assert_eq!(body["usage"]["prompt_tokens"], prompt_tokens);
    assert_eq!(body["usage"]["completion_tokens"], 12);
    assert_eq!(body["usage"]["total_tokens"], prompt_tokens + 12);
}

#[tokio::test]
async fn cached_tokens_are_the_least_of_the_samples_and_summed_over_prompts() {
    let reply = |cached| {
        vec![SampleDelta {
            started: Some(started(cached)),
            token_ids: vec![5],
            finish: Some(EngineFinish::Length),
            ..SampleDelta::default()
        }]
    };
    let engine = ScriptedEngine::new(vec![
        Reply::Play(vec![reply(1), reply(2)]),
        Reply::Play(vec![reply(2), reply(0)]),
    ]);
    let body = app(&engine).completion(json!({"prompt": [[5, 6, 7], [8, 9]], "n": 2})).await.json();
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
}

#[tokio::test]
async fn b62_a_stop_string_cuts_text_ids_logprobs_and_usage_and_aborts_the_row() {
    let token_ids = bytes_as_ids("one, two, three".as_bytes());
    let delta = SampleDelta { logprobs: logprobs_for(&token_ids, 0), token_ids, ..SampleDelta::default() };
    // The engine goes on: only the abort ends the row.
    let engine = ScriptedEngine::new(vec![Reply::Play(vec![vec![delta]])]);
    let body = app(&engine)
        .chat(json!({"stop": [", th", "five"], "logprobs": true, "return_token_ids": true}))
        .await
        .json();
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], "one, two");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["token_ids"], json!(bytes_as_ids(b"one, two")));
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 8);
    assert_eq!(body["usage"]["completion_tokens"], 8);
    assert_eq!(engine.record().aborts, [(0, 0)]);
}

#[tokio::test]
async fn a_stop_string_beats_the_engines_own_end_in_the_same_delta() {
    let engine = ScriptedEngine::new(vec![Reply::Play(vec![text_reply("ab", EngineFinish::Length)])]);
    let body = app(&engine).completion(json!({"stop": "b"})).await.json();
    assert_eq!(
        (&body["choices"][0]["text"], &body["choices"][0]["finish_reason"]),
        (&json!("a"), &json!("stop"))
    );
    assert_eq!(engine.record().aborts, [], "the row had ended");
}

#[tokio::test]
async fn b19_no_number_is_illegal_in_json() {
    let mut reply = text_reply("ab", EngineFinish::Length);
    reply[0].logprobs = logprobs_for(&reply[0].token_ids, 3);
    reply[0].logprobs[0].chosen = f32::NEG_INFINITY;
    reply[0].logprobs[0].top[1].1 = f32::NEG_INFINITY;
    reply[0].logprobs[1].chosen = f32::NAN;
    reply[0].logprobs[1].top[0].1 = 1e-7;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply.clone()])]));
        let (chat, completion) = (json!({"logprobs": true, "top_logprobs": 3}), json!({"logprobs": 3}));
        let answer =
            if path.contains("chat") { app.chat(chat).await } else { app.completion(completion).await };
        assert!(!answer.body.contains("NaN") && !answer.body.contains("nfinity"));
        let logprobs = &answer.json()["choices"][0]["logprobs"];
        let chosen = if path.contains("chat") {
            &logprobs["content"][0]["logprob"]
        } else {
            &logprobs["token_logprobs"][0]
        };
        assert_eq!(*chosen, json!(-9999.0));
        if path.contains("chat") {
            assert_eq!(
                logprobs["content"][0]["top_logprobs"].as_array().unwrap().len(),
                2,
                "masked ones are left out"
            );
            assert_eq!(logprobs["content"][1]["top_logprobs"][0]["logprob"], 0.0);
        }
    }
}

#[tokio::test]
async fn b59_logprobs_in_every_size() {
    for (fields, top) in [
        (json!({"logprobs": true}), 0),
        (json!({"logprobs": true, "top_logprobs": 0}), 0),
        (json!({"logprobs": true, "top_logprobs": 20}), 20),
    ] {
        let mut reply = text_reply("é", STOP);
        reply[0].logprobs = logprobs_for(&reply[0].token_ids, top);
        let engine = ScriptedEngine::new(vec![Reply::Play(vec![reply])]);
        let body = app(&engine).chat(fields).await.json();
        assert_eq!(engine.record().requests[0].top_logprobs, Some(top));
        let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
        assert_eq!(content.len(), body["usage"]["completion_tokens"].as_u64().unwrap() as usize);
        let bytes: Vec<u8> = content
            .iter()
            .filter_map(|entry| entry["bytes"].as_array())
            .flatten()
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(
            String::from_utf8(bytes).unwrap(),
            body["choices"][0]["message"]["content"].as_str().unwrap()
        );
        assert!(content.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == top as usize));
        assert_eq!(content.last().unwrap()["bytes"], Value::Null, "the end of the turn is no text");
    }
}
