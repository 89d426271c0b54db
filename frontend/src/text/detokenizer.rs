//! Bytes of tokens to text, one token at a time: an exact UTF-8 state machine. It never decodes
//! a byte twice and never looks back at text that it has given out.

/// Whether one space at the very start of the text is dropped, as SentencePiece decoders do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeadingSpace {
    /// The text goes on from a prompt, or the tokenizer does not mark word starts by spaces.
    Keep,
    /// The text starts an answer.
    Strip,
}

/// Where a token begins in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenStart {
    /// No bytes.
    Empty,
    /// At the end of the text as it was before the token, or inside the character that follows it.
    AtEnd,
    /// One replacement character after that end: the token showed that the bytes before it
    /// were never going to be a character.
    AfterReplacement,
}

/// Bytes in, characters out. Bytes that may yet become a character wait; each maximal
/// ill-formed part (Unicode §3.9, as in `String::from_utf8_lossy`) becomes one U+FFFD.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// A well-formed beginning of one character.
    partial: [u8; 4],
    partial_len: usize,
    leading: LeadingSpace,
}

impl Detokenizer {
    /// At the start of a text.
    pub fn new(leading: LeadingSpace) -> Self {
        Self { partial: [0; 4], partial_len: 0, leading }
    }

    /// Appends to `text` every character that `token`'s bytes decide.
    pub fn push(&mut self, token: &[u8], text: &mut String) -> TokenStart {
        let mut bytes = token;
        if self.leading == LeadingSpace::Strip && !bytes.is_empty() {
            self.leading = LeadingSpace::Keep;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        if bytes.is_empty() {
            return TokenStart::Empty;
        }
        let mut start = TokenStart::AtEnd;
        let mut first = true;
        while self.partial_len > 0 {
            let Some((&byte, rest)) = bytes.split_first() else {
                return start;
            };
            if self.extend_partial(byte, text) {
                bytes = rest;
            } else if first {
                start = TokenStart::AfterReplacement;
            }
            first = false;
        }
        self.push_whole(bytes, text);
        start
    }

    /// Ends the text: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if self.partial_len > 0 {
            self.partial_len = 0;
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Adds a byte to the unfinished character. False when it cannot belong to it: the
    /// unfinished part is replaced, and the byte is still to be read.
    fn extend_partial(&mut self, byte: u8, text: &mut String) -> bool {
        self.partial[self.partial_len] = byte;
        match std::str::from_utf8(&self.partial[..=self.partial_len]) {
            Ok(character) => {
                text.push_str(character);
                self.partial_len = 0;
                true
            }
            Err(error) if error.error_len().is_none() => {
                self.partial_len += 1;
                true
            }
            Err(_) => {
                text.push(char::REPLACEMENT_CHARACTER);
                self.partial_len = 0;
                false
            }
        }
    }

    fn push_whole(&mut self, mut bytes: &[u8], text: &mut String) {
        loop {
            match std::str::from_utf8(bytes) {
                Ok(valid) => return text.push_str(valid),
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    // Checked just now; the second check is the price of no `unsafe`, paid only
                    // for tokens that end inside a character or are ill-formed.
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    let Some(ill_formed) = error.error_len() else {
                        self.partial[..rest.len()].copy_from_slice(rest);
                        self.partial_len = rest.len();
                        return;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    bytes = &rest[ill_formed..];
                }
            }
        }
    }
}
