//! Reads a request body within its limits of size and time.

use axum::body::Body;
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};

use crate::config::Limits;
use crate::error::ApiError;

/// The bytes of a body. A client that needs longer than the limit holds a place that others want.
pub(super) async fn read_body(body: Body, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    let (limit, patience) = (limits.max_body_bytes, limits.body_timeout);
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge(limit));
    }
    let collected = tokio::time::timeout(patience, Limited::new(body, limit).collect())
        .await
        .map_err(|_| ApiError::BodyTimeout(patience.as_secs()))?;
    match collected {
        Ok(collected) => Ok(collected.to_bytes().into()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::BodyTooLarge(limit)),
        Err(_) => Err(ApiError::malformed("The request body ended before it was complete.")),
    }
}
