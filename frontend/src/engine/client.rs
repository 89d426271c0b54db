//! A connection to one engine: reach it, learn what it serves, fetch its tokenizer.
//!
//! Opens no session; that is [`super::session`]'s.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::address::EngineAddress;
use super::convert::{self, Description, MAX_MESSAGE_BYTES, TokenizerFile};
use super::proto;
use crate::config::TlsFiles;

/// The generated client over a transport.
pub(super) type EngineRpc<T> = proto::engine_service_client::EngineServiceClient<T>;

/// HTTP/2 flow control windows: one must hold the largest burst that one slow turn leaves behind.
pub(super) const STREAM_WINDOW_BYTES: u32 = 16 * 1024 * 1024;
/// The same for a whole connection.
pub(super) const CONNECTION_WINDOW_BYTES: u32 = 32 * 1024 * 1024;
const KEEPALIVE: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for one message of an engine that answers "at once, whatever the load".
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Why an engine cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// It does not answer; it may later.
    #[error("{0}")]
    Unreachable(String),
    /// It answers, and what it says cannot be worked with.
    #[error("{0}")]
    Incompatible(String),
}

/// A connection.
#[derive(Clone)]
pub struct EngineClient {
    rpc: EngineRpc<Channel>,
}

impl EngineClient {
    /// Connects.
    pub async fn connect(address: &EngineAddress, tls: Option<&TlsFiles>) -> Result<Self, ClientError> {
        let endpoint = endpoint(address, tls).await?;
        let channel = endpoint.connect().await.map_err(|error| {
            ClientError::Unreachable(format!("{address} cannot be reached: {}.", root_cause(&error)))
        })?;
        Ok(Self::over(channel))
    }

    /// Uses a channel that exists.
    pub fn over(channel: Channel) -> Self {
        let rpc = EngineRpc::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self { rpc }
    }

    /// The generated client, to open a session with.
    pub fn rpc(&self) -> &EngineRpc<Channel> {
        &self.rpc
    }

    /// What the engine serves, checked.
    pub async fn describe(&self) -> Result<Description, ClientError> {
        let response = timeout(REPLY_TIMEOUT, self.rpc.clone().describe(proto::DescribeRequest {}))
            .await
            .map_err(|_| ClientError::Unreachable("The engine does not answer Describe.".to_owned()))?
            .map_err(|status| unreachable("Describe", &status))?;
        convert::description(response.into_inner()).map_err(ClientError::Incompatible)
    }

    /// All files of the tokenizer bundle, checked by size and hash.
    pub async fn fetch_tokenizer(
        &self,
        files: &[TokenizerFile],
    ) -> Result<BTreeMap<String, Bytes>, ClientError> {
        let mut contents = BTreeMap::new();
        for file in files {
            contents.insert(file.name.clone(), self.fetch(file).await?);
        }
        Ok(contents)
    }

    async fn fetch(&self, file: &TokenizerFile) -> Result<Bytes, ClientError> {
        let request = proto::FetchTokenizerRequest { name: file.name.clone() };
        let late = |_| ClientError::Unreachable(format!("The engine does not send {} in time.", file.name));
        let failed = |status: Status| unreachable("FetchTokenizer", &status);
        let mut chunks = timeout(REPLY_TIMEOUT, self.rpc.clone().fetch_tokenizer(request))
            .await
            .map_err(late)?
            .map_err(failed)?
            .into_inner();
        let mut content = BytesMut::new();
        while let Some(message) =
            timeout(REPLY_TIMEOUT, chunks.message()).await.map_err(late)?.map_err(failed)?
        {
            content.extend_from_slice(&message.chunk);
            if content.len() as u64 > file.size_bytes {
                break;
            }
        }
        let damaged = |what: String| ClientError::Incompatible(format!("The engine's {} {what}.", file.name));
        if content.len() as u64 != file.size_bytes {
            return Err(damaged(format!("has another size than the {} bytes announced", file.size_bytes)));
        }
        if Sha256::digest(&content)[..] != file.sha256 {
            return Err(damaged("has another hash than announced".to_owned()));
        }
        Ok(content.freeze())
    }
}

async fn endpoint(address: &EngineAddress, tls: Option<&TlsFiles>) -> Result<Endpoint, ClientError> {
    let uri = match (address, tls) {
        (EngineAddress::Unix(_), _) => address.to_string(),
        (EngineAddress::Tcp { .. }, None) => format!("http://{address}"),
        (EngineAddress::Tcp { .. }, Some(_)) => format!("https://{address}"),
    };
    let malformed =
        |error: &dyn Error| ClientError::Incompatible(format!("{address} cannot be used: {error}."));
    let mut endpoint = Endpoint::from_shared(uri)
        .map_err(|error| malformed(&error))?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .tcp_nodelay(true);
    let EngineAddress::Tcp { host, .. } = address else {
        return Ok(endpoint);
    };
    endpoint = endpoint
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true);
    if let Some(files) = tls {
        let config = tls_config(files).await?.domain_name(host);
        endpoint = endpoint.tls_config(config).map_err(|error| malformed(&error))?;
    }
    Ok(endpoint)
}

/// Read at each connection, so that renewed certificates are picked up.
async fn tls_config(files: &TlsFiles) -> Result<ClientTlsConfig, ClientError> {
    let read = async |path: &std::path::Path| {
        tokio::fs::read(path)
            .await
            .map_err(|error| ClientError::Unreachable(format!("{} cannot be read: {error}.", path.display())))
    };
    let (ca, cert, key) = (read(&files.ca).await?, read(&files.cert).await?, read(&files.key).await?);
    Ok(ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(ca))
        .identity(Identity::from_pem(cert, key)))
}

fn unreachable(call: &str, status: &Status) -> ClientError {
    let cause = status_in_words(status);
    // A status of the other end has no source; a broken transport has.
    let hint = if status.source().is_some() { "; over TCP, both ends must use TLS or neither" } else { "" };
    ClientError::Unreachable(format!("The engine fails {call}: {cause}{hint}."))
}

/// What the other end said, or what broke on the way to it.
pub(super) fn status_in_words(status: &Status) -> String {
    match status.source() {
        Some(source) => root_cause(source),
        None if status.message().is_empty() => status.code().description().to_owned(),
        None => status.message().to_owned(),
    }
}

/// The innermost error says what happened; the outer ones say "transport error".
fn root_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
