//! One sample's tokens to its visible text: detokenizes, finds stop strings, and keeps ids and
//! logprobs in step with the text. Whatever way the tokens are chopped into deltas, the
//! concatenation of what comes out is the same.

use std::sync::Arc;

use super::detokenizer::{Detokenizer, LeadingSpace, TokenStart};
use super::stop::{StopMatcher, StopSet};
use super::tokenizer::Tokenizer;
use crate::engine::types::TokenLogprobs;

/// What one request asks of the text of each of its samples.
#[derive(Debug, Clone)]
pub struct SampleRules {
    /// For the bytes of tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Stop strings.
    pub stops: StopSet,
    /// Whether the stop string that ends the text is part of it.
    pub include_stop: bool,
    /// Ids that end a row in the engine; they are never text.
    pub ending_ids: Vec<u32>,
    /// Text that the first so many tokens complete is not searched for stop strings.
    pub min_tokens: u32,
    /// What happens to a space at the very start.
    pub leading: LeadingSpace,
    /// Whether each token comes with logprobs.
    pub logprobs: bool,
}

/// A token with its logprobs, in step with the text.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEntry {
    /// The chosen id.
    pub id: u32,
    /// Of the chosen id and its alternatives; `None` for the first token of a prompt.
    pub logprobs: Option<TokenLogprobs>,
    /// Index of the character of the whole text that the token's first byte belongs to.
    pub char_offset: usize,
    /// False for control tokens and ids that end the row.
    pub in_text: bool,
}

/// What became visible.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextDelta {
    /// New text.
    pub text: String,
    /// New ids: those whose text is now partly visible, and those without text.
    pub token_ids: Vec<u32>,
    /// One per id when logprobs were asked for, else empty.
    pub entries: Vec<TokenEntry>,
    /// A stop string was found: nothing follows, and the row is to be aborted.
    pub stopped: bool,
}

impl TextDelta {
    /// Neither text nor ids.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.token_ids.is_empty()
    }

    /// Adds what came later; appending every delta of a sample gives the whole of it.
    pub fn append(&mut self, later: Self) {
        self.text.push_str(&later.text);
        self.token_ids.extend(later.token_ids);
        self.entries.extend(later.entries);
        self.stopped |= later.stopped;
    }
}

#[derive(Debug)]
struct PendingToken {
    id: u32,
    /// Byte of the whole text where the character of its first byte begins.
    start: usize,
    char_offset: usize,
    /// Adds nothing to the text.
    is_empty: bool,
    in_text: bool,
    logprobs: Option<TokenLogprobs>,
}

/// The state of one sample.
#[derive(Debug)]
pub struct SampleText {
    rules: Arc<SampleRules>,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    /// Text that is decided but not released.
    text: String,
    /// Bytes of the whole text before `text`.
    released: usize,
    /// Characters decided so far; counted only when logprobs need offsets.
    num_chars: usize,
    /// Tokens that are not released, in order.
    tokens: Vec<PendingToken>,
    /// Tokens read so far.
    num_tokens: u32,
    stopped: bool,
}

impl SampleText {
    /// Before the first token.
    pub fn new(rules: Arc<SampleRules>) -> Self {
        Self {
            detokenizer: Detokenizer::new(rules.leading),
            rules,
            matcher: StopMatcher::default(),
            text: String::new(),
            released: 0,
            num_chars: 0,
            tokens: Vec::new(),
            num_tokens: 0,
            stopped: false,
        }
    }

    /// Whether each token must come with logprobs.
    pub fn wants_logprobs(&self) -> bool {
        self.rules.logprobs
    }

    /// Reads tokens; `logprobs` has one entry per token or is empty.
    pub fn push(&mut self, token_ids: &[u32], logprobs: Vec<TokenLogprobs>) -> TextDelta {
        let mut logprobs = logprobs.into_iter();
        for &id in token_ids {
            if self.stopped {
                break;
            }
            self.push_token(id, logprobs.next());
        }
        self.release()
    }

    /// Ends the sample: what was held back because it might have become a stop string, or a
    /// character, is text after all.
    pub fn finish(&mut self) -> TextDelta {
        if !self.stopped {
            let decided = self.text.len();
            self.detokenizer.finish(&mut self.text);
            self.search(decided, self.num_tokens);
            self.matcher = StopMatcher::default();
        }
        let mut delta = self.release();
        if !self.stopped {
            // Nothing waits any more, not even tokens whose bytes made no character of their own.
            self.take_tokens(self.tokens.len(), &mut delta);
        }
        delta
    }

    fn push_token(&mut self, id: u32, logprobs: Option<TokenLogprobs>) {
        let vocabulary = self.rules.tokenizer.vocabulary();
        let in_text = !vocabulary.is_special(id) && !self.rules.ending_ids.contains(&id);
        let decided = self.text.len();
        let bytes = if in_text { vocabulary.bytes(id) } else { &[] };
        let place = self.detokenizer.push(bytes, &mut self.text);
        let replaced = place == TokenStart::AfterReplacement;
        self.tokens.push(PendingToken {
            id,
            start: self.released
                + decided
                + if replaced { char::REPLACEMENT_CHARACTER.len_utf8() } else { 0 },
            char_offset: self.num_chars + usize::from(replaced),
            is_empty: place == TokenStart::Empty,
            in_text,
            logprobs,
        });
        if self.rules.logprobs {
            self.num_chars += self.text[decided..].chars().count();
        }
        let index = self.num_tokens;
        self.num_tokens += 1;
        self.search(decided, index);
    }

    /// Looks for a stop string in the text from `decided` on, which token `index` completed.
    fn search(&mut self, decided: usize, index: u32) {
        if index < self.rules.min_tokens || self.rules.stops.is_empty() {
            return;
        }
        let Some(found) = self.matcher.feed(&self.rules.stops, &self.text.as_bytes()[decided..]) else {
            return;
        };
        let end = decided + found.end;
        // The match begins in text that was held back for it, so the cut is inside `text`.
        self.text.truncate(if self.rules.include_stop { end } else { end - found.len });
        self.stopped = true;
    }

    /// Gives out everything that no later token can take back.
    fn release(&mut self) -> TextDelta {
        // What is visible whether or not a stop string comes of it need not wait.
        let is_safe = self.stopped || self.rules.include_stop;
        let held = if is_safe { 0 } else { self.matcher.held(&self.rules.stops) };
        // Whole characters: a stop string and what is held of one begin with a first byte.
        let rest = self.text.split_off(self.text.len() - held);
        let text = std::mem::replace(&mut self.text, rest);
        let end = self.released + text.len();
        let visible = |token: &&PendingToken| token.start < end || (token.is_empty && token.start == end);
        let count = self.tokens.iter().take_while(visible).count();
        let mut delta = TextDelta { text, stopped: self.stopped, ..TextDelta::default() };
        self.released = end;
        self.take_tokens(count, &mut delta);
        delta
    }

    fn take_tokens(&mut self, count: usize, delta: &mut TextDelta) {
        delta.token_ids.reserve(count);
        for token in self.tokens.drain(..count) {
            delta.token_ids.push(token.id);
            if let Some(logprobs) = token.logprobs {
                delta.entries.push(TokenEntry {
                    id: token.id,
                    logprobs: Some(logprobs),
                    char_offset: token.char_offset,
                    in_text: token.in_text,
                });
            }
        }
    }
}
