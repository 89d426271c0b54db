//! Engine processes for tests: shell scripts that report over a pipe what happens to them, and
//! that answer at their socket through a scripted engine in the test's own process.

use std::path::PathBuf;

use rung_frontend::engine::EngineAddress;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::unix::pipe;

use crate::mock_engine::MockEngine;

/// The reading end of a pipe that engine processes write lines to. Whatever they start inherits
/// the writing end, so the pipe ends when the last of them has.
pub(crate) struct Reports {
    lines: Lines<BufReader<pipe::Receiver>>,
    /// Keeps the pipe open until the first process has it.
    opener: Option<pipe::Sender>,
    path: PathBuf,
    _directory: TempDir,
}

impl Reports {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("reports");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let receiver = pipe::OpenOptions::new().open_receiver(&path).unwrap();
        let opener = Some(pipe::OpenOptions::new().open_sender(&path).unwrap());
        Self { lines: BufReader::new(receiver).lines(), opener, path, _directory: directory }
    }

    /// A command that runs a shell script with file descriptor 3 on the pipe and $socket the path
    /// that it was told to listen at. The script first reports "start" and its process number.
    pub(crate) fn command(&self, script: &str) -> Vec<String> {
        let head =
            format!(r#"exec 3>"{}"; socket="${{2#unix:}}"; echo "start $$" >&3; "#, self.path.display());
        ["sh", "-c", &(head + script), "engine"].map(str::to_owned).to_vec()
    }

    pub(crate) async fn next(&mut self) -> String {
        self.lines.next_line().await.unwrap().unwrap()
    }

    /// The process number of the next process that starts.
    pub(crate) async fn started(&mut self) -> i32 {
        let line = self.next().await;
        line.strip_prefix("start ")
            .unwrap_or_else(|| panic!("expected a start, got {line:?}"))
            .parse()
            .unwrap()
    }

    /// Waits until every process has ended, and returns what else they reported.
    pub(crate) async fn ended(&mut self) -> Vec<String> {
        self.opener = None;
        let mut rest = Vec::new();
        while let Some(line) = self.lines.next_line().await.unwrap() {
            rest.push(line);
        }
        rest
    }
}

/// The part of a script that makes `engine` answer at the script's socket.
pub(crate) fn answer_as(engine: &MockEngine) -> String {
    let EngineAddress::Unix(path) = &engine.address else { unreachable!("it listens on a Unix socket") };
    format!(r#"ln -s "{}" "$socket"; "#, path.display())
}

/// The part of a script that lives until standard input closes, as a real engine does.
pub(crate) const LIVE: &str = "exec cat > /dev/null";
