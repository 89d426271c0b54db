//! The bytes of every token, read off the tokenizer's decoder once and checked against it.

use std::collections::HashMap;

use serde_json::Value;

use super::tokenizer::TokenizerError;

/// Id to bytes in one flat table; ids without a token have no bytes.
#[derive(Debug)]
pub struct Vocabulary {
    bytes: Box<[u8]>,
    /// Token `i` is `bytes[offsets[i]..offsets[i + 1]]`.
    offsets: Box<[u32]>,
    special: Box<[bool]>,
    longest: usize,
}

impl Vocabulary {
    /// The table for ids below `size`; `token` gives an id's stored text and whether it is special.
    pub(super) fn build(
        size: u32,
        shape: &DecoderShape,
        mut token: impl FnMut(u32) -> Option<(String, bool)>,
    ) -> Result<Self, TokenizerError> {
        let mut bytes = Vec::new();
        let mut offsets = vec![0];
        let mut special = Vec::with_capacity(size as usize);
        let mut longest = 0;
        for id in 0..size {
            let stored = token(id);
            let start = bytes.len();
            if let Some((text, _)) = &stored {
                shape.append_bytes(text, &mut bytes);
            }
            special.push(stored.is_some_and(|(_, is_special)| is_special));
            longest = longest.max(bytes.len() - start);
            let end = u32::try_from(bytes.len()).map_err(|_| {
                TokenizerError::Unsupported("the texts of its tokens exceed 4 GiB together".to_owned())
            })?;
            offsets.push(end);
        }
        Ok(Self { bytes: bytes.into(), offsets: offsets.into(), special: special.into(), longest })
    }

    /// Ids are below this.
    pub fn len(&self) -> usize {
        self.special.len()
    }

    /// Whether there is no id at all.
    pub fn is_empty(&self) -> bool {
        self.special.is_empty()
    }

    /// The bytes that a token stands for; none for an id without a token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if id >= self.len() {
            return &[];
        }
        &self.bytes[self.offsets[id] as usize..self.offsets[id + 1] as usize]
    }

    /// The text of ids, control tokens written out.
    pub fn text(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.bytes(id)).copied().collect();
        String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// Whether the token is control, not text: it is left out of visible text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.longest
    }
}

/// What a tokenizer's decoder does, in the few forms that language models use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct DecoderShape {
    /// GPT-2: each character of a stored token stands for one byte.
    byte_level: bool,
    /// Literal replacements, in order, such as `▁` to a space.
    replacements: Vec<(String, String)>,
    /// Tokens `<0xNN>` are single bytes.
    byte_fallback: bool,
    /// One leading space of the whole text is dropped.
    pub(super) strips_leading_space: bool,
}

impl DecoderShape {
    /// Reads the `decoder` of a tokenizer.json; other kinds are refused by name, never guessed.
    pub(super) fn parse(decoder: &Value) -> Result<Self, TokenizerError> {
        let mut shape = Self::default();
        shape.add(decoder)?;
        if shape.byte_level && (shape.byte_fallback || !shape.replacements.is_empty()) {
            return Err(TokenizerError::Unsupported(
                "its decoder mixes ByteLevel with other steps that change bytes".to_owned(),
            ));
        }
        if !shape.byte_level && shape.replacements.is_empty() && !shape.byte_fallback {
            return Err(TokenizerError::Unsupported(
                "its decoder is neither byte-level nor of the SentencePiece kind".to_owned(),
            ));
        }
        Ok(shape)
    }

    fn add(&mut self, decoder: &Value) -> Result<(), TokenizerError> {
        let text = |key: &str| decoder[key].as_str().map(str::to_owned);
        match decoder["type"].as_str().unwrap_or("none") {
            "Sequence" => {
                for step in decoder["decoders"].as_array().into_iter().flatten() {
                    self.add(step)?;
                }
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => {}
            "Replace" => {
                let pattern = decoder["pattern"]["String"].as_str().map(str::to_owned);
                let (Some(pattern), Some(content)) = (pattern, text("content")) else {
                    return Err(TokenizerError::Unsupported(
                        "its decoder replaces by a regular expression".to_owned(),
                    ));
                };
                self.replacements.push((pattern, content));
            }
            "Strip" => {
                let is_one_space = text("content").as_deref() == Some(" ")
                    && decoder["start"].as_u64().is_some_and(|start| start <= 1)
                    && decoder["stop"].as_u64() == Some(0);
                if !is_one_space {
                    return Err(TokenizerError::Unsupported(
                        "its decoder strips more than one leading space".to_owned(),
                    ));
                }
                self.strips_leading_space |= decoder["start"].as_u64() == Some(1);
            }
            "Metaspace" => {
                let mark = text("replacement").unwrap_or_else(|| "▁".to_owned());
                self.replacements.push((mark, " ".to_owned()));
                self.strips_leading_space = text("prepend_scheme").as_deref() != Some("never");
            }
            other => {
                return Err(TokenizerError::Unsupported(format!("its decoder is of the kind {other}")));
            }
        }
        Ok(())
    }

    fn append_bytes(&self, stored: &str, bytes: &mut Vec<u8>) {
        if self.byte_level {
            let start = bytes.len();
            for character in stored.chars() {
                let Some(byte) = byte_of_character(character) else {
                    // A token with any other character stands for its own UTF-8.
                    bytes.truncate(start);
                    bytes.extend_from_slice(stored.as_bytes());
                    return;
                };
                bytes.push(byte);
            }
            return;
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(stored)
        {
            bytes.push(byte);
            return;
        }
        let mut text = stored.to_owned();
        for (pattern, content) in &self.replacements {
            text = text.replace(pattern.as_str(), content);
        }
        bytes.extend_from_slice(text.as_bytes());
    }
}

/// The byte of a `<0xNN>` token.
fn fallback_byte(stored: &str) -> Option<u8> {
    let hex = stored.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// GPT-2's printable stand-in for each byte, reversed: printable Latin-1 characters stand for
/// themselves, the 68 other bytes for U+0100 onwards in order.
fn byte_of_character(character: char) -> Option<u8> {
    static TABLE: std::sync::LazyLock<HashMap<char, u8>> = std::sync::LazyLock::new(|| {
        let mut next_stand_in = 0x100;
        (0..=255u8)
            .map(|byte| {
                let is_printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
                let code = if is_printable { u32::from(byte) } else { next_stand_in };
                next_stand_in += u32::from(!is_printable);
                (char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), byte)
            })
            .collect()
    });
    TABLE.get(&character).copied()
}
