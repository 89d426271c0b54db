//! Text to ids and ids to text; pure.

/// A tokenizer.
#[derive(Debug)]
pub struct Tokenizer;
