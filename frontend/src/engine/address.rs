//! Where an engine listens: `unix:PATH` or `HOST:PORT`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The longest Unix socket path that every platform takes, with its final zero.
pub(super) const MAX_SOCKET_PATH_BYTES: usize = 100;

/// An engine's address, checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EngineAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port of a host name or IP address.
    Tcp {
        /// Name or address; an IPv6 address without brackets.
        host: String,
        /// Its port.
        port: u16,
    },
}

impl EngineAddress {
    /// Whether frames may cross a network.
    pub fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp { .. })
    }
}

impl FromStr for EngineAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') {
                return Err(format!(
                    "The engine address {text:?} needs an absolute path, such as unix:/run/rung/engine.sock."
                ));
            }
            if path.len() >= MAX_SOCKET_PATH_BYTES {
                return Err(format!(
                    "The socket path in {text:?} has {} bytes, but fewer than {MAX_SOCKET_PATH_BYTES} are possible; \
                     choose a shorter one.",
                    path.len()
                ));
            }
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let malformed = || {
            format!("The engine address {text:?} is neither unix:PATH nor HOST:PORT, such as engine-0:8100.")
        };
        let (host, port) = text.rsplit_once(':').ok_or_else(malformed)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let plain = !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
        let port: u16 = port.parse().ok().filter(|port| *port > 0).ok_or_else(malformed)?;
        match bare {
            Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => {
                Ok(Self::Tcp { host: v6.to_owned(), port })
            }
            None if plain => Ok(Self::Tcp { host: host.to_owned(), port }),
            _ => Err(malformed()),
        }
    }
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_a_round_trip() {
        for text in ["unix:/run/engine.sock", "engine-0.rung:8100", "127.0.0.1:1", "[::1]:65535"] {
            assert_eq!(text.parse::<EngineAddress>().map(|address| address.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("unix:///run/a".parse(), Ok(EngineAddress::Unix(PathBuf::from("/run/a"))));
    }

    #[test]
    fn wrong_addresses_are_refused_in_words() {
        let long = format!("unix:/{}", "x".repeat(100));
        for text in [
            "",
            "engine",
            "engine:",
            "engine:0",
            "engine:65536",
            ":80",
            "::1:80",
            "http://a:80",
            "unix:a",
            &long,
        ] {
            let error = text.parse::<EngineAddress>().unwrap_err();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
