//! A recorded forward pass: ops over registers, checked against the weights and given buffers.

mod compile;
#[cfg(test)]
mod tests;

use std::fmt;

/// An op as it was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct OpSpec {
    /// What is done.
    pub kind: String,
    /// Registers read.
    pub inputs: Vec<usize>,
    /// Names of weights.
    pub weights: Vec<String>,
    /// Registers written; one that is also read is updated in place.
    pub outputs: Vec<usize>,
    /// Layer, for ops that touch keys and values.
    pub layer: i64,
    /// Epsilon of a norm, factor of an attention's scores.
    pub value: f32,
}

/// What a weight is to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightShape {
    /// A matrix, and whether it takes quantized inputs.
    Matrix {
        /// Rows.
        num_outputs: usize,
        /// Columns.
        num_inputs: usize,
        /// Whether it takes quantized inputs.
        takes_quantized: bool,
    },
    /// Factors of a norm.
    Vector(usize),
}

/// Widths that attention ops must have.
#[derive(Debug, Clone, Copy)]
pub struct ProgramLimits {
    /// Layers with keys and values.
    pub num_layers: usize,
    /// Numbers of all query heads.
    pub query_width: usize,
    /// Numbers of all KV heads.
    pub kv_width: usize,
}

/// Numbers per token that a register holds, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterType {
    /// f32.
    Float(usize),
    /// Signed bytes in groups of 32.
    Quantized(usize),
}

/// An op that is ready to run: registers are buffers, weights are indices.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the fields are the operands that the variant's line names")]
pub enum Op {
    /// out = rows of a matrix for the step's tokens.
    Embed { weight: usize, out: usize },
    /// out = x, normed, * weight; quantized if `out` is.
    RmsNorm { x: usize, weight: usize, eps: f32, out: usize },
    /// outs = x W^T for each weight.
    Linear { x: usize, weights: Vec<usize>, outs: Vec<usize> },
    /// x += y W^T.
    AddLinear { x: usize, y: usize, weight: usize },
    /// out = silu(x G^T) * (x U^T); quantized if `out` is.
    GatedLinear { x: usize, gate: usize, up: usize, out: usize },
    /// out = x as groups of signed bytes.
    Quantize { x: usize, out: usize },
    /// Rotate q and k in place; store k and v.
    RopeStore { q: usize, k: usize, v: usize, layer: usize },
    /// out = attention of q to what is stored.
    Attention { q: usize, layer: usize, scale: f32, out: usize },
    /// out = silu(gate) * up.
    SiluMul { gate: usize, up: usize, out: usize },
    /// out = a + b.
    Add { a: usize, b: usize, out: usize },
    /// Logits of the sampling rows of x, after a norm if there is one: (weight, eps).
    Logits { x: usize, norm: Option<(usize, f32)>, weight: usize },
}

/// Ops and the buffers they need.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// In order.
    pub ops: Vec<Op>,
    /// What each buffer holds.
    pub buffers: Vec<RegisterType>,
}

/// An op that does not fit the weights, the registers or the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramError(String);

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProgramError {}

impl Program {
    /// Check a recorded program and assign buffers. The last op, and no other, gives the logits.
    pub fn compile(
        specs: &[OpSpec],
        limits: &ProgramLimits,
        find: impl Fn(&str) -> Option<(usize, WeightShape)>,
    ) -> Result<Self, ProgramError> {
        compile::compile(specs, limits, find)
    }
}
