//! `/v1/models`: the one model that is served.

use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};

use super::types::{Model, ModelList};
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::state::AppState;

/// `GET /v1/models`.
pub async fn list_models(State(state): State<AppState>) -> Result<Response, ApiError> {
    let model = state.model()?;
    Ok(Json(ModelList { object: "list", data: [entry(&model)] }).into_response())
}

/// `GET /v1/models/{id}`; ids may hold slashes.
pub async fn retrieve_model(
    State(state): State<AppState>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let model = state.model()?;
    if id != model.id {
        return Err(ApiError::model_not_found(&id, &model.id));
    }
    Ok(Json(entry(&model)).into_response())
}

fn entry(model: &ServedModel) -> Model<'_> {
    Model {
        id: &model.id,
        object: "model",
        created: model.created,
        owned_by: "rung",
        max_model_len: model.facts.max_model_len,
    }
}
