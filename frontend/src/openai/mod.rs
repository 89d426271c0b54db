//! The only OpenAI JSON: request bodies to engine requests, and events to answers.
//!
//! ```text
//! json → validate → prepare → answer (events) → fold or sse → chat or completions (JSON)
//! ```

mod answer;
mod beginning;
mod body;
mod chat;
mod completions;
mod endpoint;
mod fields;
mod format;
mod json;
mod logprobs;
mod meter;
mod models;
mod openapi;
mod prepare;
mod sampling;
mod sse;
mod tokenize;
mod types;
mod unsupported;
mod usage;
mod validate;

pub use chat::chat_completions;
pub use completions::completions;
pub use models::{list_models, retrieve_model};
pub use openapi::openapi;
pub use tokenize::{detokenize, tokenize};
