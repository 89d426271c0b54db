//! Starts the engine on this machine as a child, watches it, and starts it again when it is lost.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::address::{EngineAddress, MAX_SOCKET_PATH_BYTES};
use super::backoff::Backoff;
use super::child::EngineChild;
use super::client::{ClientError, EngineClient};
use super::pool::EnginePool;
use super::session::SessionEnd;

/// Between attempts to reach an engine that is loading.
const CONNECT_INTERVAL: Duration = Duration::from_millis(50);
/// For the last words of a session whose process has ended.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// The exit status of a program that was given wrong settings, and that has said so.
const EXIT_WRONG_SETTINGS: i32 = 64;

/// Why the engine never became ready.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// It has told the user itself what is wrong with the settings.
    #[error("the engine refused its settings")]
    WrongSettings,
    /// Anything else, in one sentence.
    #[error("{0}")]
    Failed(String),
}

/// Keeps one engine process alive.
pub struct Supervisor<'a> {
    command: &'a [String],
    pool: &'a EnginePool,
    slot: usize,
    directory: TempDir,
    /// Counts starts: each has a socket of its own, so that none meets the remains of another.
    starts: u64,
}

/// How one engine process ended, seen from here.
enum Life {
    NeverReady(StartError),
    Lost { end: SessionEnd, ready_since: Instant },
}

impl<'a> Supervisor<'a> {
    /// Prepares a private directory for the socket.
    pub fn new(command: &'a [String], pool: &'a EnginePool, slot: usize) -> Result<Self, StartError> {
        let directory = private_directory().map_err(StartError::Failed)?;
        Ok(Self { command, pool, slot, directory, starts: 0 })
    }

    /// Runs the engine until `stop`, then ends it. Fails only if the first start does.
    pub async fn run(mut self, stop: CancellationToken) -> Result<(), StartError> {
        let mut backoff = Backoff::new();
        let mut was_ready = false;
        loop {
            let mut working_since = None;
            match self.live(&stop).await {
                None => return Ok(()),
                Some(Life::NeverReady(error)) if !was_ready => return Err(error),
                Some(Life::NeverReady(error)) => {
                    tracing::error!("the engine does not come back: {error}");
                }
                Some(Life::Lost { end, ready_since }) => {
                    tracing::error!("lost the engine: {end}");
                    working_since = Some(ready_since);
                    was_ready = true;
                }
            }
            let delay = backoff.after(working_since);
            tracing::info!("starting the engine again in {} ms", delay.as_millis());
            tokio::select! {
                () = sleep(delay) => {}
                () = stop.cancelled() => return Ok(()),
            }
            self.pool.metrics(self.slot).restarted();
        }
    }

    /// One process from start to end; `None` when it was ended because of `stop`.
    async fn live(&mut self, stop: &CancellationToken) -> Option<Life> {
        self.starts += 1;
        let socket = self.directory.path().join(format!("engine-{}.sock", self.starts));
        let address = EngineAddress::Unix(socket);
        let mut child = match EngineChild::spawn(self.command, &address.to_string()) {
            Ok(child) => child,
            Err(error) => {
                let program = self.command.first().map_or("", String::as_str);
                return Some(Life::NeverReady(StartError::Failed(format!(
                    "The engine {program:?} cannot be started: {error}."
                ))));
            }
        };
        tracing::info!(pid = child.id(), "started the engine");
        let life = tokio::select! {
            life = self.watch(&mut child, &address) => Some(life),
            () = stop.cancelled() => None,
        };
        if life.is_some() {
            child.kill().await;
        } else {
            child.stop().await;
        }
        life
    }

    async fn watch(&self, child: &mut EngineChild, address: &EngineAddress) -> Life {
        let attached = tokio::select! {
            attached = self.attach(address) => attached,
            status = child.wait() => return Life::NeverReady(early_exit(status)),
        };
        let attached = match attached {
            Ok(attached) => attached,
            Err(error) => return Life::NeverReady(error),
        };
        let ready_since = Instant::now();
        let exited = async {
            let status = child.wait().await;
            sleep(LAST_WORDS).await;
            SessionEnd::Exited(in_words(status))
        };
        Life::Lost { end: attached.run(exited).await, ready_since }
    }

    /// Tries until the engine is ready. Loading takes as long as it takes: the caller watches the
    /// process meanwhile.
    async fn attach(&self, address: &EngineAddress) -> Result<super::pool::Attached<'a>, StartError> {
        loop {
            let attempt =
                async { self.pool.attach(self.slot, &EngineClient::connect(address, None).await?).await };
            match attempt.await {
                Ok(attached) => return Ok(attached),
                Err(ClientError::Incompatible(reason)) => return Err(StartError::Failed(reason)),
                Err(ClientError::Unreachable(reason)) => {
                    tracing::trace!("the engine is not ready: {reason}");
                    sleep(CONNECT_INTERVAL).await;
                }
            }
        }
    }
}

fn early_exit(status: std::io::Result<ExitStatus>) -> StartError {
    if status.as_ref().is_ok_and(|status| status.code() == Some(EXIT_WRONG_SETTINGS)) {
        return StartError::WrongSettings;
    }
    StartError::Failed(format!(
        "The engine ended before it was ready ({}); see its messages above.",
        in_words(status)
    ))
}

fn in_words(status: std::io::Result<ExitStatus>) -> String {
    status.map_or_else(|error| format!("it cannot be waited for: {error}"), |status| status.to_string())
}

/// Readable by this user alone, with room for a socket's name.
fn private_directory() -> Result<TempDir, String> {
    const ROOM_FOR_NAME: usize = "/engine-18446744073709551615.sock".len();
    let make = |parent: &Path| {
        tempfile::Builder::new()
            .prefix("rung-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .map_err(|error| {
                format!(
                    "A directory for the engine's socket cannot be made in {}: {error}.",
                    parent.display()
                )
            })
    };
    let directory = make(&std::env::temp_dir())?;
    if directory.path().as_os_str().len() + ROOM_FOR_NAME < MAX_SOCKET_PATH_BYTES {
        return Ok(directory);
    }
    make(Path::new("/tmp"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_private_and_its_path_short() {
        let directory = private_directory().unwrap();
        let mode = directory.path().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        assert!(
            directory.path().join("engine-18446744073709551615.sock").as_os_str().len()
                < MAX_SOCKET_PATH_BYTES
        );
    }
}
