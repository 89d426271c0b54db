//! Time per token of the text path: detokenizing, stop strings, and whole streamed chunks.
//!
//! `cargo bench -p rung-frontend --bench text`

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark prints")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use http_body_util::BodyExt;
use rung_frontend::engine::types::EngineFinish;
use rung_frontend::text::{Detokenizer, LeadingSpace, SampleRules, SampleText, SpecialTokens, StopSet};
use serde_json::json;
use support::{Reply, ScriptedEngine, app, byte_level, chat, finish, post_request, tokens};
use tower::ServiceExt;

const TEXT: &str = "The capital of France is Paris. Once upon a time there was a server that streamed tokens \
                    to many users at once, 海は広いな大きいな and Привет, мир! 😀 def main():\n    return 0\n";

/// The best of several rounds, in ns per operation.
fn best(operations: usize, mut round: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let begun = Instant::now();
        round();
        best = best.min(begun.elapsed().as_nanos() as f64 / operations as f64);
    }
    best
}

fn main() {
    let tokenizer = byte_level();
    let ids: Vec<u32> = tokenizer.encode(&TEXT.repeat(100), SpecialTokens::Omit).unwrap();
    println!("{} tokens of {:.1} bytes", ids.len(), (TEXT.len() * 100) as f64 / ids.len() as f64);

    let detokenize = best(ids.len(), || {
        let mut detokenizer = Detokenizer::new(LeadingSpace::Keep);
        let mut text = String::with_capacity(TEXT.len() * 100);
        for &id in &ids {
            detokenizer.push(tokenizer.vocabulary().bytes(id), &mut text);
        }
        black_box(text);
    });
    println!("detokenize                      {detokenize:7.1} ns/token");

    for (name, stops) in [("no stops", vec![]), ("4 stops", vec!["\n\nUser:", "<end>", "。。", "tokens and"])]
    {
        let rules = Arc::new(SampleRules {
            tokenizer: Arc::clone(&tokenizer),
            stops: StopSet::new(&stops),
            include_stop: false,
            ending_ids: vec![2],
            min_tokens: 0,
            leading: LeadingSpace::Keep,
            logprobs: false,
        });
        for per_delta in [1, 16] {
            let time = best(ids.len(), || {
                let mut sample = SampleText::new(Arc::clone(&rules));
                for delta in ids.chunks(per_delta) {
                    black_box(sample.push(delta, Vec::new()));
                }
            });
            println!("sample text, {name:8}, {per_delta:2} a delta {time:7.1} ns/token");
        }
    }
    println!("streamed chat chunk             {:7.1} ns/token", streamed(&ids[..200]));
}

/// Mailbox to SSE bytes, one token a chunk, without a socket.
fn streamed(ids: &[u32]) -> f64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut best = f64::INFINITY;
    for _ in 0..50 {
        let engine = ScriptedEngine::new(vec![Reply::Hold]);
        let router = app(&engine).router;
        let time = runtime.block_on(async {
            let request = post_request("/v1/chat/completions", chat(json!({"stream": true})).to_string());
            let response = tokio::spawn(router.oneshot(request));
            while engine.record().sinks.is_empty() {
                tokio::task::yield_now().await;
            }
            let sink = engine.record().sinks[0].clone();
            sink.push(0, tokens(&ids[..1]));
            let mut body = response.await.unwrap().unwrap().into_body();
            body.frame().await.unwrap().unwrap();
            let begun = Instant::now();
            for &id in &ids[1..] {
                sink.push(0, tokens(&[id]));
                black_box(body.frame().await.unwrap().unwrap());
            }
            let time = begun.elapsed();
            sink.push(0, finish(EngineFinish::Length));
            time
        });
        best = best.min(time.as_nanos() as f64 / (ids.len() - 1) as f64);
    }
    best
}
