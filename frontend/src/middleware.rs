//! What happens around every request: its id, its metrics, panics, keys. None of it reads a body.

use std::panic::AssertUnwindSafe;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, header};
use rand::Rng;
use tokio::time::Instant;

use crate::error::{ApiError, ErrorCode};
use crate::metrics::{RejectLabels, RequestLabels};
use crate::state::AppState;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Paths that need no key: probes and scrapers have none.
const OPEN_PATHS: [&str; 6] = ["/livez", "/readyz", "/health", "/version", "/metrics", "/openapi.json"];

/// Paths that metrics name.
const KNOWN_PATHS: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/openapi.json",
    "/livez",
    "/readyz",
    "/health",
    "/version",
    "/metrics",
];

/// Gives every response an `X-Request-Id`: the client's own where it is well-formed.
pub async fn request_id(mut request: Request, next: Next) -> Response {
    let own = request.headers().get(&REQUEST_ID).filter(|id| is_request_id(id.as_bytes())).cloned();
    let id = own.or_else(|| HeaderValue::try_from(format!("req-{:032x}", rand::rng().random::<u128>())).ok());
    if let Some(id) = &id {
        request.headers_mut().insert(REQUEST_ID, id.clone());
    }
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn is_request_id(id: &[u8]) -> bool {
    let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(byte);
    (1..=128).contains(&id.len()) && id.iter().all(is_allowed)
}

/// Counts answers by route and status, and errors by code.
pub async fn measure(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let endpoint = match KNOWN_PATHS.iter().find(|&&known| known == path) {
        Some(known) => known,
        None if path.starts_with("/v1/models/") => "/v1/models",
        None => "other",
    };
    let arrived = Instant::now();
    let id = request.headers().get(&REQUEST_ID).cloned();
    let response = next.run(request).await;
    // Neither the text of requests nor the path of unknown ones.
    tracing::debug!(
        id = id.as_ref().and_then(|id| id.to_str().ok()).unwrap_or_default(),
        endpoint,
        status = response.status().as_u16(),
        to_head_ms = arrived.elapsed().as_millis() as u64,
        "answered"
    );
    let http = &state.metrics.http;
    http.requests.get_or_create(&RequestLabels { endpoint, status: response.status().as_u16() }).inc();
    if let Some(ErrorCode(reason)) = response.extensions().get() {
        http.rejected.get_or_create(&RejectLabels { reason }).inc();
    }
    response
}

/// A panic in a handler is that request's 500 and nobody else's.
pub async fn catch_panic(request: Request, next: Next) -> Response {
    AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
        ApiError::Internal("The server failed while it handled this request.".to_owned()).into_response()
    })
}

/// Refuses requests without a key, where keys are configured.
pub async fn authenticate(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let keys = &state.config.keys;
    if keys.is_open() || OPEN_PATHS.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    let Some(identity) = bearer_token(&request).and_then(|token| keys.identify(token)) else {
        return ApiError::Unauthorized.into_response();
    };
    request.extensions_mut().insert(identity);
    next.run(request).await
}

fn bearer_token(request: &Request) -> Option<&[u8]> {
    let header = request.headers().get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, token) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}
