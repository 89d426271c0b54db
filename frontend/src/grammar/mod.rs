//! What an answer must look like: constraints to one llguidance grammar, checked before admission.
//!
//! Pure: no HTTP, no protobuf. Compiling takes up to a second of processor time for the largest
//! grammars that the limits let through, so it belongs on a thread that may block.

mod compiler;
mod constraint;
mod limits;

pub use compiler::GrammarCompiler;
pub use constraint::{Calls, Constraint, Literal, Tag};
pub use limits::MAX_SOURCE_BYTES;

/// Why a constraint cannot be used: one sentence for whoever sent it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(String);
