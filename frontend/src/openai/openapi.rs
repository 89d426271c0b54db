//! `/openapi.json`: the HTTP API as a document. A test keeps it in step with the router.

use axum::response::{IntoResponse, Response};
use http::header;

/// `GET /openapi.json`.
pub async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}
