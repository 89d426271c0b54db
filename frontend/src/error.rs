//! Every error a client can get, and the one table that says how: HTTP status, OpenAI type and
//! code, when to retry. The same body serves as a JSON answer and as an SSE event.

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::engine::types::{EngineError, EngineErrorCode};
use crate::queue::QueueFull;

/// An error as one sentence for the client, with what the table needs beside it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The request is malformed or out of bounds.
    #[error("{message}")]
    InvalidRequest {
        /// One sentence.
        message: String,
        /// The field, where one is at fault.
        param: Option<Cow<'static, str>>,
    },
    /// A field that would change the answer in a way this server does not offer.
    #[error("{message}")]
    Unsupported {
        /// One sentence.
        message: String,
        /// The field.
        param: Cow<'static, str>,
    },
    /// The prompt does not fit the model's context.
    #[error("{message}")]
    ContextLength {
        /// One sentence with both numbers.
        message: String,
        /// The field that holds the prompt.
        param: Option<Cow<'static, str>>,
    },
    /// The request could never fit the engine's memory.
    #[error("{0}")]
    Capacity(String),
    /// No key, or a wrong one.
    #[error("A valid API key is needed: send it as `Authorization: Bearer KEY`.")]
    Unauthorized,
    /// A model that is not served here.
    #[error("The model {asked:?} does not exist here; this server has {served:?}.")]
    ModelNotFound {
        /// What the client asked for, cut to a decent length.
        asked: String,
        /// What it could have asked for.
        served: String,
    },
    /// A path that is not served.
    #[error("Unknown URL: {method} {path}.")]
    UnknownUrl {
        /// Of the request.
        method: String,
        /// Of the request, shortened.
        path: String,
    },
    /// A path that is served for another method.
    #[error("{method} is not allowed for {path}.")]
    MethodNotAllowed {
        /// Of the request.
        method: String,
        /// Of the request.
        path: String,
    },
    /// The body did not arrive in time.
    #[error("The request body did not arrive within {0} seconds.")]
    BodyTimeout(u64),
    /// The body is larger than the server takes.
    #[error("The request body exceeds the limit of {0} bytes.")]
    BodyTooLarge(usize),
    /// The server or the engine has all the work it can hold.
    #[error("{message}")]
    Overloaded {
        /// One sentence.
        message: String,
        /// When it is likely to be otherwise.
        retry_after_s: u32,
    },
    /// The client leaves too much of its answer unread.
    #[error("{0}")]
    SlowReader(String),
    /// No engine is ready.
    #[error("{0}")]
    Unavailable(String),
    /// The server is shutting down.
    #[error("The server is shutting down; send the request to another one or try again later.")]
    Draining,
    /// The engine went away while it computed the answer.
    #[error("{0}")]
    EngineLost(String),
    /// The model computed something that is not a number.
    #[error("{0}")]
    NonFinite(String),
    /// A bug, here or in the engine.
    #[error("{0}")]
    Internal(String),
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorRow {
    /// HTTP status when nothing was sent yet.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// OpenAI's `code`; also the label of the rejection metric.
    pub code: &'static str,
    /// Seconds for `Retry-After`: the same request may succeed later.
    pub retry_after: Option<u32>,
}

/// Put into a response's extensions, so that metrics can count errors by code.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCode(pub &'static str);

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl ApiError {
    /// A field out of bounds.
    pub fn invalid(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: Some(param.into()) }
    }

    /// A name that no model here has.
    pub fn model_not_found(asked: &str, served: &str) -> Self {
        Self::ModelNotFound { asked: asked.chars().take(128).collect(), served: served.to_owned() }
    }

    /// A body that is not a request at all.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: None }
    }

    /// A field that is known and not offered.
    pub fn unsupported(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self::Unsupported { message: message.into(), param: param.into() }
    }

    /// The table.
    pub fn row(&self) -> ErrorRow {
        let row = |status, kind, code, retry_after| ErrorRow { status, kind, code, retry_after };
        match self {
            Self::InvalidRequest { .. } => row(StatusCode::BAD_REQUEST, INVALID, "invalid_request", None),
            Self::Unsupported { .. } => row(StatusCode::BAD_REQUEST, INVALID, "unsupported_parameter", None),
            Self::ContextLength { .. } => {
                row(StatusCode::BAD_REQUEST, INVALID, "context_length_exceeded", None)
            }
            Self::Capacity(_) => row(StatusCode::BAD_REQUEST, INVALID, "capacity_exceeded", None),
            Self::Unauthorized => row(StatusCode::UNAUTHORIZED, INVALID, "invalid_api_key", None),
            Self::ModelNotFound { .. } => row(StatusCode::NOT_FOUND, INVALID, "model_not_found", None),
            Self::UnknownUrl { .. } => row(StatusCode::NOT_FOUND, INVALID, "unknown_url", None),
            Self::MethodNotAllowed { .. } => {
                row(StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", None)
            }
            Self::BodyTimeout(_) => row(StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout", None),
            Self::BodyTooLarge(_) => row(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", None),
            Self::Overloaded { retry_after_s, .. } => {
                row(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "overloaded", Some(*retry_after_s))
            }
            Self::SlowReader(_) => row(StatusCode::REQUEST_TIMEOUT, INVALID, "slow_reader", None),
            Self::Unavailable(_) => {
                row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "engine_unavailable", Some(2))
            }
            Self::Draining => row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "server_draining", Some(5)),
            Self::EngineLost(_) => row(StatusCode::SERVICE_UNAVAILABLE, SERVER, "engine_lost", Some(2)),
            Self::NonFinite(_) => row(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "non_finite_logits", None),
            Self::Internal(_) => row(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal_error", None),
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::InvalidRequest { param, .. } | Self::ContextLength { param, .. } => param.as_deref(),
            Self::Unsupported { param, .. } => Some(param),
            Self::ModelNotFound { .. } => Some("model"),
            _ => None,
        }
    }

    /// `{"error": {…}}` on one line.
    pub fn body(&self) -> String {
        let row = self.row();
        let envelope = Envelope {
            error: Body { message: &self.to_string(), kind: row.kind, param: self.param(), code: row.code },
        };
        // Strings and nulls: nothing in it can fail to serialize.
        serde_json::to_string(&envelope).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let row = self.row();
        let json = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let mut response = (row.status, [json], self.body()).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = row.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        match self {
            Self::Draining => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Self::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response.extensions_mut().insert(ErrorCode(row.code));
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let message = error.message;
        match error.code {
            EngineErrorCode::InvalidArgument => Self::malformed(message),
            EngineErrorCode::ContextLength => Self::ContextLength { message, param: None },
            EngineErrorCode::Capacity => Self::Capacity(message),
            EngineErrorCode::Overloaded => Self::Overloaded { message, retry_after_s: 1 },
            EngineErrorCode::Unread => Self::SlowReader(message),
            EngineErrorCode::Draining | EngineErrorCode::Unavailable => Self::Unavailable(message),
            EngineErrorCode::NonFinite => Self::NonFinite(message),
            EngineErrorCode::Internal => Self::Internal(message),
            EngineErrorCode::Lost => Self::EngineLost(message),
        }
    }
}

impl From<QueueFull> for ApiError {
    fn from(full: QueueFull) -> Self {
        Self::Overloaded { message: full.message, retry_after_s: full.retry_after_s }
    }
}

impl From<crate::chat::MessageError> for ApiError {
    fn from(error: crate::chat::MessageError) -> Self {
        Self::invalid(error.param, error.message)
    }
}
