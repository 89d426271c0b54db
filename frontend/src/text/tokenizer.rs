//! The only user of the `tokenizers` crate: text to ids, and the vocabulary that turns ids back.

use std::fmt;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use super::detokenizer::LeadingSpace;
use super::vocabulary::{DecoderShape, Vocabulary};

/// Whether the tokenizer's own template adds tokens, such as a beginning-of-text id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecialTokens {
    /// For raw prompts.
    Add,
    /// For rendered chats, whose template writes them itself.
    Omit,
}

/// Why a tokenizer cannot be used, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// Not a tokenizer.json.
    #[error("tokenizer.json cannot be read: {0}")]
    Malformed(String),
    /// A kind of tokenizer whose bytes per token are not defined.
    #[error("this tokenizer is not supported: {0}")]
    Unsupported(String),
    /// Our table and the library disagree.
    #[error("token {id} decodes to {library:?} in the tokenizers library but its bytes are {table:?}")]
    Mismatch {
        /// The id, or the last one of a sequence.
        id: u32,
        /// The library's text.
        library: String,
        /// The table's text.
        table: String,
    },
    /// The library failed on a text.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// The tokenizer has ids that the model has no row for.
    #[error("the text needs token {id}, but the model's vocabulary ends at {vocab_size}")]
    OutsideVocabulary {
        /// The id.
        id: u32,
        /// Ids are below this.
        vocab_size: usize,
    },
}

/// Text to ids and ids to bytes.
///
/// The text of a special token inside any encoded text becomes that token, in chat content too.
pub struct Tokenizer {
    library: tokenizers::Tokenizer,
    vocabulary: Vocabulary,
    strips_leading_space: bool,
    /// Every byte of a text ends up in exactly one token, so length bounds the count from below.
    keeps_every_byte: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("vocab_size", &self.vocabulary.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a tokenizer.json for a model of `vocab_size` ids and checks the byte table against
    /// the library's decoding: every id alone, and random sequences.
    pub fn from_json(json: &[u8], vocab_size: u32) -> Result<Self, TokenizerError> {
        let malformed = |error: &dyn fmt::Display| TokenizerError::Malformed(error.to_string());
        let mut library = tokenizers::Tokenizer::from_bytes(json).map_err(|error| malformed(&error))?;
        // A stored truncation would cut prompts in silence.
        library.with_truncation(None).map_err(|error| malformed(&error))?;
        library.with_padding(None);
        let description: Value = serde_json::from_slice(json).map_err(|error| malformed(&error))?;
        let shape = DecoderShape::parse(&description["decoder"])?;
        let added = library.get_added_tokens_decoder();
        let vocabulary = Vocabulary::build(vocab_size, &shape, |id| {
            let is_special = added.get(&id).is_some_and(|token| token.special);
            library.id_to_token(id).map(|text| (text, is_special))
        })?;
        let tokenizer = Self {
            library,
            vocabulary,
            strips_leading_space: shape.strips_leading_space,
            keeps_every_byte: keeps_every_byte(&description),
        };
        tokenizer.verify()?;
        Ok(tokenizer)
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, special_tokens: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .library
            .encode_fast(text, special_tokens == SpecialTokens::Add)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let ids = encoding.get_ids().to_vec();
        match ids.iter().find(|&&id| id as usize >= self.vocabulary.len()) {
            Some(&id) => Err(TokenizerError::OutsideVocabulary { id, vocab_size: self.vocabulary.len() }),
            None => Ok(ids),
        }
    }

    /// A count that the ids of any text of this many bytes cannot fall below: lets a hopeless
    /// prompt be refused before any work is spent on it.
    pub fn min_tokens(&self, text_bytes: usize) -> usize {
        if self.keeps_every_byte { text_bytes / self.vocabulary.longest().max(1) } else { 0 }
    }

    /// Bytes and flags of every id.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// What happens to a space at the start of an answer.
    pub fn leading_space(&self) -> LeadingSpace {
        if self.strips_leading_space { LeadingSpace::Strip } else { LeadingSpace::Keep }
    }

    fn verify(&self) -> Result<(), TokenizerError> {
        // Decoders that treat the first token in a way of its own are asked in mid-text: after a
        // letter that is stored as itself, not as a `<0xNN>` byte, which would join its neighbour.
        let anchor = ('a'..='z').find_map(|letter| {
            let id = self.library.token_to_id(letter.encode_utf8(&mut [0; 4]))?;
            (self.vocabulary.bytes(id) == [letter as u8]).then_some(id)
        });
        for id in 0..self.vocabulary.len() as u32 {
            self.verify_sequence(anchor, &[id])?;
        }
        // The same sequences in every run.
        let mut random = StdRng::seed_from_u64(0);
        for _ in 0..256 {
            let length = random.random_range(2..=16);
            let ids: Vec<u32> =
                (0..length).map(|_| random.random_range(0..self.vocabulary.len() as u32)).collect();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.vocabulary.bytes(id)).copied().collect();
            // On ill-formed bytes libraries differ in how many replacement characters they write.
            if std::str::from_utf8(&bytes).is_ok() {
                self.verify_sequence(anchor, &ids)?;
            }
        }
        Ok(())
    }

    fn verify_sequence(&self, anchor: Option<u32>, ids: &[u32]) -> Result<(), TokenizerError> {
        let all: Vec<u32> = anchor.into_iter().chain(ids.iter().copied()).collect();
        let library =
            self.library.decode(&all, false).map_err(|error| TokenizerError::Malformed(error.to_string()))?;
        let bytes: Vec<u8> = all.iter().flat_map(|&id| self.vocabulary.bytes(id)).copied().collect();
        let table = String::from_utf8_lossy(&bytes);
        if library == table {
            return Ok(());
        }
        let id = ids.last().copied().unwrap_or_default();
        Err(TokenizerError::Mismatch { id, library, table: table.into_owned() })
    }
}

/// Whether the description rules out that encoding drops or shortens text.
fn keeps_every_byte(description: &Value) -> bool {
    fn keeps(step: &Value) -> bool {
        match step["type"].as_str() {
            Some("ByteLevel" | "Digits") => true,
            Some("Split") => step["behavior"].as_str() != Some("Removed"),
            Some("Sequence") => step["pretokenizers"].as_array().is_some_and(|steps| steps.iter().all(keeps)),
            _ => false,
        }
    }
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    description["normalizer"].is_null()
        && keeps(&description["pre_tokenizer"])
        && !description["added_tokens"].as_array().is_some_and(|tokens| tokens.iter().any(strips))
}
