//! What the registers of a program hold during a step.

use super::program::RegisterType;
use crate::cpu::linear::Input;
use crate::cpu::quantize::QuantizedRows;

/// Rows of numbers, one per token of the step.
#[derive(Debug)]
pub(super) enum Buffer {
    /// The first `len` of `values`; what is behind them is kept for larger steps.
    Float { values: Vec<f32>, len: usize },
    /// Signed bytes in groups of 32.
    Quantized(QuantizedRows),
}

impl Buffer {
    /// No rows and no memory.
    pub(super) fn empty() -> Self {
        Self::Float { values: Vec::new(), len: 0 }
    }

    /// Hold `num_rows` rows from now on; their contents are unspecified until written.
    pub(super) fn make_room(&mut self, kind: RegisterType, num_rows: usize) {
        match (&mut *self, kind) {
            (Self::Float { values, len }, RegisterType::Float(width)) => {
                *len = num_rows * width;
                if values.len() < *len {
                    values.resize(*len, 0.0);
                }
            }
            (Self::Quantized(rows), RegisterType::Quantized(width)) if rows.num_cols() == width => {
                rows.set_num_rows(num_rows);
            }
            // New, or lost when a step failed.
            (_, RegisterType::Quantized(width)) => {
                *self = Self::Quantized(QuantizedRows::zeros(num_rows, width));
            }
            (_, RegisterType::Float(width)) => {
                let len = num_rows * width;
                *self = Self::Float { values: vec![0.0; len], len };
            }
        }
    }

    /// All rows of a float register.
    pub(super) fn float(&self) -> &[f32] {
        match self {
            Self::Float { values, len } => &values[..*len],
            Self::Quantized(_) => unreachable!("the program was compiled against the registers"),
        }
    }

    /// All rows of a float register.
    pub(super) fn float_mut(&mut self) -> &mut [f32] {
        match self {
            Self::Float { values, len } => &mut values[..*len],
            Self::Quantized(_) => unreachable!("the program was compiled against the registers"),
        }
    }

    /// A quantized register.
    pub(super) fn quantized_mut(&mut self) -> &mut QuantizedRows {
        match self {
            Self::Quantized(rows) => rows,
            Self::Float { .. } => unreachable!("the program was compiled against the registers"),
        }
    }

    /// As the input of a linear layer.
    pub(super) fn input(&self) -> Input<'_> {
        match self {
            Self::Float { values, len } => Input::Float(&values[..*len]),
            Self::Quantized(rows) => Input::Quantized(rows),
        }
    }
}
