//! A model as the frontend serves it: the engine's facts, the tokenizer and the chat template.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use crate::chat::ChatTemplate;
use crate::engine::types::ModelFacts;
use crate::grammar::GrammarCompiler;
use crate::text::Tokenizer;

const TOKENIZER_FILE: &str = "tokenizer.json";
const TEMPLATE_FILE: &str = "chat_template.jinja";

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
    /// Constraints to grammars of these tokens.
    pub grammars: GrammarCompiler,
    /// Absent when the model has none: chat requests are then refused with that reason.
    pub template: Option<ChatTemplate>,
}

impl ServedModel {
    /// Builds the model from the files of its tokenizer bundle. Takes about a second of processor
    /// time for a large vocabulary. The error is one sentence.
    pub fn build(
        id: Option<&str>,
        facts: ModelFacts,
        files: &BTreeMap<String, Bytes>,
    ) -> Result<Self, String> {
        let tokenizer = files.get(TOKENIZER_FILE).ok_or(format!("The engine offers no {TOKENIZER_FILE}."))?;
        let tokenizer = Tokenizer::from_json(tokenizer, facts.vocab_size)
            .map_err(|error| format!("The engine's {TOKENIZER_FILE} cannot be used: {error}."))?;
        let tokenizer = Arc::new(tokenizer);
        let template = files.get(TEMPLATE_FILE).map(|source| compile(source)).transpose()?;
        Ok(Self {
            id: id.unwrap_or(&facts.name).to_owned(),
            // A clock before 1970 is no reason not to serve.
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            grammars: GrammarCompiler::new(Arc::clone(&tokenizer), &facts.eos_token_ids),
            tokenizer,
            facts,
            template,
        })
    }
}

fn compile(source: &[u8]) -> Result<ChatTemplate, String> {
    let unusable = |reason: String| format!("The engine's {TEMPLATE_FILE} cannot be used: {reason}.");
    let source = std::str::from_utf8(source).map_err(|error| unusable(error.to_string()))?;
    ChatTemplate::compile(source).map_err(|error| unusable(error.to_string()))
}
