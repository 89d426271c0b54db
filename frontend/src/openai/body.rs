//! Reads a request body within its limits of size and time.

use std::time::Duration;

use axum::body::Body;
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::error::ApiError;

/// For a whole body; a client that needs longer holds a place that others want.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The bytes of a body of at most `limit` bytes.
pub(super) async fn read_body(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge(limit));
    }
    let collected = tokio::time::timeout(TIMEOUT, Limited::new(body, limit).collect())
        .await
        .map_err(|_| ApiError::BodyTimeout(TIMEOUT.as_secs()))?;
    match collected {
        Ok(collected) => Ok(collected.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::BodyTooLarge(limit)),
        Err(_) => Err(ApiError::malformed("The request body ended before it was complete.")),
    }
}
