//! The pool over scripted engines: what an engine may say of itself, readiness, choice, reconnects.

use std::sync::Arc;

use bytes::Bytes;
use rung_frontend::engine::session::SessionEnd;
use rung_frontend::engine::types::{EngineErrorCode, EngineFinish, GenerateRequest};
use rung_frontend::engine::{ClientError, Engine, EnginePool, proto};
use rung_frontend::metrics::{EngineHost, Metrics};
use sha2::{Digest, Sha256};

use crate::client::{error_of, request, rest};
use crate::mock_engine::{MockEngine, Script, VOCAB_SIZE, length};

/// A way to spoil what an engine says of itself.
type Spoil = fn(&mut Script);

#[tokio::test]
async fn descriptions_that_cannot_be_worked_with_are_refused_in_words() {
    let cases: &[(&str, Spoil)] = &[
        ("speaks protocol 2", |script| script.describe.protocol = 2),
        ("no model", |script| script.describe.model = None),
        ("no limits", |script| script.describe.limits = None),
        ("max_submit_bytes of 0", |script| script.describe.limits.as_mut().unwrap().max_submit_bytes = 0),
        ("vocabulary has 0", |script| script.describe.model.as_mut().unwrap().vocab_size = 0),
        ("context holds 1", |script| script.describe.model.as_mut().unwrap().max_model_len = 1),
        ("has no name", |script| script.describe.model.as_mut().unwrap().name.clear()),
        ("special token 640", |script| {
            script.describe.model.as_mut().unwrap().eos_token_ids.push(VOCAB_SIZE);
        }),
        ("out of range", |script| {
            let sampling = proto::Sampling { temperature: Some(f32::NAN), ..proto::Sampling::default() };
            script.describe.model.as_mut().unwrap().default_sampling = Some(sampling);
        }),
        ("not 32 bytes", |script| script.describe.tokenizer_files[0].sha256.truncate(31)),
        ("at most 536870912", |script| script.describe.tokenizer_files[0].size_bytes = u64::MAX),
        ("another size", |script| script.describe.tokenizer_files[0].size_bytes -= 1),
        ("another hash", |script| {
            script.describe.tokenizer_files[0].sha256 = Bytes::from_static(&[0; 32]);
        }),
        ("no tokenizer.json", |script| script.describe.tokenizer_files.clear()),
        ("tokenizer.json cannot be used", |script| {
            let content = Bytes::from_static(b"{}");
            let announced = &mut script.describe.tokenizer_files[0];
            announced.size_bytes = 2;
            announced.sha256 = Bytes::copy_from_slice(&Sha256::digest(&content));
            script.files.insert("tokenizer.json".to_owned(), content);
        }),
    ];
    for (hint, spoil) in cases {
        let mut script = Script::default();
        spoil(&mut script);
        let mock = MockEngine::start(script);
        let pool = pool(1);
        let error = pool.attach(0, &mock.client().await).await.map(drop).unwrap_err();
        assert!(
            matches!(&error, ClientError::Incompatible(message) if message.contains(hint)),
            "{hint}: {error}"
        );
        assert!(pool.model().is_none());
    }
}

#[tokio::test]
async fn logprobs_are_refused_when_the_engine_lacks_them() {
    let mut script = Script::default();
    script.describe.capabilities = vec![77];
    let mock = MockEngine::start(script);
    let pool = pool(1);
    let _attached = pool.attach(0, &mock.client().await).await.unwrap();
    let error = pool.submit(GenerateRequest { top_logprobs: Some(0), ..request(1) }).map(drop).unwrap_err();
    assert_eq!(error.code, EngineErrorCode::InvalidArgument);
    assert!(pool.submit(request(1)).is_ok());
}

#[tokio::test]
async fn an_engine_without_room_for_a_session_may_have_it_later() {
    let refuse = Some(tonic::Status::resource_exhausted("8 sessions are open, its limit"));
    let mock = MockEngine::start(Script { refuse, ..Script::default() });
    let error = pool(1).attach(0, &mock.client().await).await.map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Unreachable(message) if message.contains("8 sessions")));
}

fn pool(num_engines: usize) -> EnginePool {
    let engines: Vec<_> = (0..num_engines).map(|index| (index.to_string(), EngineHost::This)).collect();
    EnginePool::new(&engines, Some("served".to_owned()), &Metrics::default())
}

#[tokio::test]
async fn a_pool_is_ready_while_an_engine_is_attached() {
    let mut mock = MockEngine::start(Script::default());
    let pool = pool(1);
    assert!(pool.model().is_none());
    let refused = pool.submit(request(1)).map(drop).unwrap_err();
    assert_eq!(refused.code, EngineErrorCode::Unavailable);
    let attached = pool.attach(0, &mock.client().await).await.unwrap();
    let model = pool.ready().await;
    assert_eq!((model.id.as_str(), model.facts.name.as_str()), ("served", "mock"));
    let mut generation = pool.submit(request(1)).unwrap();
    mock.session().await.fail(tonic::Status::unavailable("gone")).await;
    let (end, error) = tokio::join!(attached.run(std::future::pending()), error_of(&mut generation));
    assert_eq!(error.code, EngineErrorCode::Lost);
    assert!(matches!(end, SessionEnd::Lost(_)));
    assert!(pool.model().is_none());
}

#[tokio::test]
async fn requests_go_to_the_engine_with_the_least_to_do() {
    let mut mocks = [MockEngine::start(Script::default()), MockEngine::start(Script::default())];
    let pool = pool(2);
    let _first = pool.attach(0, &mocks[0].client().await).await.unwrap();
    let _second = pool.attach(1, &mocks[1].client().await).await.unwrap();
    let wide = pool.submit(request(4)).unwrap();
    let narrow: Vec<_> = (0..4).map(|_| pool.submit(request(1)).unwrap()).collect();
    let (mut first, mut second) = (mocks[0].session().await, mocks[1].session().await);
    let mut rows = [Vec::new(), Vec::new()];
    for _ in 0..=narrow.len() {
        tokio::select! {
            submit = first.submit() => rows[0].push(submit.handles.len()),
            submit = second.submit() => rows[1].push(submit.handles.len()),
        }
    }
    rows.sort_unstable();
    assert_eq!(rows, [vec![1, 1, 1, 1], vec![4]]);
    drop(wide);
}

#[tokio::test]
async fn an_engine_of_another_model_is_refused_while_others_serve() {
    let mut other = Script::default();
    other.describe.model.as_mut().unwrap().max_model_len = 4096;
    let (mock, other) = (MockEngine::start(Script::default()), MockEngine::start(other));
    let pool = pool(2);
    let attached = pool.attach(0, &mock.client().await).await.unwrap();
    let error = pool.attach(1, &other.client().await).await.map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Incompatible(message) if message.contains("same model")));
    drop(attached);
    let _attached = pool.attach(1, &other.client().await).await.unwrap();
    assert_eq!(pool.model().unwrap().facts.max_model_len, 4096);
}

#[tokio::test]
async fn a_lost_connection_is_made_anew_and_starts_clean() {
    let mut mock = MockEngine::start(Script::default());
    let pool = Arc::new(pool(1));
    let address = mock.address.clone();
    let connecting = tokio::spawn({
        let pool = Arc::clone(&pool);
        async move { pool.keep_connected(0, &address, None).await }
    });
    pool.ready().await;
    let mut lost = pool.submit(request(2)).unwrap();
    let mut first = mock.session().await;
    assert_eq!(first.submit().await.handles, [0, 1]);
    first.fail(tonic::Status::unavailable("restarting")).await;
    assert_eq!(error_of(&mut lost).await.code, EngineErrorCode::Lost);
    let mut second = mock.session().await;
    pool.ready().await;
    let mut generation = pool.submit(request(1)).unwrap();
    let handles = second.submit().await.handles;
    assert_eq!(handles, [0], "a new session starts empty");
    second.step(|step| step.finished = vec![length(handles[0], 0)]).await;
    assert_eq!(rest(&mut generation).await[0].finish, Some(EngineFinish::Length));
    connecting.abort();
}
