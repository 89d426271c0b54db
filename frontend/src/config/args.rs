//! The command line, and what it must satisfy. Reads the files that it names, binds nothing.

use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use super::{Config, EngineSource, Limits, LogFormat, Logging, TlsFiles};
use crate::engine::EngineAddress;
use crate::keys::Keyring;

const LOG_VARIABLE: &str = "RUNG_LOG";
const DEFAULT_LOG_FILTER: &str = "warn,rung_frontend=info";
/// Seconds that a duration option may ask for: a week.
const MAX_SECONDS: f64 = 7.0 * 24.0 * 3600.0;

/// What the command line came to instead of a configuration.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// `--help` or `--version`: the text to print on stdout.
    #[error("{0}")]
    Information(String),
    /// A setting is wrong: what it is and what would be right.
    #[error("{0}")]
    Wrong(String),
}

/// Serves a model over HTTP: an OpenAI-compatible API in front of Rung engines.
#[derive(Debug, Parser)]
#[command(name = "rung-frontend", version, about, max_term_width = 100, allow_negative_numbers = true)]
struct Args {
    /// Address to serve on: an IP address or "localhost"
    #[arg(long, default_value = "127.0.0.1", value_parser = parse_host)]
    host: IpAddr,
    /// Port to serve on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// What clients call the model; by default, the engine's name for it
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// File of accepted API keys, one a line; empty lines and lines that begin with # are skipped
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Allow serving other machines without API keys, and TCP engines without TLS
    #[arg(long)]
    insecure: bool,
    /// How long open requests may go on after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    drain_timeout: Duration,
    /// Requests served at once; more are answered with status 429
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_inflight_requests, value_parser = parse_count)]
    max_inflight_requests: usize,
    /// Bytes of one request body
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_body_bytes, value_parser = parse_count)]
    max_body_bytes: usize,
    /// Connections at once; more wait
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_connections, value_parser = parse_count)]
    max_connections: usize,
    /// For the head of a request, from an open connection or the answer before it
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = parse_positive_seconds)]
    head_timeout: Duration,
    /// For a whole request body
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_positive_seconds)]
    body_timeout: Duration,
    /// For a client to take anything of what was sent to it
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_positive_seconds)]
    send_timeout: Duration,
    /// Prompt tokens that may wait for a first token; more are answered with status 429
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_queued_tokens as usize, value_parser = parse_count)]
    max_queued_tokens: usize,
    /// Longest predicted wait for a first token; requests that would wait longer get status 429
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = parse_positive_seconds)]
    max_queue_wait: Duration,
    /// Bytes of an answer that may wait for its client; a slower client is cut off
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_unread_bytes, value_parser = parse_count)]
    max_unread_bytes: usize,
    /// How long a request that has shown nothing yet waits for a lost engine; 0 never waits
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    replay_wait: Duration,
    /// Answers to one prompt
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_samples as usize, value_parser = parse_count)]
    max_samples: usize,
    /// Stop strings of one request
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_stop_strings, value_parser = parse_count)]
    max_stop_strings: usize,
    /// Bytes of one stop string
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_stop_bytes, value_parser = parse_count)]
    max_stop_bytes: usize,
    /// Prompts of one completion request
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_prompts, value_parser = parse_count)]
    max_prompts: usize,
    /// Silence on a stream before a comment is sent to keep the connection open
    #[arg(long, value_name = "SECONDS", default_value = "15", value_parser = parse_positive_seconds)]
    sse_keepalive: Duration,
    /// Form of the messages on stderr
    #[arg(long, value_name = "FORMAT", default_value = "human")]
    log_format: LogFormat,
    /// Engine that runs already, as unix:PATH or HOST:PORT; may be repeated
    #[arg(long, value_name = "ADDRESS")]
    engine: Vec<EngineAddress>,
    /// PEM file of the authority that signed the engines' certificates
    #[arg(long, value_name = "FILE")]
    engine_tls_ca: Option<PathBuf>,
    /// PEM file of the certificate to show to engines
    #[arg(long, value_name = "FILE")]
    engine_tls_cert: Option<PathBuf>,
    /// PEM file of that certificate's key
    #[arg(long, value_name = "FILE")]
    engine_tls_key: Option<PathBuf>,
    /// Command that starts an engine on this machine; "--listen unix:PATH" is appended to it
    #[arg(last = true, value_name = "ENGINE COMMAND")]
    command: Vec<String>,
}

/// The configuration that this process was started with.
pub fn from_process() -> Result<(Config, Logging), ConfigError> {
    parse(std::env::args_os(), |name| std::env::var(name).ok())
}

/// The configuration that the arguments (the first is the program) and the environment ask for.
fn parse(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl Fn(&str) -> Option<String>,
) -> Result<(Config, Logging), ConfigError> {
    let args = Args::try_parse_from(arguments).map_err(|error| {
        let text = error.render().to_string();
        if error.use_stderr() {
            ConfigError::Wrong(text.trim_end().to_owned())
        } else {
            ConfigError::Information(text)
        }
    })?;
    validate(args, environment(LOG_VARIABLE)).map_err(ConfigError::Wrong)
}

fn validate(args: Args, log_filter: Option<String>) -> Result<(Config, Logging), String> {
    if args.served_model_name.as_deref().is_some_and(|name| name.trim().is_empty()) {
        return Err(
            "--served-model-name must not be empty; leave it out to use the engine's name.".to_owned()
        );
    }
    let keys = args.api_key_file.as_deref().map(Keyring::from_file).transpose()?;
    let keys = keys.unwrap_or_else(|| Keyring::fixed::<&str>(&[]));
    if !args.host.is_loopback() && keys.is_open() && !args.insecure {
        return Err(format!(
            "Serving on {} would let other machines use the model without a key; give --api-key-file FILE, or \
             --insecure to allow it, or --host 127.0.0.1.",
            args.host
        ));
    }
    let filter = log_filter.filter(|filter| !filter.is_empty()).unwrap_or(DEFAULT_LOG_FILTER.to_owned());
    EnvFilter::try_new(&filter).map_err(|error| {
        format!("{LOG_VARIABLE}={filter:?} is no log filter ({error}); use a level such as info, or \"warn,rung_frontend=debug\".")
    })?;
    let config = Config {
        listen: SocketAddr::new(args.host, args.port),
        served_model_name: args.served_model_name.clone(),
        keys: Arc::new(keys),
        drain_timeout: args.drain_timeout,
        limits: Limits {
            max_body_bytes: args.max_body_bytes,
            max_inflight_requests: args.max_inflight_requests,
            sse_keepalive: args.sse_keepalive,
            max_connections: args.max_connections,
            head_timeout: args.head_timeout,
            body_timeout: args.body_timeout,
            send_timeout: args.send_timeout,
            max_queued_tokens: args.max_queued_tokens as u64,
            max_queue_wait: args.max_queue_wait,
            max_unread_bytes: args.max_unread_bytes,
            replay_wait: args.replay_wait,
            max_samples: args.max_samples as u32,
            max_stop_strings: args.max_stop_strings,
            max_stop_bytes: args.max_stop_bytes,
            max_prompts: args.max_prompts,
        },
        engine: engine_source(&args)?,
    };
    Ok((config, Logging { format: args.log_format, filter }))
}

fn engine_source(args: &Args) -> Result<EngineSource, String> {
    let tls = tls_files(args)?;
    match (args.engine.as_slice(), args.command.as_slice()) {
        ([], []) => {
            Err("There is no engine to use: give --engine ADDRESS for one that runs already, or end the \
                         command with -- and the command that starts one."
                .to_owned())
        }
        ([], command) if tls.is_none() => Ok(EngineSource::Spawn { command: command.to_vec() }),
        ([], _) => Err(
            "--engine-tls-* is for engines reached by --engine HOST:PORT; an engine started here needs none."
                .to_owned(),
        ),
        (addresses, []) => {
            let open = addresses.iter().find(|address| address.is_tcp());
            if let (Some(address), None, false) = (open, &tls, args.insecure) {
                return Err(format!(
                    "The engine {address} is reached over TCP, where others could read along or take its place; give \
                     --engine-tls-ca, --engine-tls-cert and --engine-tls-key, or --insecure to allow it."
                ));
            }
            if let Some(twice) =
                (1..addresses.len()).find(|index| addresses[..*index].contains(&addresses[*index]))
            {
                return Err(format!("--engine {} is given twice; name each engine once.", addresses[twice]));
            }
            Ok(EngineSource::Connect { addresses: addresses.to_vec(), tls })
        }
        _ => Err("Give either --engine ADDRESS or an engine command after --, not both.".to_owned()),
    }
}

fn tls_files(args: &Args) -> Result<Option<TlsFiles>, String> {
    match (&args.engine_tls_ca, &args.engine_tls_cert, &args.engine_tls_key) {
        (None, None, None) => Ok(None),
        (Some(ca), Some(cert), Some(key)) => {
            for path in [ca, cert, key] {
                read(path)?;
            }
            Ok(Some(TlsFiles { ca: ca.clone(), cert: cert.clone(), key: key.clone() }))
        }
        _ => Err("TLS towards engines needs all of --engine-tls-ca, --engine-tls-cert and --engine-tls-key."
            .to_owned()),
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| {
        format!(
            "The file {} cannot be read ({error}); name a text file that this user may read.",
            path.display()
        )
    })
}

fn parse_host(text: &str) -> Result<IpAddr, String> {
    if text == "localhost" {
        return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse()
        .map_err(|_| "give an IP address such as 127.0.0.1, 0.0.0.0 or ::1, or \"localhost\"".to_owned())
}

fn parse_count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or("give a whole number of at least 1".to_owned())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=MAX_SECONDS).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or(format!("give a number of seconds from 0 to {MAX_SECONDS}"))
}

fn parse_positive_seconds(text: &str) -> Result<Duration, String> {
    parse_seconds(text).and_then(|duration| {
        if duration >= Duration::from_millis(1) {
            Ok(duration)
        } else {
            Err("give at least 0.001 seconds".to_owned())
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn parse_line(line: &str) -> Result<(Config, Logging), ConfigError> {
        let arguments = line.split_whitespace().map(OsString::from);
        parse([OsString::from("rung-frontend")].into_iter().chain(arguments), |_| None)
    }

    fn wrong(line: &str) -> String {
        match parse_line(line) {
            Err(ConfigError::Wrong(message)) => message,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn file(content: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content.as_bytes()).unwrap();
        file
    }

    #[test]
    fn a_command_after_two_dashes_is_taken_as_it_is() {
        let (config, logging) =
            parse_line("--port 0 --drain-timeout 0.2 -- python -m rung --port 9 -- x").unwrap();
        let EngineSource::Spawn { command } = config.engine else { panic!("{:?}", config.engine) };
        assert_eq!(command, ["python", "-m", "rung", "--port", "9", "--", "x"]);
        assert_eq!(config.listen, SocketAddr::from(([127, 0, 0, 1], 0)));
        assert_eq!(config.drain_timeout, Duration::from_millis(200));
        assert_eq!(logging, Logging { format: LogFormat::Human, filter: DEFAULT_LOG_FILTER.to_owned() });
    }

    #[test]
    fn engines_elsewhere_need_tls_on_tcp() {
        let pem = file("pem");
        let pem = pem.path().display();
        assert!(parse_line("--engine unix:/run/a.sock --engine unix:/run/b.sock").is_ok());
        assert!(wrong("--engine a:1").contains("--engine-tls-ca"));
        assert!(parse_line("--engine a:1 --insecure").is_ok());
        assert!(wrong(&format!("--engine a:1 --engine-tls-ca {pem}")).contains("all of"));
        let all = format!("--engine-tls-ca {pem} --engine-tls-cert {pem} --engine-tls-key {pem}");
        assert!(parse_line(&format!("--engine a:1 {all}")).is_ok());
        assert!(wrong(&format!("{all} -- python")).contains("needs none"));
    }

    #[test]
    fn wrong_settings_are_refused_with_what_would_be_right() {
        let cases = [
            ("", "--engine ADDRESS"),
            ("--engine unix:/a -- python", "not both"),
            ("--engine unix:/a --engine unix:/a", "twice"),
            ("--engine nonsense", "HOST:PORT"),
            ("--host 0.0.0.0 -- x", "--insecure"),
            ("--host nowhere -- x", "localhost"),
            ("--port 70000 -- x", "65535"),
            ("--drain-timeout -1 -- x", "drain-timeout"),
            ("--drain-timeout nan -- x", "seconds"),
            ("--sse-keepalive 0 -- x", "0.001"),
            ("--max-body-bytes 0 -- x", "at least 1"),
            ("--max-inflight-requests many -- x", "whole number"),
            ("--api-key-file /nonexistent -- x", "/nonexistent"),
            ("--log-format xml -- x", "human"),
            ("--no-such-option -- x", "no-such-option"),
            ("--served-model-name= -- x", "must not be empty"),
        ];
        for (line, hint) in cases {
            let message = wrong(line);
            assert!(message.contains(hint), "{line:?} gives {message:?}");
        }
    }

    #[test]
    fn keys_come_from_a_file_that_has_some() {
        let keys = file("# team a\nkey-1\n\n  key-2  \n");
        let (config, _) =
            parse_line(&format!("--host :: --api-key-file {} -- x", keys.path().display())).unwrap();
        assert!(config.keys.identify(b"key-2").is_some());
        for (content, hint) in [("# none\n", "holds no key"), ("good\nbad key\n", "Key 2")] {
            let keys = file(content);
            let message = wrong(&format!("--api-key-file {} -- x", keys.path().display()));
            assert!(message.contains(hint) && !message.contains("bad key"), "{message}");
        }
    }

    #[test]
    fn the_log_filter_comes_from_the_environment() {
        let arguments = || ["rung-frontend", "--", "x"].map(OsString::from);
        let with = |value: &'static str| {
            parse(arguments(), move |name| (name == "RUNG_LOG").then(|| value.to_owned()))
        };
        assert_eq!(with("debug").unwrap().1.filter, "debug");
        assert_eq!(with("").unwrap().1.filter, DEFAULT_LOG_FILTER);
        assert!(matches!(with("a=b=c"), Err(ConfigError::Wrong(message)) if message.contains("RUNG_LOG")));
    }

    #[test]
    fn help_and_version_are_no_errors() {
        let version = parse_line("--version").unwrap_err();
        assert_eq!(
            version,
            ConfigError::Information(format!("rung-frontend {}\n", env!("CARGO_PKG_VERSION")))
        );
        assert!(
            matches!(parse_line("--help"), Err(ConfigError::Information(help)) if help.contains("--drain-timeout"))
        );
    }
}
