//! The server binary: parse, then serve.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use rung_frontend::config::{self, Config, ConfigError, LogFormat, Logging};
use rung_frontend::serve::serve;
use tracing_subscriber::EnvFilter;

/// For work that a second signal interrupts.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
const EXIT_WRONG_SETTINGS: u8 = 64;
const EXIT_SYSTEM: u8 = 71;

fn main() -> ExitCode {
    match config::from_process() {
        Ok((config, logging)) => {
            start_logging(&logging);
            ExitCode::from(run(config))
        }
        Err(ConfigError::Information(text)) => {
            io::stdout().write_all(text.as_bytes()).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
        }
        Err(ConfigError::Wrong(message)) => {
            eprintln!("rung-frontend: {message}");
            ExitCode::from(EXIT_WRONG_SETTINGS)
        }
    }
}

fn run(config: Config) -> u8 {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("rung-frontend: The server's threads cannot be started: {error}.");
            return EXIT_SYSTEM;
        }
    };
    let outcome = runtime.block_on(serve(config));
    // Drops every task; the engine's process group ends with its task.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome.unwrap_or_else(|error| {
        if error.is_news() {
            eprintln!("rung-frontend: {error}");
        }
        error.exit_status()
    })
}

fn start_logging(logging: &Logging) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&logging.filter))
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr);
    match logging.format {
        LogFormat::Human => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}
