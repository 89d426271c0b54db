//! Sessions with a scripted engine: order, merging, aborts, faults, loss, liveness.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rung_frontend::engine::Generation;
use rung_frontend::engine::proto::{self, FinishReason};
use rung_frontend::engine::session::{Session, SessionEnd, SessionObserver, SessionReader, StepReport};
use rung_frontend::engine::types::{
    EngineError, EngineErrorCode, EngineFinish, GenerateRequest, SampleDelta, Sampling, Stopping,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::mock_engine::{
    MAX_MODEL_LEN, MockEngine, MockSession, Script, VOCAB_SIZE, column, finished, length, real_column, rows,
    values,
};

/// Counts what the session tells its observer.
#[derive(Default)]
struct Counts {
    steps: AtomicU64,
    dropped: AtomicU64,
    faults: AtomicU64,
}

impl SessionObserver for Counts {
    fn step(&self, _: &StepReport, dropped_rows: u64, faults: u64) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.dropped.fetch_add(dropped_rows, Ordering::Relaxed);
        self.faults.fetch_add(faults, Ordering::Relaxed);
    }

    fn dropped(&self, rows: u64) {
        self.dropped.fetch_add(rows, Ordering::Relaxed);
    }
}

/// Both ends of one open session.
pub(crate) struct Pair {
    pub(crate) engine: MockSession,
    pub(crate) session: Session,
    counts: Arc<Counts>,
    ended: JoinHandle<SessionEnd>,
    _mock: MockEngine,
}

impl Pair {
    async fn open() -> Self {
        Self::open_with(Script::default()).await
    }

    pub(crate) async fn open_with(script: Script) -> Self {
        let mut mock = MockEngine::start(script);
        let client = mock.client().await;
        let facts = client.describe().await.unwrap().facts;
        let counts = Arc::new(Counts::default());
        let observer = Arc::clone(&counts) as Arc<dyn SessionObserver>;
        let (session, reader) = Session::open(client.rpc(), facts, observer).await.unwrap();
        let ended = tokio::spawn(SessionReader::run(reader, std::future::pending()));
        Self { engine: mock.session().await, session, counts, ended, _mock: mock }
    }

    /// A submitted request that the engine has received; returns its handles.
    async fn running(&mut self, samples: u32) -> (Generation, Vec<u32>) {
        let generation = self.session.submit(&request(samples)).unwrap();
        let handles = self.engine.submit().await.handles;
        (generation, handles)
    }

    /// Waits until everything that was sent so far has been applied.
    async fn settle(&mut self) {
        let steps = self.counts.steps.load(Ordering::Relaxed) + 1;
        self.engine.step(|_| {}).await;
        while self.counts.steps.load(Ordering::Relaxed) < steps {
            tokio::task::yield_now().await;
        }
    }
}

pub(crate) fn request(samples: u32) -> GenerateRequest {
    GenerateRequest { prompt_ids: Arc::from([1, 2, 3]), samples, ..GenerateRequest::default() }
}

/// Everything that is left of a generation, merged per sample.
pub(crate) async fn rest(generation: &mut Generation) -> Vec<SampleDelta> {
    let mut samples: Vec<SampleDelta> = Vec::new();
    while let Some(news) = generation.next().await {
        for (sample, delta) in news {
            samples.resize_with(samples.len().max(sample as usize + 1), SampleDelta::default);
            let merged = &mut samples[sample as usize];
            merged.token_ids.extend(delta.token_ids);
            merged.logprobs.extend(delta.logprobs);
            merged.prompt_logprobs.extend(delta.prompt_logprobs);
            merged.started = merged.started.or(delta.started);
            assert!(merged.finish.is_none(), "nothing follows the end of a sample");
            merged.finish = delta.finish;
        }
    }
    samples
}

pub(crate) async fn error_of(generation: &mut Generation) -> EngineError {
    match rest(generation).await.pop().and_then(|sample| sample.finish) {
        Some(EngineFinish::Error(error)) => error,
        other => panic!("expected an error, got {other:?}"),
    }
}

#[tokio::test]
async fn a_request_arrives_as_it_was_meant() {
    let mut pair = Pair::open().await;
    let asked = GenerateRequest {
        prompt_ids: Arc::from([7, 0, VOCAB_SIZE - 1]),
        samples: 2,
        sampling: Sampling {
            temperature: Some(0.5),
            top_k: Some(3),
            top_p: Some(0.9),
            seed: Some(u64::MAX),
            ..Sampling::default()
        },
        stopping: Stopping {
            max_tokens: Some(9),
            min_tokens: 2,
            stop_token_ids: vec![4, 5],
            ignore_eos: true,
        },
        top_logprobs: Some(0),
        ..GenerateRequest::default()
    };
    let _generation = pair.session.submit(&asked).unwrap();
    let submit = pair.engine.submit().await;
    assert_eq!(submit.handles, [0, 1]);
    assert_eq!(values(&submit.prompt_ids), [7, 0, VOCAB_SIZE - 1]);
    let sampling = proto::Sampling {
        temperature: Some(0.5),
        top_k: Some(3),
        top_p: Some(0.9),
        seed: Some(u64::MAX),
        ..proto::Sampling::default()
    };
    assert_eq!(submit.sampling, Some(sampling));
    let stopping = proto::Stopping {
        max_tokens: Some(9),
        min_tokens: Some(2),
        stop_token_ids: vec![4, 5],
        ignore_eos: Some(true),
    };
    assert_eq!(submit.stopping, Some(stopping));
    assert_eq!(submit.logprobs, Some(proto::LogprobRequest { top_n: Some(0), prompt_top_n: None }));

    let _silent = pair.session.submit(&request(1)).unwrap();
    let submit = pair.engine.submit().await;
    assert_eq!(submit.handles, [2], "handles count up");
    assert_eq!(submit.sampling, Some(proto::Sampling::default()));
    assert_eq!(
        (submit.grammar, submit.priority, submit.deadline_ms, submit.cache_salt),
        (None, None, None, None)
    );
    assert_eq!(submit.stopping, Some(proto::Stopping::default()));
    assert_eq!(submit.logprobs, None);
}

#[tokio::test]
async fn steps_merge_in_order_until_they_are_read() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(1).await;
    let started =
        proto::Started { handle: handles[0], prompt_tokens: 3, cached_tokens: 1, queue_ns: 1, prefill_ns: 2 };
    pair.engine.step(|step| step.started = vec![started]).await;
    for ids in [[1, 2], [3, 4], [5, 6]] {
        pair.engine.step(|step| rows(step, &[(handles[0], &ids)])).await;
    }
    pair.settle().await;
    let news = generation.next().await.unwrap();
    assert_eq!(news.len(), 1);
    assert_eq!(news[0].1.token_ids, [1, 2, 3, 4, 5, 6]);
    assert_eq!(news[0].1.started.unwrap().cached_tokens, 1);
    pair.engine
        .step(|step| {
            rows(step, &[(handles[0], &[0])]);
            let stop = finished(handles[0], FinishReason::Stop);
            step.finished = vec![proto::Finished { stop_token_id: Some(0), completion_tokens: 7, ..stop }];
        })
        .await;
    let end = rest(&mut generation).await;
    assert_eq!(end[0].token_ids, [0]);
    assert_eq!(end[0].finish, Some(EngineFinish::Stop { token_id: 0 }));
    assert_eq!(pair.session.load(), 0);
}

#[tokio::test]
async fn logprobs_follow_their_tokens_among_rows_without() {
    let mut pair = Pair::open().await;
    let (mut plain, first) = pair.running(1).await;
    let asked = GenerateRequest { top_logprobs: Some(2), ..request(1) };
    let mut detailed = pair.session.submit(&asked).unwrap();
    let second = pair.engine.submit().await.handles;
    pair.engine
        .step(|step| {
            rows(step, &[(first[0], &[9]), (second[0], &[5, 6])]);
            step.logprobs = Some(proto::LogprobColumns {
                handles: column([second[0]]),
                chosen: real_column([-0.5, -1.5]),
                top_counts: column([2, 1]),
                top_ids: column([5, 7, 8]),
                top_logprobs: real_column([-0.5, -2.0, -0.25]),
            });
            step.finished = vec![length(first[0], 1), length(second[0], 2)];
        })
        .await;
    assert_eq!(rest(&mut plain).await[0].logprobs, []);
    let logprobs = &rest(&mut detailed).await[0].logprobs;
    assert_eq!((logprobs[0].chosen, logprobs[1].chosen), (-0.5, -1.5));
    assert_eq!(logprobs[0].top, [(5, -0.5), (7, -2.0)]);
    assert_eq!(logprobs[1].top, [(8, -0.25)]);
}

#[tokio::test]
async fn a_request_dropped_before_it_is_written_never_reaches_the_engine() {
    let mut pair = Pair::open().await;
    // Nothing is awaited in between, so the writer has no turn.
    let dropped = pair.session.submit(&request(2)).unwrap();
    drop(dropped);
    let _kept = pair.session.submit(&request(1)).unwrap();
    assert_eq!(pair.engine.submit().await.handles, [2]);
    assert_eq!(pair.session.load(), 1);
}

#[tokio::test]
async fn a_sample_dropped_before_its_request_is_written_is_aborted_after_it() {
    let mut pair = Pair::open().await;
    let mut generation = pair.session.submit(&request(3)).unwrap();
    generation.abort(1);
    let handles = pair.engine.submit().await.handles;
    assert_eq!(handles, [0, 1, 2]);
    assert_eq!(pair.engine.abort().await, [1]);
}

#[tokio::test]
async fn aborts_overtake_submissions() {
    let mut pair = Pair::open().await;
    let (first, first_handles) = pair.running(2).await;
    let (second, second_handles) = pair.running(1).await;
    let _queued = pair.session.submit(&request(1)).unwrap();
    drop(first);
    drop(second);
    let mut aborted = pair.engine.abort().await;
    aborted.sort_unstable();
    assert_eq!(aborted, [first_handles, second_handles].concat(), "one Abort for all");
    pair.engine.submit().await;
}

#[tokio::test]
async fn rows_that_come_after_an_abort_are_counted_and_the_end_is_not() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(2).await;
    generation.abort(0);
    assert_eq!(pair.engine.abort().await, [handles[0]]);
    pair.engine.step(|step| rows(step, &[(handles[0], &[1]), (handles[1], &[2])])).await;
    pair.engine
        .step(|step| {
            step.finished = vec![finished(handles[0], FinishReason::Cancelled), length(handles[1], 1)];
        })
        .await;
    let samples = rest(&mut generation).await;
    assert_eq!(samples[0], SampleDelta::default());
    assert_eq!(samples[1].token_ids, [2]);
    pair.engine.step(|step| rows(step, &[(999, &[1])])).await;
    pair.settle().await;
    assert_eq!(pair.counts.dropped.load(Ordering::Relaxed), 2, "the late row and the unknown handle");
}

#[tokio::test]
async fn a_finished_request_is_not_aborted() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(1).await;
    pair.engine.step(|step| step.finished = vec![length(handles[0], 0)]).await;
    rest(&mut generation).await;
    drop(generation);
    let (unread, handles) = pair.running(1).await;
    pair.engine.step(|step| step.finished = vec![length(handles[0], 0)]).await;
    pair.settle().await;
    drop(unread);
    let _next = pair.session.submit(&request(1)).unwrap();
    pair.engine.submit().await;
}

#[tokio::test]
async fn a_rejection_covers_all_samples() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(2).await;
    let code = proto::EngineErrorCode::Overloaded.into();
    let error = proto::EngineError { code, message: "The queue is full.".to_owned(), retryable: true };
    pair.engine.reject(&handles, error.clone()).await;
    let samples = rest(&mut generation).await;
    let expected = EngineError { code: EngineErrorCode::Overloaded, message: error.message.clone() };
    assert_eq!(samples.len(), 2);
    assert!(samples.iter().all(|sample| sample.finish == Some(EngineFinish::Error(expected.clone()))));
    assert_eq!(pair.session.load(), 0);
    pair.engine.reject(&handles, error).await;
    pair.settle().await;
    assert_eq!(pair.counts.dropped.load(Ordering::Relaxed), 2);
}

/// A way to spoil a Step for one handle only.
type Spoil = fn(&mut proto::Step, u32);

const BAD_FOR_ONE: &[(&str, Spoil)] = &[
    ("an id beyond the vocabulary", |step, handle| rows(step, &[(handle, &[VOCAB_SIZE])])),
    ("two rows of one handle", |step, handle| rows(step, &[(handle, &[1]), (handle, &[2])])),
    ("a handles column of odd length", |step, handle| {
        rows(step, &[(handle, &[1])]);
        step.handles = Bytes::from([&step.handles[..], &[0]].concat());
    }),
    ("more counts than handles", |step, handle| {
        rows(step, &[(handle, &[1])]);
        step.token_counts = column([1, 0]);
    }),
    ("counts that add up to more than the ids", |step, handle| {
        rows(step, &[(handle, &[1])]);
        step.token_counts = column([u32::MAX]);
    }),
    ("more ids than counted", |step, handle| {
        rows(step, &[(handle, &[1])]);
        step.token_ids = column([1, 2]);
    }),
    ("logprobs that nobody asked for", |step, handle| {
        rows(step, &[(handle, &[1])]);
        step.logprobs = Some(proto::LogprobColumns {
            handles: column([handle]),
            chosen: real_column([-1.0]),
            top_counts: column([0]),
            ..proto::LogprobColumns::default()
        });
    }),
    ("logprobs without a row", |step, handle| {
        step.logprobs =
            Some(proto::LogprobColumns { handles: column([handle]), ..proto::LogprobColumns::default() });
    }),
    ("a start with more cached than prompt tokens", |step, handle| {
        step.started = vec![proto::Started { handle, cached_tokens: 1, ..proto::Started::default() }];
    }),
    ("two starts", |step, handle| {
        let started = proto::Started { handle, ..proto::Started::default() };
        step.started = vec![started, started];
    }),
    ("an end without a reason", |step, handle| {
        step.finished = vec![proto::Finished { handle, reason: 99, ..proto::Finished::default() }];
    }),
    ("a stop without its id", |step, handle| step.finished = vec![finished(handle, FinishReason::Stop)]),
    ("a stop at an id that never came", |step, handle| {
        let stop = finished(handle, FinishReason::Stop);
        step.finished = vec![proto::Finished { stop_token_id: Some(3), ..stop }];
    }),
    ("an error without its reason", |step, handle| {
        step.finished = vec![finished(handle, FinishReason::Error)];
    }),
    ("an end that counts tokens which never came", |step, handle| step.finished = vec![length(handle, 5)]),
    ("a cancellation that nobody asked for", |step, handle| {
        step.finished = vec![finished(handle, FinishReason::Cancelled)];
    }),
];

#[tokio::test]
async fn a_bad_part_of_a_step_fails_only_the_request_it_names() {
    for (what, spoil) in BAD_FOR_ONE {
        let mut pair = Pair::open().await;
        let (mut good, good_handles) = pair.running(1).await;
        let (mut bad, bad_handles) = pair.running(1).await;
        pair.engine.step(|step| spoil(step, bad_handles[0])).await;
        let error = error_of(&mut bad).await;
        assert_eq!(error.code, EngineErrorCode::Internal, "{what}: {error}");
        pair.engine
            .step(|step| {
                rows(step, &[(good_handles[0], &[1])]);
                step.finished = vec![length(good_handles[0], 1)];
            })
            .await;
        assert_eq!(rest(&mut good).await[0].finish, Some(EngineFinish::Length), "{what}");
        assert_eq!(pair.counts.faults.load(Ordering::Relaxed), 1, "{what}");
        assert_eq!(pair.session.load(), 0, "{what}");
    }
}

#[tokio::test]
async fn a_row_that_broke_the_protocol_is_aborted_in_the_engine() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(1).await;
    pair.engine.step(|step| rows(step, &[(handles[0], &[VOCAB_SIZE])])).await;
    error_of(&mut generation).await;
    assert_eq!(pair.engine.abort().await, handles);
}

#[tokio::test]
async fn logprobs_that_are_no_numbers_or_too_many_fail_the_request() {
    for (chosen, top) in [(f32::NAN, -1.0), (-1.0, f32::INFINITY), (f32::NEG_INFINITY, -1.0)] {
        let mut pair = Pair::open().await;
        let asked = GenerateRequest { top_logprobs: Some(1), ..request(1) };
        let mut generation = pair.session.submit(&asked).unwrap();
        let handles = pair.engine.submit().await.handles;
        pair.engine
            .step(|step| {
                rows(step, &[(handles[0], &[1])]);
                step.logprobs = Some(proto::LogprobColumns {
                    handles: column([handles[0]]),
                    chosen: real_column([chosen]),
                    top_counts: column([1]),
                    top_ids: column([1]),
                    top_logprobs: real_column([top]),
                });
            })
            .await;
        assert_eq!(error_of(&mut generation).await.code, EngineErrorCode::Internal);
    }
}

#[tokio::test]
async fn tokens_beyond_those_asked_for_fail_the_request() {
    let mut pair = Pair::open().await;
    let stopping = Stopping { max_tokens: Some(2), ..Stopping::default() };
    let mut generation = pair.session.submit(&GenerateRequest { stopping, ..request(1) }).unwrap();
    let handles = pair.engine.submit().await.handles;
    pair.engine.step(|step| rows(step, &[(handles[0], &[1, 2])])).await;
    pair.engine.step(|step| rows(step, &[(handles[0], &[3])])).await;
    let samples = rest(&mut generation).await;
    assert_eq!(samples[0].token_ids, [1, 2]);
    assert!(matches!(&samples[0].finish, Some(EngineFinish::Error(_))));
}

#[tokio::test]
async fn a_lost_engine_fails_each_open_request_once_and_takes_no_more() {
    let mut pair = Pair::open().await;
    let (mut running, _) = pair.running(2).await;
    let mut queued = pair.session.submit(&request(1)).unwrap();
    pair.engine.fail(tonic::Status::internal("it fell over")).await;
    let samples = rest(&mut running).await;
    assert_eq!(samples.len(), 2);
    for sample in samples {
        assert!(
            matches!(sample.finish, Some(EngineFinish::Error(error)) if error.code == EngineErrorCode::Lost)
        );
    }
    let error = error_of(&mut queued).await;
    assert_eq!(error.code, EngineErrorCode::Lost);
    assert!(error.message.contains("it fell over"), "{error}");
    assert!(!pair.session.is_live());
    let refused = pair.session.submit(&request(1)).map(drop).unwrap_err();
    assert_eq!(refused.code, EngineErrorCode::Unavailable);
    assert!(matches!(pair.ended.await.unwrap(), SessionEnd::Lost(_)));
}

#[tokio::test]
async fn a_missing_step_ends_the_session() {
    let mut pair = Pair::open().await;
    let (mut generation, _) = pair.running(1).await;
    pair.engine.step(|step| step.seq = 2).await;
    assert_eq!(error_of(&mut generation).await.code, EngineErrorCode::Lost);
    assert!(matches!(pair.ended.await.unwrap(), SessionEnd::Broken(_)));
}

#[tokio::test]
async fn a_large_frame_passes_and_a_huge_one_only_ends_the_session() {
    let mut pair = Pair::open().await;
    let (mut generation, handles) = pair.running(1).await;
    let ids: Vec<u32> = (0..4_000_000).map(|position| position % VOCAB_SIZE).collect();
    pair.engine.step(|step| rows(step, &[(handles[0], &ids)])).await;
    assert_eq!(generation.next().await.unwrap()[0].1.token_ids, ids);
    let ids = vec![1; 17 * 1024 * 1024];
    pair.engine.step(|step| rows(step, &[(handles[0], &ids)])).await;
    assert_eq!(error_of(&mut generation).await.code, EngineErrorCode::Lost);
    assert!(matches!(pair.ended.await.unwrap(), SessionEnd::Lost(_)));
}

#[tokio::test(start_paused = true)]
async fn silence_for_five_seconds_is_death() {
    let mut pair = Pair::open().await;
    let (mut generation, _) = pair.running(1).await;
    pair.settle().await;
    let last_heard = Instant::now();
    assert_eq!(pair.ended.await.unwrap(), SessionEnd::Silent);
    assert_eq!(last_heard.elapsed().as_secs(), 5);
    assert_eq!(error_of(&mut generation).await.code, EngineErrorCode::Lost);
}

#[tokio::test(start_paused = true)]
async fn heartbeats_keep_an_idle_session_alive() {
    let mut pair = Pair::open().await;
    for _ in 0..20 {
        tokio::time::advance(Duration::from_secs(4)).await;
        pair.settle().await;
    }
    assert!(pair.session.is_live());
}

#[tokio::test]
async fn a_step_is_hung_beyond_ten_seconds_and_ten_times_its_prediction() {
    for (age_ms, predicted_ms, is_hung) in
        [(10_000, 0, false), (10_001, 0, true), (60_000, 6_000, false), (60_001, 6_000, true)]
    {
        let mut pair = Pair::open().await;
        pair.engine
            .step(|step| {
                step.step_age_ms = age_ms;
                step.predicted_step_ms = predicted_ms;
            })
            .await;
        if is_hung {
            let age = Duration::from_millis(u64::from(age_ms));
            assert_eq!(pair.ended.await.unwrap(), SessionEnd::Hung { age });
        } else {
            pair.settle().await;
            assert!(pair.session.is_live(), "{age_ms} ms of {predicted_ms} predicted");
        }
    }
}

#[tokio::test]
async fn requests_beyond_what_the_engine_announced_are_refused_here() {
    let pair = Pair::open().await;
    let stopping = |stop_token_ids| Stopping { stop_token_ids, ..Stopping::default() };
    let cases = [
        ("no samples", GenerateRequest { samples: 0, ..request(1) }),
        ("too many samples", request(9)),
        ("an empty prompt", GenerateRequest { prompt_ids: Arc::from([]), ..request(1) }),
        ("a prompt id out of range", GenerateRequest { prompt_ids: Arc::from([VOCAB_SIZE]), ..request(1) }),
        ("too many alternatives", GenerateRequest { top_logprobs: Some(6), ..request(1) }),
        ("too many stop ids", GenerateRequest { stopping: stopping(vec![1; 5]), ..request(1) }),
        ("a stop id out of range", GenerateRequest { stopping: stopping(vec![VOCAB_SIZE]), ..request(1) }),
        ("too many bytes", GenerateRequest { prompt_ids: vec![1; 1 << 18].into(), ..request(1) }),
    ];
    for (what, asked) in cases {
        let error = pair.session.submit(&asked).map(drop).unwrap_err();
        assert_eq!(error.code, EngineErrorCode::InvalidArgument, "{what}: {error}");
    }
    let prompt_ids = vec![1; MAX_MODEL_LEN as usize].into();
    let error = pair.session.submit(&GenerateRequest { prompt_ids, ..request(1) }).map(drop).unwrap_err();
    assert_eq!(error.code, EngineErrorCode::ContextLength);
    assert_eq!(pair.session.load(), 0);
}

#[tokio::test]
async fn the_queue_towards_a_stalled_engine_is_bounded() {
    let pair = Pair::open().await;
    let prompt_ids: Arc<[u32]> = vec![1; 200_000].into();
    let asked = GenerateRequest { prompt_ids, ..request(1) };
    let mut waiting = Vec::new();
    let refusal = loop {
        match pair.session.submit(&asked) {
            Ok(generation) => waiting.push(generation),
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.code, EngineErrorCode::Overloaded);
    assert_eq!(waiting.len(), 64 * 1024 * 1024 / 800_016, "as many as fit 64 MiB");
}
