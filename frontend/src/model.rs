//! A model as the frontend serves it: the engine's facts, the tokenizer and the chat template.

use std::sync::Arc;

use crate::chat::ChatTemplate;
use crate::engine::types::ModelFacts;
use crate::text::Tokenizer;

/// Built once per engine connection from what the engine announces; shared by all requests.
#[derive(Debug)]
pub struct ServedModel {
    /// What clients call the model: `--served-model-name`, else the engine's name.
    pub id: String,
    /// Unix time in seconds when the model became ready here, for `/v1/models`.
    pub created: u64,
    /// What the engine says of it.
    pub facts: ModelFacts,
    /// Text to ids and ids to bytes.
    pub tokenizer: Arc<Tokenizer>,
    /// Absent when the model has none: chat requests are then refused with that reason.
    pub template: Option<ChatTemplate>,
}
