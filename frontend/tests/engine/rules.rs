//! Penalties, rules on tokens, grammars and prompt logprobs on their way to an engine and back.

use std::sync::Arc;
use std::time::Duration;

use rung_frontend::engine::proto::{self, Capability};
use rung_frontend::engine::types::{
    EngineErrorCode, EngineFinish, GenerateRequest, PromptLogprobs, Sampling, TokenRules,
};

use crate::client::{Pair, error_of, request, rest};
use crate::mock_engine::{Script, VOCAB_SIZE, column, length, real_column, rows, values};

/// An engine that can do all, with small limits.
fn able() -> Script {
    let mut script = Script::default();
    script.describe.capabilities = [
        Capability::Logprobs,
        Capability::SamplingExtra,
        Capability::PromptLogprobs,
        Capability::Grammar,
        Capability::Priority,
        Capability::PrefixCache,
    ]
    .map(i32::from)
    .to_vec();
    let limits = script.describe.limits.as_mut().unwrap();
    limits.max_logit_bias = 2;
    limits.max_allowed_token_ids = 3;
    limits.max_bad_words = 2;
    limits.max_bad_word_tokens = 2;
    limits.max_grammar_bytes = 8;
    limits.max_cache_salt_bytes = 4;
    script
}

/// One request for each thing that an engine may be unable to do.
fn special_requests() -> Vec<GenerateRequest> {
    let sampled = |sampling| GenerateRequest { sampling, ..request(1) };
    let ruled = |token_rules| GenerateRequest { token_rules, ..request(1) };
    let none = Sampling::default;
    let rules = TokenRules::default;
    vec![
        sampled(Sampling { min_p: Some(0.0), ..none() }),
        sampled(Sampling { typical_p: Some(1.0), ..none() }),
        sampled(Sampling { repetition_penalty: Some(1.0), ..none() }),
        sampled(Sampling { frequency_penalty: Some(0.0), ..none() }),
        sampled(Sampling { presence_penalty: Some(0.0), ..none() }),
        ruled(TokenRules { logit_bias: vec![(1, 1.0)], ..rules() }),
        ruled(TokenRules { allowed_token_ids: Some(vec![1]), ..rules() }),
        ruled(TokenRules { bad_words: vec![vec![1]], ..rules() }),
        GenerateRequest { prompt_top_logprobs: Some(0), ..request(1) },
        GenerateRequest { grammar: Some(Arc::from("{}")), ..request(1) },
        GenerateRequest { priority: Some(1), ..request(1) },
        GenerateRequest { deadline: Some(Duration::from_secs(1)), ..request(1) },
        GenerateRequest { cache_salt: Some(Arc::from(*b"salt")), ..request(1) },
    ]
}

#[tokio::test]
async fn an_engine_gets_nothing_that_it_has_not_announced() {
    let unable = Pair::open_with(Script::default()).await;
    let able = Pair::open_with(able()).await;
    for asked in special_requests() {
        let error = unable.session.submit(&asked).map(drop).unwrap_err();
        assert_eq!(error.code, EngineErrorCode::InvalidArgument);
        assert!(error.message.starts_with("This engine cannot "), "{}", error.message);
        able.session.submit(&asked).unwrap();
    }
    assert_eq!(unable.session.load(), 0);
}

#[tokio::test]
async fn everything_special_arrives_as_it_was_meant() {
    let mut pair = Pair::open_with(able()).await;
    let asked = GenerateRequest {
        sampling: Sampling {
            min_p: Some(0.1),
            typical_p: Some(0.2),
            repetition_penalty: Some(1.3),
            frequency_penalty: Some(-0.4),
            presence_penalty: Some(0.5),
            ..Sampling::default()
        },
        token_rules: TokenRules {
            logit_bias: vec![(3, -2.5), (0, 100.0)],
            allowed_token_ids: Some(vec![0, 5, 3]),
            bad_words: vec![vec![1], vec![2, 3]],
        },
        top_logprobs: Some(1),
        prompt_top_logprobs: Some(4),
        grammar: Some(Arc::from("{\"a\":1}")),
        priority: Some(7),
        deadline: Some(Duration::from_micros(1)),
        cache_salt: Some(Arc::from(*b"salt")),
        ..request(1)
    };
    let _generation = pair.session.submit(&asked).unwrap();
    let submit = pair.engine.submit().await;
    let sampling = submit.sampling.unwrap();
    assert_eq!((sampling.min_p, sampling.typical_p), (Some(0.1), Some(0.2)));
    assert_eq!(
        (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty),
        (Some(1.3), Some(-0.4), Some(0.5))
    );
    assert_eq!(values(&sampling.logit_bias_ids), [3, 0]);
    assert_eq!(sampling.logit_bias_values, real_column([-2.5, 100.0]));
    assert_eq!(values(&sampling.allowed_token_ids.unwrap()), [0, 5, 3]);
    let words: Vec<_> = sampling.bad_words.iter().map(|word| values(&word.token_ids)).collect();
    assert_eq!(words, [vec![1], vec![2, 3]]);
    assert_eq!(submit.logprobs, Some(proto::LogprobRequest { top_n: Some(1), prompt_top_n: Some(4) }));
    assert_eq!(submit.grammar.unwrap().llguidance, "{\"a\":1}");
    assert_eq!((submit.priority, submit.deadline_ms), (Some(7), Some(1)));
    assert_eq!(submit.cache_salt.unwrap(), "salt");
}

#[tokio::test]
async fn what_is_above_a_limit_or_outside_the_vocabulary_is_refused_with_the_number() {
    let pair = Pair::open_with(able()).await;
    let ruled = |token_rules| GenerateRequest { token_rules, ..request(1) };
    let rules = TokenRules::default;
    let cases = [
        (
            ruled(TokenRules { logit_bias: vec![(1, 0.0), (2, 0.0), (3, 0.0)], ..rules() }),
            "at most 2 ids with a bias",
        ),
        (ruled(TokenRules { logit_bias: vec![(VOCAB_SIZE, 0.0)], ..rules() }), "logit bias names"),
        (ruled(TokenRules { allowed_token_ids: Some(vec![0; 4]), ..rules() }), "at most 3 allowed ids"),
        (ruled(TokenRules { allowed_token_ids: Some(vec![VOCAB_SIZE]), ..rules() }), "allowed ids hold"),
        (ruled(TokenRules { bad_words: vec![vec![1]; 3], ..rules() }), "at most 2 bad words"),
        (ruled(TokenRules { bad_words: vec![vec![1; 3]], ..rules() }), "at most 2 tokens in a bad word"),
        (ruled(TokenRules { bad_words: vec![vec![u32::MAX]], ..rules() }), "bad word holds"),
        (
            GenerateRequest { grammar: Some(Arc::from("123456789")), ..request(1) },
            "at most 8 bytes of a grammar",
        ),
        (
            GenerateRequest { cache_salt: Some(Arc::from([0; 5])), ..request(1) },
            "at most 4 bytes of a cache salt",
        ),
        (GenerateRequest { prompt_top_logprobs: Some(6), ..request(1) }, "At most 5 alternatives"),
    ];
    for (asked, part) in cases {
        let error = pair.session.submit(&asked).map(drop).unwrap_err();
        assert_eq!(error.code, EngineErrorCode::InvalidArgument);
        assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
    }
}

fn prompts(handle: u32, ids: &[u32]) -> proto::PromptLogprobColumns {
    proto::PromptLogprobColumns {
        handles: column([handle]),
        counts: column([ids.len() as u32]),
        chosen: real_column(ids.iter().map(|id| -(*id as f32))),
        ranks: column(ids.iter().copied()),
        top_counts: column(ids.iter().map(|_| 1)),
        top_ids: column(ids.iter().copied()),
        top_logprobs: real_column(ids.iter().map(|_| -0.5)),
    }
}

#[tokio::test]
async fn prompt_logprobs_come_in_parts_ahead_of_the_first_token_of_the_first_sample() {
    let mut pair = Pair::open_with(able()).await;
    let asked = GenerateRequest { prompt_top_logprobs: Some(1), ..request(2) };
    let mut generation = pair.session.submit(&asked).unwrap();
    let handles = pair.engine.submit().await.handles;
    pair.engine.step(|step| step.prompt_logprobs = Some(prompts(handles[0], &[1]))).await;
    pair.engine
        .step(|step| {
            step.prompt_logprobs = Some(prompts(handles[0], &[2]));
            rows(step, &[(handles[0], &[5]), (handles[1], &[6])]);
            step.logprobs = Some(proto::LogprobColumns {
                handles: column([handles[0], handles[1]]),
                chosen: real_column([-0.5, -1.5]),
                top_counts: column([0, 0]),
                ..proto::LogprobColumns::default()
            });
            step.finished = vec![length(handles[0], 1), length(handles[1], 1)];
        })
        .await;
    let samples = rest(&mut generation).await;
    let expected = [1, 2].map(|id| PromptLogprobs { chosen: -(id as f32), rank: id, top: vec![(id, -0.5)] });
    assert_eq!(samples[0].prompt_logprobs, expected);
    assert_eq!(samples[1].prompt_logprobs, []);
    assert_eq!(samples[1].finish, Some(EngineFinish::Length));
}

#[tokio::test]
async fn prompt_logprobs_that_nobody_asked_for_or_that_are_missing_or_wrong_fail_their_request() {
    let asked = GenerateRequest { prompt_top_logprobs: Some(1), ..request(1) };
    let silent = request(1);
    let too_many = |handle| prompts(handle, &[1, 2, 3]);
    let unknown_id = |handle| prompts(handle, &[1, VOCAB_SIZE]);
    let no_rank = |handle| prompts(handle, &[1, 0]);
    let short = |handle| proto::PromptLogprobColumns { ranks: column([1]), ..prompts(handle, &[1, 2]) };
    let unasked = |handle| prompts(handle, &[1]);
    let cases: [(&GenerateRequest, &dyn Fn(u32) -> proto::PromptLogprobColumns); 5] = [
        (&asked, &too_many),
        (&asked, &unknown_id),
        (&asked, &no_rank),
        (&asked, &short),
        (&silent, &unasked),
    ];
    let mut pair = Pair::open_with(able()).await;
    for (request, columns) in cases {
        let mut generation = pair.session.submit(request).unwrap();
        let handle = pair.engine.submit().await.handles[0];
        pair.engine.step(|step| step.prompt_logprobs = Some(columns(handle))).await;
        assert_eq!(error_of(&mut generation).await.code, EngineErrorCode::Internal);
        assert_eq!(pair.engine.abort().await, [handle]);
    }
    let mut generation = pair.session.submit(&asked).unwrap();
    let handle = pair.engine.submit().await.handles[0];
    pair.engine
        .step(|step| {
            rows(step, &[(handle, &[5])]);
            step.logprobs = Some(proto::LogprobColumns {
                handles: column([handle]),
                chosen: real_column([-0.5]),
                top_counts: column([0]),
                ..proto::LogprobColumns::default()
            });
        })
        .await;
    let error = error_of(&mut generation).await;
    assert!(error.message.contains("without 2 logprobs of its prompt"), "{}", error.message);
}
