//! What a grammar may cost. The engine compiles with the same limits:
//! `engine/rung/grammar/compiler.py`; a contract test compares the two.

use llguidance::api::ParserLimits;

/// Bytes of a schema, pattern, list of choices or Lark text.
pub const MAX_SOURCE_BYTES: usize = 1024 * 1024;

const INITIAL_LEXER_FUEL: u64 = 1_000_000;
const STEP_LEXER_FUEL: u64 = 200_000;
const STEP_MAX_ITEMS: usize = 50_000;
const MAX_ITEMS_IN_ROW: usize = 10_000;
const MAX_LEXER_STATES: usize = 10_000;
const MAX_GRAMMAR_SIZE: usize = 500_000;

pub(super) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: MAX_ITEMS_IN_ROW,
        initial_lexer_fuel: INITIAL_LEXER_FUEL,
        step_lexer_fuel: STEP_LEXER_FUEL,
        step_max_items: STEP_MAX_ITEMS,
        max_lexer_states: MAX_LEXER_STATES,
        max_grammar_size: MAX_GRAMMAR_SIZE,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}
