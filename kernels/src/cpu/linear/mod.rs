//! Linear layers over weights repacked once: y = x W^T, without bias.
//!
//! Sixteen outputs lie side by side and each owns a lane, so a row's result is the same in any
//! batch, on any thread, and (with int8 activations) on any instruction set.

mod codes;
mod float;
mod gated;
mod int8;
mod quantized;
mod scales;
mod stored;
mod strips;
#[cfg(test)]
mod tests;
mod units;
mod widen;

use std::fmt;

use super::isa::Isa;
use super::pool::{Pool, PoolError};
use super::quantize::QuantizedRows;
use crate::dequantize::{DequantizeError, Format};
use float::FloatWeight;
use quantized::QuantizedWeight;

pub use gated::{GatedOutput, gated_silu};
pub use units::{Output, Projection, project};

/// Where kernels run.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// The threads.
    pub pool: &'a Pool,
    /// The instruction set.
    pub isa: Isa,
}

/// Activations `[num_rows, num_inputs]`.
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Signed bytes in groups of 32; for quantized weights only.
    Quantized(&'a QuantizedRows),
    /// f32; for every weight.
    Float(&'a [f32]),
}

/// What is wrong with a weight or a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinearError {
    /// The weight cannot be stored so.
    Stored(DequantizeError),
    /// No rows or no columns.
    Empty {
        /// Rows asked for.
        num_outputs: usize,
        /// Columns asked for.
        num_inputs: usize,
    },
    /// The stored bytes do not make the matrix.
    Size {
        /// Bytes given.
        num_bytes: usize,
        /// Bytes that the matrix takes.
        expected: usize,
    },
    /// Activations or results have another shape than the weights and rows ask for.
    Shape {
        /// Which argument.
        what: &'static str,
        /// Its number of values.
        actual: usize,
        /// The number asked for.
        expected: usize,
    },
    /// Quantized activations for weights stored as floats.
    FloatWeight,
    /// The threads failed.
    Pool(PoolError),
}

impl fmt::Display for LinearError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(error) => error.fmt(f),
            Self::Empty { num_outputs, num_inputs } => {
                write!(f, "a weight matrix of [{num_outputs}, {num_inputs}] has no values")
            }
            Self::Size { num_bytes, expected } => {
                write!(f, "the weight has {num_bytes} bytes; its shape and format take {expected}")
            }
            Self::Shape { what, actual, expected } => {
                write!(f, "{what} has {actual} values; {expected} are needed")
            }
            Self::FloatWeight => {
                write!(f, "a weight stored as floats needs float activations")
            }
            Self::Pool(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LinearError {}

/// A weight matrix `[num_outputs, num_inputs]`, repacked for the kernels in its stored precision.
#[derive(Debug)]
pub struct PackedLinear {
    format: Format,
    num_outputs: usize,
    num_inputs: usize,
    storage: Storage,
}

#[derive(Debug)]
enum Storage {
    Float(FloatWeight),
    Quantized(QuantizedWeight),
}

impl PackedLinear {
    /// Repack rows stored in `format`, `[num_outputs, row_bytes]`.
    pub fn pack(
        format: Format,
        data: &[u8],
        num_outputs: usize,
        num_inputs: usize,
        pool: &Pool,
    ) -> Result<Self, LinearError> {
        if num_outputs == 0 || num_inputs == 0 {
            return Err(LinearError::Empty { num_outputs, num_inputs });
        }
        let row_bytes = format.row_bytes(num_inputs).map_err(LinearError::Stored)?;
        let expected = row_bytes.checked_mul(num_outputs);
        if expected != Some(data.len()) {
            return Err(LinearError::Size {
                num_bytes: data.len(),
                expected: expected.unwrap_or(usize::MAX),
            });
        }
        let storage = if float::is_float(format) {
            FloatWeight::pack(format, data, num_outputs, num_inputs, pool).map(Storage::Float)?
        } else {
            QuantizedWeight::pack(format, data, num_outputs, num_inputs, pool).map(Storage::Quantized)?
        };
        Ok(Self { format, num_outputs, num_inputs, storage })
    }

    /// The format it was stored in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows of the matrix.
    pub fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// Columns of the matrix.
    pub fn num_inputs(&self) -> usize {
        self.num_inputs
    }

    /// Bytes resident.
    pub fn num_bytes(&self) -> usize {
        match &self.storage {
            Storage::Float(weight) => weight.num_bytes(),
            Storage::Quantized(weight) => weight.num_bytes(),
        }
    }

    /// Whether it takes `Input::Quantized`.
    pub fn takes_quantized(&self) -> bool {
        matches!(self.storage, Storage::Quantized(_))
    }

    /// Row `output` as f32 `[num_inputs]`, bit for bit as `dequantize` gives it: how a matrix
    /// serves as embedding table and output head at once.
    ///
    /// # Panics
    /// If there is no such row or `out` has another size.
    pub fn dequantize_row(&self, output: usize, out: &mut [f32]) {
        assert!(
            output < self.num_outputs && out.len() == self.num_inputs,
            "row {output} into {} values of a matrix [{}, {}]",
            out.len(),
            self.num_outputs,
            self.num_inputs
        );
        match &self.storage {
            Storage::Float(weight) => weight.dequantize_row(output, out),
            Storage::Quantized(weight) => weight.dequantize_row(output, out),
        }
    }
}
