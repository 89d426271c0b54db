//! The life of an engine process: early ends, crashes, hangs, orderly and forced stops.

use std::sync::Arc;

use rung_frontend::engine::types::{EngineErrorCode, EngineFinish, GenerateRequest};
use rung_frontend::engine::{Engine, EnginePool, StartError, Supervisor};
use rung_frontend::metrics::{EngineHost, Metrics};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::child::{LIVE, Reports, answer_as};
use crate::mock_engine::{MockEngine, Script};

/// A supervisor at work.
struct Supervised {
    pool: Arc<EnginePool>,
    metrics: Metrics,
    stop: CancellationToken,
    run: JoinHandle<Result<(), StartError>>,
}

impl Supervised {
    fn start(command: Vec<String>) -> Self {
        let metrics = Metrics::default();
        let engines = [("local".to_owned(), EngineHost::This)];
        let pool = Arc::new(EnginePool::new(&engines, None, &metrics));
        let stop = CancellationToken::new();
        let run = tokio::spawn({
            let (pool, stop) = (Arc::clone(&pool), stop.clone());
            async move { Supervisor::new(&command, &pool, 0)?.run(stop).await }
        });
        Self { pool, metrics, stop, run }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.run.await.unwrap().unwrap();
    }

    fn has_metric(&self, line: &str) -> bool {
        self.metrics.render("").lines().any(|present| present == line)
    }
}

fn request() -> GenerateRequest {
    GenerateRequest { prompt_ids: Arc::from([1]), samples: 1, ..GenerateRequest::default() }
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

async fn start_error(command: Vec<String>) -> StartError {
    Supervised::start(command).run.await.unwrap().unwrap_err()
}

#[tokio::test]
async fn an_engine_that_refuses_its_settings_has_said_why() {
    let reports = Reports::new();
    assert_eq!(start_error(reports.command("exit 64")).await, StartError::WrongSettings);
}

#[tokio::test]
async fn an_engine_that_ends_before_it_is_ready_is_named_with_its_status() {
    let reports = Reports::new();
    for (script, status) in [("exit 3", "exit status: 3"), ("kill -9 $$", "signal: 9")] {
        let StartError::Failed(message) = start_error(reports.command(script)).await else {
            panic!("{script}")
        };
        assert!(message.contains(status), "{message}");
    }
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_named() {
    let StartError::Failed(message) = start_error(vec!["/no/such/engine".to_owned()]).await else { panic!() };
    assert!(message.contains("/no/such/engine"), "{message}");
}

#[tokio::test]
async fn an_engine_of_another_protocol_is_ended_with_a_clear_sentence() {
    let mut script = Script::default();
    script.describe.protocol = 9;
    let engine = MockEngine::start(script);
    let mut reports = Reports::new();
    let command = reports.command(&(answer_as(&engine) + LIVE));
    let StartError::Failed(message) = start_error(command).await else { panic!() };
    assert!(message.contains("protocol 9"), "{message}");
    reports.ended().await;
}

#[tokio::test]
async fn a_killed_engine_fails_its_requests_and_is_started_again() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let supervised = Supervised::start(reports.command(&(answer_as(&engine) + LIVE)));
    let first = reports.started().await;
    supervised.pool.ready().await;
    let mut generation = supervised.pool.submit(request()).unwrap();
    let _session = engine.session().await;
    kill(first);
    let news = generation.next().await.unwrap();
    assert!(
        matches!(&news[0].1.finish, Some(EngineFinish::Error(error)) if error.code == EngineErrorCode::Lost),
        "{news:?}"
    );
    assert!(supervised.pool.model().is_none());
    assert!(supervised.has_metric(r#"rung_engine_up{engine="local"} 0"#));
    let second = reports.started().await;
    assert_ne!(first, second);
    supervised.pool.ready().await;
    assert!(supervised.has_metric(r#"rung_engine_restarts_total{engine="local"} 1"#));
    supervised.stop().await;
    reports.ended().await;
}

#[tokio::test]
async fn a_hung_engine_is_killed_with_all_that_it_started() {
    let mut engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    // Ignores SIGTERM, and a helper of it would live on.
    let script = format!("trap '' TERM; sleep 100 & {}wait; cat", answer_as(&engine));
    let supervised = Supervised::start(reports.command(&script));
    reports.started().await;
    supervised.pool.ready().await;
    engine.session().await.step(|step| step.step_age_ms = 10_001).await;
    reports.started().await;
    supervised.pool.ready().await;
    supervised.run.abort();
    assert!(supervised.run.await.unwrap_err().is_cancelled());
    // Both processes and both helpers held the pipe.
    reports.ended().await;
}

#[tokio::test]
async fn an_engine_that_does_not_come_back_is_tried_again() {
    let engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let once = tempfile::tempdir().unwrap();
    let script =
        format!("mkdir {}/once 2>/dev/null || exit 64; {}{LIVE}", once.path().display(), answer_as(&engine));
    let supervised = Supervised::start(reports.command(&script));
    let first = reports.started().await;
    supervised.pool.ready().await;
    kill(first);
    for _ in 0..2 {
        reports.started().await;
    }
    assert!(!supervised.run.is_finished());
    supervised.stop().await;
}

#[tokio::test]
async fn a_stop_asks_politely_first() {
    let engine = MockEngine::start(Script::default());
    let mut reports = Reports::new();
    let script =
        format!("trap 'echo asked >&3; exit' TERM; {}while :; do read line; done", answer_as(&engine));
    let supervised = Supervised::start(reports.command(&script));
    reports.started().await;
    supervised.pool.ready().await;
    supervised.stop().await;
    assert_eq!(reports.ended().await, ["asked"]);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_ignores_sigterm_is_killed_in_the_end() {
    let mut reports = Reports::new();
    // Loading: it never answers.
    let supervised = Supervised::start(reports.command("trap '' TERM; sleep 100 & echo deaf >&3; wait; cat"));
    reports.started().await;
    assert_eq!(reports.next().await, "deaf");
    supervised.stop().await;
    reports.ended().await;
}
