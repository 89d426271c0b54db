//! Command line and environment to one validated configuration; the only place that reads either.

mod args;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use args::{ConfigError, from_process};

use crate::engine::EngineAddress;
use crate::keys::Keyring;

/// Everything the server needs to know, checked before anything is bound or started.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where HTTP is served.
    pub listen: SocketAddr,
    /// What clients call the model; `None`: the engine's name for it.
    pub served_model_name: Option<String>,
    /// Accepted bearer tokens; none: no authentication (loopback only, unless `--insecure`).
    pub keys: Arc<Keyring>,
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
    /// Connections at once; more wait in the kernel's queue.
    pub max_connections: usize,
    /// From an open connection, or the answer before, to the end of a request's head.
    pub head_timeout: Duration,
    /// For a whole request body.
    pub body_timeout: Duration,
    /// For a client to take anything of what was sent to it.
    pub send_timeout: Duration,
    /// Prompt tokens that may wait for their request's first token, all requests together.
    pub max_queued_tokens: u64,
    /// How long a request may have to wait for its first token, as far as can be predicted.
    pub max_queue_wait: Duration,
    /// Bytes of an answer that may wait for its client.
    pub max_unread_bytes: usize,
    /// How long a request that has shown nothing yet may wait for a lost engine to come back.
    pub replay_wait: Duration,
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
            max_connections: 32_768,
            head_timeout: Duration::from_mins(2),
            body_timeout: Duration::from_mins(1),
            send_timeout: Duration::from_mins(1),
            max_queued_tokens: 4 * 1024 * 1024,
            max_queue_wait: Duration::from_mins(2),
            max_unread_bytes: 4 * 1024 * 1024,
            replay_wait: Duration::from_mins(1),
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
