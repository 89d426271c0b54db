//! Command line and environment to one validated configuration; the only place that reads either.

mod args;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use args::{ConfigError, from_process};

use crate::engine::EngineAddress;

/// Everything the server needs to know, checked before anything is bound or started.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where HTTP is served.
    pub listen: SocketAddr,
    /// What clients call the model; `None`: the engine's name for it.
    pub served_model_name: Option<String>,
    /// Accepted bearer tokens; empty: no authentication (loopback only, unless `--insecure`).
    pub api_keys: Vec<String>,
    /// Where engines come from.
    pub engine: EngineSource,
    /// How long streams may go on after SIGTERM or the first Ctrl-C.
    pub drain_timeout: Duration,
    /// Limits on requests.
    pub limits: Limits,
}

/// Where engines come from.
#[derive(Debug, Clone)]
pub enum EngineSource {
    /// Start this command as a child and speak to it over a Unix socket.
    Spawn {
        /// Program and arguments; the socket address is appended.
        command: Vec<String>,
    },
    /// Engines that run elsewhere.
    Connect {
        /// One or more addresses.
        addresses: Vec<EngineAddress>,
        /// Certificates for TCP; `None` needs `--insecure`.
        tls: Option<TlsFiles>,
    },
}

/// PEM files of mutual TLS towards engines.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Authority that signed the engine's certificate.
    pub ca: PathBuf,
    /// Our certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Limits on requests; each is named in the error of the request that exceeds it.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a request body.
    pub max_body_bytes: usize,
    /// Requests being served or waiting at once; more get 429.
    pub max_inflight_requests: usize,
    /// Answers per request (`n`).
    pub max_samples: u32,
    /// Stop strings per request.
    pub max_stop_strings: usize,
    /// Bytes of one stop string.
    pub max_stop_bytes: usize,
    /// Prompts in one completion request.
    pub max_prompts: usize,
    /// Silence on a stream before a comment is sent.
    pub sse_keepalive: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 32 * 1024 * 1024,
            max_inflight_requests: 1024,
            max_samples: 16,
            max_stop_strings: 16,
            max_stop_bytes: 1024,
            max_prompts: 128,
            sse_keepalive: Duration::from_secs(15),
        }
    }
}

/// How messages about the server itself are written to stderr.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logging {
    /// Their form.
    pub format: LogFormat,
    /// Which are written, in the syntax of `tracing` directives, such as `info` or
    /// `warn,rung_frontend=debug`.
    pub filter: String,
}

/// The form of log messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}
