//! Command line and environment to one validated configuration; the only place that reads either.

use std::net::SocketAddr;
use std::time::Duration;

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
    /// Engines that run elsewhere, such as `unix:/run/rung/engine.sock` or `host:port`.
    Connect {
        /// One or more addresses.
        addresses: Vec<String>,
        /// Certificates for TCP; `None` needs `--insecure`.
        tls: Option<TlsFiles>,
    },
}

/// PEM files of mutual TLS towards engines.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Authority that signed the engine's certificate.
    pub ca: std::path::PathBuf,
    /// Our certificate.
    pub cert: std::path::PathBuf,
    /// Its key.
    pub key: std::path::PathBuf,
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
