//! Streams: transcripts, framing, keep-alive, failures after the first byte, and the streaming
//! law: whatever the chopping, a stream adds up to the answer in one piece.

#![expect(clippy::unwrap_used, reason = "tests")]

mod support;

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use futures_util::{FutureExt, StreamExt};
use insta::assert_snapshot;
use proptest::prelude::*;
use rung_frontend::engine::types::{EngineError, EngineErrorCode, EngineFinish, PromptLogprobs, SampleDelta};
use rung_frontend::lifecycle::Phase;
use serde_json::{Map, Value, json};
use support::{
    App, IM_END, Reply, ScriptedEngine, app, bytes_as_ids, chat, chopped, completion, finish, logprobs_for,
    parse_events, post_request, started, text_reply, tokens,
};
use tower::ServiceExt;

const STOP: EngineFinish = EngineFinish::Stop { token_id: IM_END };

/// The transcript with what differs between runs replaced.
fn redacted(body: &str) -> String {
    let first = &parse_events(body)[0];
    body.replace(first["id"].as_str().unwrap(), "ID").replace(&first["created"].to_string(), "CREATED")
}

#[tokio::test]
async fn a_chat_stream_is_as_recorded() {
    let whole = text_reply("Hé 🌊", STOP).remove(0);
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![chopped(&whole, &[1])])]));
    let answer = app.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!(answer.headers["cache-control"], "no-cache");
    assert_snapshot!(redacted(&answer.body));
}

#[tokio::test]
async fn a_completion_stream_is_as_recorded() {
    let whole = text_reply("ab", EngineFinish::Length).remove(0);
    let whole = SampleDelta { logprobs: logprobs_for(&whole.token_ids, 1), ..whole };
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![chopped(&whole, &[1])])]));
    let answer = app.completion(json!({"stream": true, "logprobs": 1, "return_token_ids": true})).await;
    assert_snapshot!(redacted(&answer.body));
}

#[tokio::test]
async fn b36_roles_ids_and_finish_reasons_come_once_per_choice() {
    let reply = |text: &str| chopped(&text_reply(text, STOP)[0], &[2]);
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply("first answer"), reply("2nd")])]));
    let events = app.chat(json!({"stream": true, "n": 2})).await.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    for index in [0, 1] {
        let mine: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(mine[0]["delta"], json!({"role": "assistant", "content": ""}));
        assert!(mine[1..].iter().all(|choice| choice["delta"].get("role").is_none()));
        let (last, others) = mine.split_last().unwrap();
        assert_eq!(last["finish_reason"], "stop");
        assert!(others.iter().all(|choice| choice["finish_reason"].is_null()));
    }
    for field in ["id", "created", "model", "object"] {
        assert!(
            chunks.iter().all(|chunk| chunk[field] == chunks[0][field] && !chunk[field].is_null()),
            "{field}"
        );
    }
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn b17_every_way_to_end_gives_one_done_and_nothing_after() {
    let cases = [
        (text_reply("natural", STOP), json!({})),
        (text_reply("cut", EngineFinish::Length), json!({"max_tokens": 3})),
        (text_reply("x", EngineFinish::Length), json!({"max_tokens": 1})),
        (text_reply("a stop b", EngineFinish::Length), json!({"stop": " stop"})),
        (vec![tokens(&bytes_as_ids(b"a stop b"))], json!({"stop": " stop"})),
        (text_reply("", STOP), json!({})),
        (vec![finish(EngineFinish::Length)], json!({})),
        (text_reply("held back ", STOP), json!({"stop": "back and forth"})),
    ];
    for (reply, fields) in cases {
        for (path, request) in
            [("/v1/chat/completions", chat as fn(Value) -> Value), ("/v1/completions", completion)]
        {
            for include_usage in [false, true] {
                let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply.clone()])]));
                let mut body = request(fields.clone());
                body["stream"] = json!(true);
                body["stream_options"] = json!({"include_usage": include_usage});
                let answer = app.post(path, &body).await;
                assert!(answer.body.ends_with("data: [DONE]\n\n"));
                assert_eq!(answer.body.matches("[DONE]").count(), 1);
                let events = answer.events();
                let finishes =
                    events.iter().filter(|event| event["choices"][0]["finish_reason"].is_string()).count();
                assert_eq!(finishes, 1, "{}", answer.body);
                let usage = &events[events.len() - 2];
                assert_eq!(usage["usage"].is_object(), include_usage);
                if include_usage {
                    assert_eq!(usage["choices"], json!([]));
                    assert!(
                        events[..events.len() - 2]
                            .iter()
                            .all(|event| event["usage"].is_null() && event.get("usage").is_some())
                    );
                }
            }
        }
    }
}

#[tokio::test]
async fn b16_a_failure_mid_stream_is_one_error_event_and_the_end() {
    let lost = EngineError { code: EngineErrorCode::Lost, message: "The engine was lost.".to_owned() };
    let reply = vec![tokens(&bytes_as_ids(b"ab")), finish(EngineFinish::Error(lost))];
    for chat_route in [true, false] {
        let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![reply.clone()])]));
        let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
        let answer = if chat_route { app.chat(fields).await } else { app.completion(fields).await };
        let events = answer.events();
        let (last, before) = events.split_last().unwrap();
        assert_eq!(last["error"]["code"], "engine_lost");
        assert_eq!(last["error"]["type"], "server_error");
        assert!(!answer.body.contains("[DONE]"));
        assert!(before.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
        let metrics = app.metrics.render("");
        assert!(metrics.contains("rung_samples_finished_total{reason=\"error\"} 1"), "{metrics}");
    }
}

#[tokio::test]
async fn text_before_a_failure_is_delivered_even_from_one_delta() {
    let error = EngineError { code: EngineErrorCode::NonFinite, message: "NaN.".to_owned() };
    let delta = SampleDelta { finish: Some(EngineFinish::Error(error)), ..tokens(&bytes_as_ids(b"ab")) };
    let app = app(&ScriptedEngine::new(vec![Reply::Play(vec![vec![delta]])]));
    let events = app.completion(json!({"stream": true})).await.events();
    assert_eq!(events[0]["choices"][0]["text"], "ab");
    assert_eq!(events[1]["error"]["code"], "non_finite_logits");
    assert_eq!(events.len(), 2);
}

#[tokio::test]
async fn one_choices_failure_ends_the_whole_answer_and_aborts_the_others() {
    let error = EngineError { code: EngineErrorCode::Internal, message: "Bug.".to_owned() };
    let failing = vec![tokens(&bytes_as_ids(b"a")), finish(EngineFinish::Error(error))];
    let endless = vec![tokens(&bytes_as_ids(b"b"))];
    let engine = ScriptedEngine::new(vec![Reply::Play(vec![failing, endless])]);
    let events = app(&engine).chat(json!({"stream": true, "n": 2})).await.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "internal_error");
    assert_eq!(engine.record().aborts, [(0, 1)]);
}

async fn open_stream(app: &App, body: Value) -> BodyDataStream {
    let response =
        app.router.clone().oneshot(post_request("/v1/chat/completions", body.to_string())).await.unwrap();
    assert_eq!(response.status(), 200);
    response.into_body().into_data_stream()
}

async fn next_text(stream: &mut BodyDataStream) -> String {
    String::from_utf8(stream.next().await.unwrap().unwrap().to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn silence_is_filled_with_comments_before_and_between_tokens() {
    let engine = ScriptedEngine::new(vec![Reply::Hold]);
    let app = app(&engine);
    let begun = tokio::time::Instant::now();
    // No token yet: the response begins after one interval all the same.
    let mut stream = open_stream(&app, chat(json!({"stream": true}))).await;
    assert_eq!(begun.elapsed(), Duration::from_secs(15));
    assert_eq!(next_text(&mut stream).await, ": keep-alive\n\n");
    assert_eq!(begun.elapsed(), Duration::from_secs(30));
    let sink = engine.record().sinks[0].clone();
    sink.push(0, tokens(&bytes_as_ids(b"a")));
    assert!(next_text(&mut stream).await.contains("\"a\""));
    tokio::time::advance(Duration::from_secs(10)).await;
    sink.push(0, tokens(&bytes_as_ids(b"b")));
    assert!(next_text(&mut stream).await.contains("\"b\""));
    // Counted from the last bytes, not from a fixed beat.
    let last = tokio::time::Instant::now();
    assert_eq!(next_text(&mut stream).await, ": keep-alive\n\n");
    assert_eq!(last.elapsed(), Duration::from_secs(15));
    sink.push(0, finish(EngineFinish::Length));
    assert!(next_text(&mut stream).await.contains("\"finish_reason\":\"length\""));
    assert_eq!(next_text(&mut stream).await, "data: [DONE]\n\n");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_slow_reader_gets_fewer_larger_chunks() {
    let engine = ScriptedEngine::new(vec![Reply::Hold]);
    let app = app(&engine);
    let response = tokio::spawn({
        let app = app.clone();
        async move { open_stream(&app, chat(json!({"stream": true}))).await }
    });
    while engine.record().sinks.is_empty() {
        tokio::task::yield_now().await;
    }
    let sink = engine.record().sinks[0].clone();
    sink.push(0, tokens(&bytes_as_ids(b"a")));
    let mut stream = response.await.unwrap();
    assert!(next_text(&mut stream).await.contains("\"a\""));
    for byte in b"bcdefg" {
        sink.push(0, tokens(&bytes_as_ids(&[*byte])));
    }
    assert!(next_text(&mut stream).await.contains("\"bcdefg\""), "nobody asked, so nothing was built");
    assert!(stream.next().now_or_never().is_none());
}

#[tokio::test]
async fn dropping_the_body_aborts_every_open_sample_once() {
    let engine = ScriptedEngine::new(vec![Reply::Hold, Reply::Hold]);
    let app = app(&engine);
    let body = completion(json!({"stream": true, "prompt": ["a", "b"], "n": 2})).to_string();
    let response = tokio::spawn(app.router.clone().oneshot(post_request("/v1/completions", body)));
    while engine.record().sinks.len() < 2 {
        tokio::task::yield_now().await;
    }
    // One of the four has ended, one was cut by nothing, two have said nothing.
    engine.record().sinks[0].push(1, text_reply("x", EngineFinish::Length).remove(0));
    engine.record().sinks[1].push(0, tokens(&bytes_as_ids(b"y")));
    let mut stream = response.await.unwrap().unwrap().into_body().into_data_stream();
    stream.next().await.unwrap().unwrap();
    assert_eq!(app.lifecycle.num_open(), 1);
    drop(stream);
    let mut aborts = engine.record().aborts.clone();
    aborts.sort_unstable();
    assert_eq!(aborts, [(0, 0), (1, 0), (1, 1)]);
    assert_eq!(app.lifecycle.num_open(), 0);
    let metrics = app.metrics.render("");
    assert!(metrics.contains("rung_samples_finished_total{reason=\"abort\"}"), "{metrics}");
}

#[tokio::test]
async fn dropping_a_request_that_waits_aborts_it_too() {
    let engine = ScriptedEngine::new(vec![Reply::Hold]);
    let app = app(&engine);
    let waiting = tokio::spawn({
        let app = app.clone();
        async move { app.chat(json!({"n": 3})).await }
    });
    while engine.record().sinks.is_empty() {
        tokio::task::yield_now().await;
    }
    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    assert_eq!(engine.record().aborts, [(0, 0), (0, 1), (0, 2)]);
}

/// The same two over a real socket: the server must notice that the client is gone.
#[tokio::test]
async fn b02_a_client_that_hangs_up_frees_its_rows_in_both_modes() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let engine = ScriptedEngine::new(Vec::new());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(axum::serve(listener, app(&engine).router).into_future());
    for (round, stream) in [false, true].into_iter().enumerate() {
        let body = chat(json!({"stream": stream})).to_string();
        let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        while engine.record().sinks.len() <= round {
            tokio::task::yield_now().await;
        }
        if stream {
            let sink = engine.record().sinks[round].clone();
            sink.push(0, tokens(&bytes_as_ids(b"a")));
            let mut buffer = [0; 1024];
            assert!(socket.read(&mut buffer).await.unwrap() > 0);
        }
        drop(socket);
        while engine.record().aborts.len() <= round {
            tokio::task::yield_now().await;
        }
        assert_eq!(engine.record().aborts[round], (round, 0));
    }
    server.abort();
}

#[tokio::test]
async fn after_the_drain_deadline_streams_end_with_an_error_event() {
    let engine = ScriptedEngine::new(vec![Reply::Hold, Reply::Hold]);
    let app = app(&engine);
    let waiting = tokio::spawn({
        let app = app.clone();
        async move { app.chat(json!({})).await }
    });
    let streaming = tokio::spawn({
        let app = app.clone();
        async move { open_stream(&app, chat(json!({"stream": true}))).await }
    });
    while engine.record().sinks.len() < 2 {
        tokio::task::yield_now().await;
    }
    for sink in &engine.record().sinks {
        sink.push(0, tokens(&bytes_as_ids(b"a")));
    }
    let mut stream = streaming.await.unwrap();
    assert!(next_text(&mut stream).await.contains("\"a\""));
    app.lifecycle.advance(Phase::Draining);
    assert!(stream.next().now_or_never().is_none(), "open streams go on while the server drains");
    app.lifecycle.advance(Phase::Closing);
    assert!(next_text(&mut stream).await.contains("server_draining"));
    assert!(stream.next().await.is_none());
    assert_eq!(waiting.await.unwrap().error().0, 503);
    drop(stream);
    app.lifecycle.idle().await;
    assert_eq!(engine.record().aborts.len(), 2);
}

/// Adds up a stream's chunks the way a client does.
fn added_up(events: &[Value]) -> Map<String, Value> {
    let mut choices: Map<String, Value> = Map::new();
    for choice in events.iter().filter_map(|event| event["choices"].get(0)) {
        let sum = choices
            .entry(choice["index"].to_string())
            .or_insert_with(|| json!({"text": "", "ids": [], "finish": null, "logprobs": []}));
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        sum["text"] = json!(format!("{}{text}", sum["text"].as_str().unwrap()));
        append(&mut sum["ids"], &choice["token_ids"]);
        if !choice["finish_reason"].is_null() {
            assert!(sum["finish"].is_null(), "one finish per choice");
            sum["finish"] = choice["finish_reason"].clone();
        }
        append_logprobs(&mut sum["logprobs"], &choice["logprobs"]);
    }
    choices
}

fn append(list: &mut Value, more: &Value) {
    list.as_array_mut().unwrap().extend(more.as_array().into_iter().flatten().cloned());
}

/// Chat: the entries. Completions: the four lists, side by side.
fn append_logprobs(list: &mut Value, logprobs: &Value) {
    append(list, &logprobs["content"]);
    for (index, token) in logprobs["tokens"].as_array().into_iter().flatten().enumerate() {
        let entry = json!([
            token,
            logprobs["token_logprobs"][index],
            logprobs["top_logprobs"][index],
            logprobs["text_offset"][index]
        ]);
        list.as_array_mut().unwrap().push(entry);
    }
}

/// The answer in one piece, in the same form.
fn taken_apart(body: &Value) -> Map<String, Value> {
    let mut choices = Map::new();
    for choice in body["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
        let mut whole = json!({"text": text, "ids": choice["token_ids"], "finish": choice["finish_reason"], "logprobs": []});
        append_logprobs(&mut whole["logprobs"], &choice["logprobs"]);
        choices.insert(choice["index"].to_string(), whole);
    }
    choices
}

fn sample() -> impl Strategy<Value = SampleDelta> {
    let mut alphabet = bytes_as_ids(b"aaabbb  \xE2\x82\xAC\xF0\x9F\x8C\x8A\xFF");
    alphabet.extend([1, 600]); // a control token and `<think>`
    (prop::collection::vec(prop::sample::select(alphabet), 0..16), any::<bool>()).prop_map(
        |(mut token_ids, natural)| {
            let end = if natural { STOP } else { EngineFinish::Length };
            if natural {
                token_ids.push(IM_END);
            }
            let logprobs = logprobs_for(&token_ids, 2);
            let started = Some(started(1));
            SampleDelta { token_ids, logprobs, started, finish: Some(end), ..SampleDelta::default() }
        },
    )
}

#[expect(clippy::struct_excessive_bools, reason = "independent switches of one request")]
#[derive(Debug, Clone)]
struct Case {
    chat: bool,
    logprobs: bool,
    /// Of completions.
    echo: bool,
    includes_stop: bool,
    stops: Vec<String>,
    /// Per prompt, per sample.
    samples: Vec<Vec<SampleDelta>>,
    sizes: Vec<usize>,
}

fn cases() -> impl Strategy<Value = Case> {
    (any::<[bool; 4]>(), 1usize..3, 1usize..4)
        .prop_flat_map(|(flags, prompts, n)| {
            let chat = flags[0];
            let prompts = if chat { 1 } else { prompts };
            (
                Just(flags),
                prop::collection::vec("[ab €🌊\u{FFFD}]{1,3}", 0..3),
                prop::collection::vec(prop::collection::vec(sample(), n), prompts),
                prop::collection::vec(1usize..5, 1..5),
            )
        })
        .prop_map(|([chat, logprobs, echo, includes_stop], stops, samples, sizes)| Case {
            chat,
            logprobs,
            echo: echo && !chat,
            includes_stop,
            stops,
            samples,
            sizes,
        })
}

impl Case {
    async fn run(&self, stream: bool, sizes: &[usize]) -> (Map<String, Value>, Value) {
        let replies = self.samples.iter().map(|samples| {
            Reply::Play(
                samples
                    .iter()
                    .enumerate()
                    .map(|(sample, whole)| {
                        let logprobs = if self.logprobs { whole.logprobs.clone() } else { Vec::new() };
                        // Of the prompt's second token, with the first sample alone.
                        let scored = self.echo && self.logprobs && sample == 0;
                        let score = PromptLogprobs { chosen: -0.5, rank: 2, top: vec![(9, -0.25)] };
                        let prompt_logprobs = if scored { vec![score] } else { Vec::new() };
                        chopped(&SampleDelta { logprobs, prompt_logprobs, ..whole.clone() }, sizes)
                    })
                    .collect(),
            )
        });
        let app = app(&ScriptedEngine::new(replies.collect()));
        let mut fields = json!({"stop": self.stops, "n": self.samples[0].len(), "return_token_ids": true, "stream": stream});
        if stream {
            fields["stream_options"] = json!({"include_usage": true});
        }
        fields["include_stop_str_in_output"] = json!(self.includes_stop);
        if self.echo {
            fields["echo"] = json!(true);
        }
        if self.logprobs {
            fields["logprobs"] = if self.chat { json!(true) } else { json!(2) };
            if self.chat {
                fields["top_logprobs"] = json!(2);
            }
        }
        let answer = if self.chat {
            app.chat(fields).await
        } else {
            fields["prompt"] = json!(vec![bytes_as_ids("é".as_bytes()); self.samples.len()]);
            app.completion(fields).await
        };
        if !stream {
            let body = answer.json();
            return (taken_apart(&body), body["usage"].clone());
        }
        let events = answer.events();
        let (done, chunks) = events.split_last().unwrap();
        assert_eq!(done, "[DONE]");
        (added_up(chunks), chunks.last().unwrap()["usage"].clone())
    }
}

/// The comparison that the law rests on must notice a stream that lost or doubled anything.
#[tokio::test]
async fn a_stream_with_a_dropped_doubled_or_swapped_event_breaks_the_law() {
    let whole = text_reply("abcdefg", STOP).remove(0);
    let whole = SampleDelta { logprobs: logprobs_for(&whole.token_ids, 1), ..whole };
    let reply = || vec![Reply::Play(vec![chopped(&whole, &[1])])];
    let fields = json!({"return_token_ids": true, "logprobs": true, "top_logprobs": 1});
    let expected = taken_apart(&app(&ScriptedEngine::new(reply())).chat(fields.clone()).await.json());
    let mut streamed = fields;
    streamed["stream"] = json!(true);
    let events = app(&ScriptedEngine::new(reply())).chat(streamed).await.events();
    assert_eq!(added_up(&events), expected);
    let is_text =
        |event: &Value| event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty());
    let texts: Vec<usize> = (0..events.len()).filter(|&index| is_text(&events[index])).collect();
    assert_eq!(texts.len(), 7);
    for &index in &texts {
        let mut dropped = events.clone();
        dropped.remove(index);
        let mut doubled = events.clone();
        doubled.insert(index, events[index].clone());
        let mut cut = events.clone();
        cut[index]["choices"][0]["delta"]["content"] = json!("");
        for mutant in [dropped, doubled, cut] {
            assert_ne!(added_up(&mutant), expected, "event {index}");
        }
    }
    for pair in texts.windows(2) {
        let mut swapped = events.clone();
        swapped.swap(pair[0], pair[1]);
        assert_ne!(added_up(&swapped), expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_streaming_law_holds_for_every_endpoint(case in cases()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (whole, usage) = runtime.block_on(case.run(false, &[usize::MAX]));
        for (stream, sizes) in [(false, &case.sizes[..]), (true, &case.sizes[..]), (true, &[1]), (true, &[usize::MAX])] {
            let (choices, streamed_usage) = runtime.block_on(case.run(stream, sizes));
            prop_assert_eq!(&choices, &whole);
            prop_assert_eq!(&streamed_usage, &usage);
        }
        for choice in whole.values() {
            let text = choice["text"].as_str().unwrap();
            let own = text.strip_prefix("é").filter(|_| case.echo).unwrap_or(text);
            prop_assert!(!case.echo || text.len() > own.len(), "the prompt is missing");
            prop_assert!(
                case.includes_stop || case.stops.iter().all(|stop| !own.contains(stop)),
                "a stop string leaked"
            );
            let logprobs = choice["logprobs"].as_array().unwrap();
            let echoed = if case.echo { 2 } else { 0 };
            prop_assert!(!case.logprobs || logprobs.len() == echoed + choice["ids"].as_array().unwrap().len());
            prop_assert!(!case.logprobs || !case.echo || logprobs[0][1].is_null() && logprobs[1][1] == -0.5);
        }
    }

    #[test]
    fn any_body_gets_an_answer_that_is_not_5xx(body in prop::collection::vec(any::<u8>(), 0..64), json_like in "\\PC{0,80}") {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let app = app(&ScriptedEngine::new(Vec::new()));
        for body in [Body::from(body), Body::from(json_like.clone()), Body::from(format!("{{\"model\":\"tiny\",{json_like}"))] {
            let answer = runtime.block_on(app.post_raw("/v1/chat/completions", body));
            prop_assert!(answer.status.is_client_error());
        }
    }
}
