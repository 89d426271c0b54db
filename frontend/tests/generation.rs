//! Fields that shape an answer beyond its text: echoed prompts, the best of several, included
//! stops, logprobs of the prompt, rules on tokens; and text to ids and back.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use rung_frontend::engine::types::{
    Capability, EngineFinish, EngineLimits, GenerateRequest, PromptLogprobs, SampleDelta, TokenLogprobs,
    TokenRules,
};
use rung_frontend::keys::Keyring;
use rung_frontend::model::ServedModel;
use serde_json::{Value, json};
use support::{
    IM_END, Reply, ScriptedEngine, app, app_with, byte_id, bytes_as_ids, config, post_request, served_model,
    text_reply,
};

const STOP: EngineFinish = EngineFinish::Stop { token_id: IM_END };

/// A model whose engine can do everything.
fn able_model() -> ServedModel {
    let mut model = served_model();
    model.facts.capabilities = [
        Capability::Logprobs,
        Capability::SamplingExtra,
        Capability::PromptLogprobs,
        Capability::Priority,
        Capability::PrefixCache,
        Capability::Grammar,
    ]
    .into_iter()
    .collect();
    model.facts.limits = EngineLimits {
        max_logit_bias: 4,
        max_allowed_token_ids: 4,
        max_bad_words: 8,
        max_bad_word_tokens: 8,
        max_cache_salt_bytes: 64,
        max_grammar_bytes: 1 << 20,
        ..model.facts.limits
    };
    model
}

async fn submitted(fields: Value) -> GenerateRequest {
    let engine = ScriptedEngine::with_model(able_model(), vec![Reply::Play(vec![text_reply("x", STOP); 8])]);
    let answer = app(&engine).completion(fields).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    engine.record().requests.remove(0)
}

#[tokio::test]
async fn b49_each_of_several_prompts_answers_begins_with_its_own_prompt() {
    for prompt in [
        json!(["alpha ", "beta ", "gamma "]),
        json!([bytes_as_ids(b"alpha "), bytes_as_ids(b"beta "), bytes_as_ids(b"gamma ")]),
    ] {
        for stream in [false, true] {
            let reply = |text: &str| Reply::Play(vec![text_reply(text, STOP), text_reply("z", STOP)]);
            let engine = ScriptedEngine::new(vec![reply("one"), reply("two"), reply("three")]);
            let fields = json!({"prompt": prompt, "n": 2, "echo": true, "stream": stream});
            let answer = app(&engine).completion(fields).await;
            let expected = ["alpha one", "alpha z", "beta two", "beta z", "gamma three", "gamma z"];
            if stream {
                let mut texts = vec![String::new(); expected.len()];
                for choice in answer.events().iter().filter_map(|event| event["choices"].get(0)) {
                    texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
                }
                assert_eq!(texts, expected);
            } else {
                let body = answer.json();
                let choices = body["choices"].as_array().unwrap();
                let texts: Vec<&str> =
                    choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
                assert_eq!(texts, expected);
                assert!((0u64..).zip(choices).all(|(index, choice)| choice["index"] == index));
            }
        }
    }
}

#[tokio::test]
async fn b57_a_prompt_is_scored_without_generating() {
    let prompt = bytes_as_ids("aé".as_bytes());
    let score = |chosen, rank| PromptLogprobs { chosen, rank, top: vec![(byte_id(b'q'), -0.5), (7, -1.0)] };
    let scores = vec![score(-1.5, 4), score(-0.25, 1)];
    for stream in [false, true] {
        let whole = SampleDelta {
            prompt_logprobs: scores.clone(),
            token_ids: bytes_as_ids(b"x"),
            logprobs: vec![TokenLogprobs { chosen: -9.0, top: Vec::new() }],
            finish: Some(EngineFinish::Length),
            ..SampleDelta::default()
        };
        let engine = ScriptedEngine::new(vec![Reply::Play(vec![vec![whole]])]);
        let fields =
            json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 1, "stream": stream});
        let answer = app(&engine).completion(fields).await;
        let body = if stream { answer.events().remove(0) } else { answer.json() };
        let choice = &body["choices"][0];
        assert!(choice.is_object(), "{body}");
        assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some("aé"), Some("length")));
        let logprobs = &choice["logprobs"];
        assert_eq!(logprobs["token_logprobs"], json!([null, -1.5, -0.25]));
        assert_eq!(logprobs["text_offset"], json!([0, 1, 1]));
        assert_eq!(logprobs["top_logprobs"][0], Value::Null);
        assert_eq!(logprobs["top_logprobs"][1], json!({"q": -0.5, "bytes:\\xc3": -1.5}), "one alternative");
        if !stream {
            assert_eq!(body["usage"]["completion_tokens"], 0);
            assert_eq!(body["usage"]["prompt_tokens"], 3);
        }
        assert_eq!(engine.record().requests[0].stopping.max_tokens, Some(1));
        assert_eq!(engine.record().requests[0].prompt_top_logprobs, Some(1));
    }
    let refused = app(&ScriptedEngine::new(Vec::new())).completion(json!({"max_tokens": 0})).await;
    assert_eq!(refused.error().1["param"], "max_tokens");
}

#[tokio::test]
async fn b19_prompt_logprobs_are_finite_and_stand_by_token_id() {
    let whole = SampleDelta {
        prompt_logprobs: vec![PromptLogprobs { chosen: f32::NEG_INFINITY, rank: 600, top: vec![(5, -0.5)] }],
        ..text_reply("x", STOP).remove(0)
    };
    for chat in [false, true] {
        let engine = ScriptedEngine::new(vec![Reply::Play(vec![vec![whole.clone()]])]);
        let app = app(&engine);
        let fields = json!({"prompt": bytes_as_ids(b"ab"), "prompt_logprobs": 1});
        let body = if chat {
            let answer = app.chat(json!({"prompt_logprobs": 1})).await;
            // The scripted engine scores one token of a longer prompt: it broke its promise.
            assert_eq!(answer.error().0, 500);
            continue;
        } else {
            app.completion(fields).await.json()
        };
        let scores = &body["choices"][0]["prompt_logprobs"];
        assert_eq!(scores[0], Value::Null);
        let own = scores[1][byte_id(b'b').to_string()].clone();
        assert_eq!(own, json!({"logprob": -9999.0, "rank": 600, "decoded_token": "b"}));
        assert_eq!(scores[1]["5"]["rank"], 1);
        assert_eq!(scores.as_array().unwrap().len(), 2);
    }
    let fields = json!({"prompt_logprobs": 1, "stream": true});
    assert_eq!(
        app(&ScriptedEngine::new(Vec::new())).completion(fields).await.error().1["param"],
        "prompt_logprobs"
    );
}

#[tokio::test]
async fn the_best_of_several_answers_are_given_out() {
    let scored = |text: &str, chosen: f32| {
        let mut reply = text_reply(text, EngineFinish::Length);
        let count = reply[0].token_ids.len();
        reply[0].logprobs = vec![TokenLogprobs { chosen, top: Vec::new() }; count];
        reply
    };
    let samples = vec![scored("worst", -3.0), scored("ok", -1.0), scored("best one", -0.5)];
    let engine = ScriptedEngine::new(vec![Reply::Play(samples)]);
    let answer = app(&engine).completion(json!({"n": 2, "best_of": 3})).await.json();
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["best one", "ok"]);
    assert_eq!(answer["choices"][1]["index"], 1);
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null, "nobody asked for them");
    assert_eq!(answer["usage"]["completion_tokens"], 5 + 2 + 8);
    assert_eq!(engine.record().requests[0].samples, 3);
    for (fields, hint) in [
        (json!({"n": 2, "best_of": 1}), "at least n"),
        (json!({"best_of": 2, "stream": true}), "stream"),
        (json!({"best_of": 99}), "from 1 to 8"),
    ] {
        let (status, error) = app(&engine).completion(fields).await.error();
        assert_eq!((status, error["param"].as_str()), (400, Some("best_of")));
        assert!(error["message"].as_str().unwrap().contains(hint), "{error}");
    }
}

#[tokio::test]
async fn b62_a_stop_string_is_included_when_asked_for() {
    for stream in [false, true] {
        let engine = ScriptedEngine::new(vec![Reply::Play(vec![text_reply("aabbbb", STOP)])]);
        let fields = json!({"stop": ["bb"], "include_stop_str_in_output": true, "stream": stream});
        let answer = app(&engine).chat(fields).await;
        let content = if stream {
            let events = answer.events();
            events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
        } else {
            answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
        };
        assert_eq!(content, "aabb");
    }
}

#[tokio::test]
async fn what_shapes_the_choice_of_tokens_reaches_the_engine() {
    let request = submitted(json!({
        "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 2,
        "logit_bias": {"7": -100, "5": 1.5}, "allowed_token_ids": [5, 7], "bad_words": ["ab"], "priority": 3,
    }))
    .await;
    let sampling = request.sampling;
    assert_eq!(
        (sampling.min_p, sampling.typical_p, sampling.repetition_penalty),
        (Some(0.1), Some(0.9), Some(1.1))
    );
    assert_eq!((sampling.frequency_penalty, sampling.presence_penalty), (Some(-0.5), Some(2.0)));
    let spaced = support::byte_level().encode(" ab", rung_frontend::text::SpecialTokens::Omit).unwrap();
    let plain = support::byte_level().encode("ab", rung_frontend::text::SpecialTokens::Omit).unwrap();
    assert_eq!(
        request.token_rules,
        TokenRules {
            logit_bias: vec![(5, 1.5), (7, -100.0)],
            allowed_token_ids: Some(vec![5, 7]),
            bad_words: vec![plain, spaced],
        }
    );
    assert_eq!(request.priority, Some(3));
    // What changes nothing is not sent, so that it works with any engine.
    let neutral =
        json!({"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "priority": 0});
    let request = submitted(neutral.clone()).await;
    assert_eq!(request.sampling, rung_frontend::engine::types::Sampling::default());
    assert_eq!((request.priority, request.token_rules), (None, TokenRules::default()));
    let unable = ScriptedEngine::new(vec![Reply::Play(vec![text_reply("x", STOP)])]);
    assert_eq!(app(&unable).completion(neutral).await.status, 200);
    for (name, value) in [
        ("min_p", json!(0.1)),
        ("logit_bias", json!({"1": 1})),
        ("bad_words", json!(["a"])),
        ("priority", json!(1)),
    ] {
        let (status, error) = app(&unable).completion(json!({name: value})).await.error();
        assert_eq!(
            (status, error["param"].as_str(), error["code"].as_str()),
            (400, Some(name), Some("unsupported_parameter"))
        );
    }
}

#[tokio::test]
async fn formats_become_grammars_and_wrong_ones_are_refused_by_name() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let strict = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "t", "strict": true, "schema": schema}});
    for (name, value) in [
        ("response_format", json!({"type": "json_object"})),
        ("response_format", strict(schema.clone())),
        ("guided_json", schema.clone()),
        ("guided_json", json!(schema.to_string())),
        ("guided_regex", json!("[ab]+")),
        ("guided_choice", json!(["yes", "no"])),
        ("guided_grammar", json!("start: \"a\" | \"b\"")),
        ("structured_outputs", json!({"regex": "[ab]+"})),
        ("structured_outputs", json!({"json_object": true})),
    ] {
        let request = submitted(json!({name: value})).await;
        assert!(request.grammar.unwrap().starts_with("{\"grammars\""), "{name}");
    }
    assert_eq!(submitted(json!({"response_format": {"type": "text"}})).await.grammar, None);
    for (fields, param) in [
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"response_format": "json"}), "response_format"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "t"}}}),
            "response_format.json_schema.schema",
        ),
        (json!({"response_format": strict(json!({"type": "strnig"}))}), "response_format"),
        (json!({"response_format": strict(json!({"type": "string", "pattern": "(["}))}), "response_format"),
        (json!({"response_format": strict(json!(7))}), "response_format"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_regex": 7}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_choice": [1]}), "guided_choice"),
        (json!({"guided_grammar": "start: undefined"}), "guided_grammar"),
        (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
    ] {
        let engine = ScriptedEngine::with_model(able_model(), Vec::new());
        let (status, error) = app(&engine).completion(fields).await.error();
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
    }
    let unable = ScriptedEngine::new(Vec::new());
    let (_, error) = app(&unable).chat(json!({"response_format": {"type": "json_object"}})).await.error();
    assert_eq!(
        (error["param"].as_str(), error["code"].as_str()),
        (Some("response_format"), Some("unsupported_parameter"))
    );
}

#[tokio::test]
async fn b11_ids_and_values_out_of_range_are_refused_by_name() {
    let cases = [
        ("logit_bias", json!({"999999999": 5})),
        ("logit_bias", json!({"-1": 5})),
        ("logit_bias", json!({"4294967297": 5})),
        ("logit_bias", json!({"x": 5})),
        ("logit_bias", json!({"5": 101})),
        ("logit_bias", json!({"5": "5"})),
        ("logit_bias", json!({"5": null})),
        ("logit_bias", json!({"5": 1, "05": 1})),
        ("logit_bias", json!({"1": 1, "2": 1, "3": 1, "4": 1, "5": 1})),
        ("logit_bias", json!([1])),
        ("stop_token_ids", json!([999_999_999])),
        ("allowed_token_ids", json!([602])),
        ("allowed_token_ids", json!([])),
        ("bad_words", json!([""])),
        ("bad_words", json!([7])),
        ("bad_words", json!(["abcdefghijkl"])),
        ("min_p", json!(1.5)),
        ("typical_p", json!(0)),
        ("repetition_penalty", json!(0)),
        ("presence_penalty", json!(2.1)),
        ("priority", json!(-1)),
        ("cache_salt", json!(7)),
        ("prompt_logprobs", json!(21)),
        ("suffix", json!("x")),
    ];
    for (name, value) in cases {
        let engine = ScriptedEngine::with_model(able_model(), Vec::new());
        let (status, error) = app(&engine).completion(json!({name: value})).await.error();
        assert_eq!((status, error["param"].as_str()), (400, Some(name)), "{error}");
    }
}

#[tokio::test]
async fn b79_cached_prefixes_are_kept_apart_by_key_and_by_salt() {
    let mut config = config();
    config.keys = Arc::new(Keyring::fixed(&["first", "second"]));
    let mut salts = Vec::new();
    for (key, salt) in
        [("first", None), ("second", None), ("first", Some("s")), ("second", Some("s")), ("first", None)]
    {
        let engine = ScriptedEngine::with_model(able_model(), vec![Reply::Play(vec![text_reply("x", STOP)])]);
        let mut request =
            post_request("/v1/completions", support::completion(json!({"cache_salt": salt})).to_string());
        request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        assert_eq!(app_with(&engine, config.clone()).send(request).await.status, 200);
        salts.push(engine.record().requests[0].cache_salt.clone().unwrap());
    }
    assert_eq!(salts[0], salts[4], "the same holder shares");
    salts.pop();
    let count = salts.len();
    salts.sort_unstable();
    salts.dedup();
    assert_eq!(salts.len(), count);
    assert_eq!(submitted(json!({})).await.cache_salt, None, "without keys all share");
}

#[tokio::test]
async fn b54_text_survives_tokenizing_and_back() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    for text in ["Once upon", " a  b\t\r\n", "海🌊 é\u{FFFD}", "x<|im_end|>y", ""] {
        let tokens = app.post("/tokenize", &json!({"prompt": text})).await.json();
        assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
        assert_eq!(tokens["max_model_len"], 256);
        assert_eq!(tokens["token_strs"], Value::Null);
        let back = app.post("/detokenize", &json!({"tokens": tokens["tokens"]})).await.json();
        assert_eq!(back["prompt"], text);
    }
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "return_token_strs": true});
    let tokens = app.post("/tokenize", &chat).await.json();
    let texts: Vec<&str> =
        tokens["token_strs"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 7}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "model": "other"}), "model"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({"tokens": [602]}), "tokens"),
        ("/detokenize", json!({}), "tokens"),
    ] {
        assert_eq!(app.post(path, &body).await.error().1["param"], param, "{path} {body}");
    }
}

#[tokio::test]
async fn the_published_document_is_what_is_served() {
    let app = app(&ScriptedEngine::new(Vec::new()));
    let document = app.get("/openapi.json").await.json();
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    for (path, operations) in document["paths"].as_object().unwrap() {
        let path = path.replace("{id}", support::MODEL);
        let is_post = operations.get("post").is_some();
        let answer = if is_post { app.post(&path, &json!({})).await } else { app.get(&path).await };
        assert_eq!(answer.status.as_u16(), if is_post { 400 } else { 200 }, "{path}: {}", answer.body);
    }
    let text = document.to_string();
    for part in text.split("\"#/components/schemas/").skip(1) {
        let name = part.split('"').next().unwrap();
        assert!(document["components"]["schemas"].get(name).is_some(), "{name} is not defined");
    }
}

#[tokio::test]
async fn b37_every_published_property_is_accepted_at_its_default_and_unknown_ones_are_ignored() {
    let document: Value = serde_json::from_str(include_str!("../src/openai/openapi.json")).unwrap();
    for (schema, path) in [("ChatRequest", "/v1/chat/completions"), ("CompletionRequest", "/v1/completions")]
    {
        let properties = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        assert!(properties.len() > 20);
        let defaults =
            properties.iter().filter_map(|(name, facts)| Some((name.clone(), facts.get("default")?.clone())));
        let extras =
            [("temprature", json!(0.1)), ("metadata", json!({"a": "b"})), ("service_tier", json!("auto"))];
        for (name, value) in defaults.chain(extras.map(|(name, value)| (name.to_owned(), value))) {
            let engine =
                ScriptedEngine::with_model(able_model(), vec![Reply::Play(vec![text_reply("x", STOP)])]);
            let body = if schema == "ChatRequest" {
                support::chat(json!({name.clone(): value}))
            } else {
                support::completion(json!({name.clone(): value}))
            };
            let answer = app(&engine).post(path, &body).await;
            assert_eq!(answer.status, 200, "{name} = {value}: {}", answer.body);
        }
    }
}
