//! All routes and layers.

use axum::extract::{Request, State};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::{StatusCode, header};
use serde_json::json;

use crate::error::ApiError;
use crate::lifecycle::Phase;
use crate::middleware::{authenticate, catch_panic, measure, request_id};
use crate::openai::{
    chat_completions, completions, detokenize, list_models, openapi, retrieve_model, tokenize,
};
use crate::state::AppState;

/// The whole HTTP surface.
pub fn router(state: AppState) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(retrieve_model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/health", get(readyz))
        .route("/version", get(version))
        .route("/openapi.json", get(openapi))
        .route("/metrics", get(metrics))
        .fallback(unknown_url)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(state.clone(), authenticate))
        .layer(from_fn(catch_panic))
        .layer(from_fn_with_state(state.clone(), measure))
        .layer(from_fn(request_id))
        .with_state(state)
}

/// The process serves HTTP; nothing more.
async fn livez() -> Json<serde_json::Value> {
    Json(json!({"status": "ok"}))
}

/// A completion would be taken now.
async fn readyz(State(state): State<AppState>) -> Result<Json<serde_json::Value>, ApiError> {
    if state.lifecycle.phase() != Phase::Serving {
        return Err(ApiError::Draining);
    }
    let model = state.model()?;
    Ok(Json(json!({"status": "ok", "model": model.id})))
}

async fn version() -> Json<serde_json::Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn metrics(State(state): State<AppState>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let http = &state.metrics.http;
    http.queued_tokens.set(state.queue.queued_tokens().cast_signed());
    http.oldest_request.set(state.admission.oldest_age().as_secs_f64());
    let model = state.engine.model();
    let text = state.metrics.render(model.as_ref().map_or("", |model| &model.id));
    (StatusCode::OK, [(header::CONTENT_TYPE, content_type)], text).into_response()
}

async fn unknown_url(request: Request) -> ApiError {
    let (method, path) = method_and_path(&request);
    ApiError::UnknownUrl { method, path }
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (method, path) = method_and_path(&request);
    ApiError::MethodNotAllowed { method, path }
}

fn method_and_path(request: &Request) -> (String, String) {
    let path = request.uri().path().chars().take(128).collect();
    (request.method().to_string(), path)
}
