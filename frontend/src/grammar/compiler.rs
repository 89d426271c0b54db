//! Compiles constraints within limits, to learn whether the engine will be able to.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Logger, Matcher, ParserFactory};
use sha2::{Digest, Sha256};

use super::limits::parser_limits;
use super::{Constraint, GrammarError};
use crate::text::{Tokenizer, Vocabulary};

/// Grammars that need no second look.
const MAX_REMEMBERED: usize = 256;

/// Compiles for one tokenizer. Its table is built by the first request that needs it.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    eos_token_ids: Box<[u32]>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    /// Hashes of grammars that compiled, the newest last.
    accepted: Mutex<VecDeque<[u8; 32]>>,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("eos_token_ids", &self.eos_token_ids).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for the tokens of a model, of which some end an answer.
    pub fn new(tokenizer: Arc<Tokenizer>, eos_token_ids: &[u32]) -> Self {
        Self {
            tokenizer,
            eos_token_ids: eos_token_ids.into(),
            factory: OnceLock::new(),
            accepted: Mutex::default(),
        }
    }

    /// The grammar's text for the engine. May block for as long as the limits allow.
    pub fn compile(&self, constraint: &Constraint) -> Result<Arc<str>, GrammarError> {
        let grammar = constraint.grammar()?;
        let text = serde_json::to_string(&grammar).map_err(|error| unusable(&error.to_string()))?;
        let hash: [u8; 32] = Sha256::digest(&text).into();
        if !self.is_accepted(&hash) {
            self.check(grammar)?;
            self.accept(hash);
        }
        Ok(text.into())
    }

    /// Compiles, and takes a first step: what compiles may have no answer, or too many ways to one.
    fn check(&self, grammar: TopLevelGrammar) -> Result<(), GrammarError> {
        let mut matcher = self.matcher(grammar)?;
        let mask = matcher.compute_mask().map_err(|error| no_step(&error.to_string()))?;
        let Some(first) = mask.iter().find(|id| !self.eos_token_ids.contains(id)) else { return Ok(()) };
        matcher.consume_token(first).map_err(|error| no_step(&error.to_string()))?;
        matcher.compute_mask_or_eos().map(drop).map_err(|error| no_step(&error.to_string()))
    }

    fn matcher(&self, grammar: TopLevelGrammar) -> Result<Matcher, GrammarError> {
        let factory = self.factory.get_or_init(|| self.build()).as_ref().map_err(Clone::clone)?;
        let parser = factory.create_parser_from_init_ext(
            GrammarInit::Serialized(grammar),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            parser_limits(),
        );
        parser.map(|parser| Matcher::new(Ok(parser))).map_err(|error| unusable(&error.to_string()))
    }

    fn build(&self) -> Result<ParserFactory, GrammarError> {
        let env = token_env(self.tokenizer.vocabulary(), &self.eos_token_ids)?;
        // Slices make later masks faster; only first ones are computed here.
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[])
            .map_err(|error| GrammarError(format!("This model cannot follow grammars: {error}.")))?;
        factory.quiet();
        Ok(factory)
    }

    fn is_accepted(&self, hash: &[u8; 32]) -> bool {
        self.accepted.lock().unwrap_or_else(PoisonError::into_inner).contains(hash)
    }

    fn accept(&self, hash: [u8; 32]) {
        let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
        if accepted.len() == MAX_REMEMBERED {
            accepted.pop_front();
        }
        accepted.push_back(hash);
    }
}

fn token_env(vocabulary: &Vocabulary, eos_token_ids: &[u32]) -> Result<TokEnv, GrammarError> {
    let (Some(&eos), true) =
        (eos_token_ids.first(), eos_token_ids.iter().all(|id| (*id as usize) < vocabulary.len()))
    else {
        return Err(GrammarError(
            "This model has no token that ends an answer, so it cannot follow grammars.".to_owned(),
        ));
    };
    let words: Vec<Vec<u8>> = (0..vocabulary.len() as u32)
        .map(|id| {
            let mark = vocabulary.is_special(id).then_some(TokTrie::SPECIAL_TOKEN_MARKER);
            mark.into_iter().chain(vocabulary.bytes(id).iter().copied()).collect()
        })
        .collect();
    let info = TokRxInfo::new(words.len() as u32, eos);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(eos_token_ids);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// Why a grammar that compiled cannot be followed.
fn no_step(message: &str) -> GrammarError {
    // So the library says that it knows of no way on.
    unusable(if message.starts_with("NoExtension") { "it allows no answer at all" } else { message })
}

/// An error of the library as one sentence: what follows its first line shows the grammar itself.
fn unusable(message: &str) -> GrammarError {
    let message = message.trim().lines().next().unwrap_or_default();
    GrammarError(format!("The grammar cannot be used: {}.", message.trim_end_matches(['.', ':'])))
}
