//! The engine's process: started in a group of its own, ended with everything it started.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;

/// How long an engine may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A running engine process. Dropping it kills its whole group.
pub(super) struct EngineChild {
    child: Child,
    /// Also the group's number: the child leads it, so Ctrl-C in a terminal does not reach it.
    pid: Pid,
    /// The child's end of this pipe closes when we die, however we die; the child ends then.
    _lifeline: Option<ChildStdin>,
}

impl EngineChild {
    pub(super) fn spawn(command: &[String], socket: &str) -> io::Result<Self> {
        let (program, arguments) = command
            .split_first()
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the command is empty"))?;
        let mut child = Command::new(program)
            .args(arguments)
            .args(["--listen", socket])
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.ok_or_else(|| io::Error::other("the process ended before it had a number"))?;
        Ok(Self { pid, _lifeline: child.stdin.take(), child })
    }

    pub(super) fn id(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits for the end of the process. What it started may live on until `kill`. Cancel-safe.
    pub(super) async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Asks the process to end, insists after a while, and leaves nothing of its group.
    pub(super) async fn stop(mut self) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(self.pid, Signal::TERM);
        if timeout(STOP_TIMEOUT, self.child.wait()).await.is_err() {
            tracing::warn!(
                pid = self.id(),
                "the engine did not end within {} s of SIGTERM; killing it",
                STOP_TIMEOUT.as_secs()
            );
        }
        self.kill().await;
    }

    /// Ends the whole group at once.
    pub(super) async fn kill(mut self) {
        self.kill_group();
        let _ = self.child.wait().await;
    }

    fn kill_group(&self) {
        // No such group: everything has ended already.
        let _ = kill_process_group(self.pid, Signal::KILL);
    }
}

impl Drop for EngineChild {
    fn drop(&mut self) {
        self.kill_group();
    }
}
