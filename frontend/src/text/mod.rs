//! Text to ids, ids to bytes, bytes to visible text; pure: no sockets, no clock, no JSON of an API.

mod detokenizer;
mod sample;
mod stop;
mod tokenizer;
mod vocabulary;

pub use detokenizer::{Detokenizer, LeadingSpace, TokenStart};
pub use sample::{SampleRules, SampleText, TextDelta, TokenEntry};
pub use stop::{StopMatch, StopMatcher, StopSet};
pub use tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
pub use vocabulary::Vocabulary;
