//! Stored weight formats to float32. Reads no files and chooses no layout for kernels.
//!
//! A row is a whole number of blocks; a block is a fixed number of bytes that holds a fixed
//! number of values. Results equal the `gguf` Python package's bit for bit: the same float32
//! operations in the same order, never fused.

mod float;
pub(crate) mod k_quants;
pub(crate) mod legacy;

use std::fmt;

/// Values in a block of the K formats.
const SUPER_BLOCK: usize = 256;

/// How the values of a tensor are stored; named as in GGUF.
#[expect(non_camel_case_types, reason = "the names of the formats")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// 8 bits, one scale per 32 values.
    Q8_0,
    /// 4 bits, one scale per 32 values.
    Q4_0,
    /// 4 bits, scale and minimum per 32 values.
    Q4_1,
    /// 5 bits, one scale per 32 values.
    Q5_0,
    /// 5 bits, scale and minimum per 32 values.
    Q5_1,
    /// 4 bits, 6-bit scale and minimum per 32 values, 256 values per block.
    Q4_K,
    /// 5 bits, 6-bit scale and minimum per 32 values, 256 values per block.
    Q5_K,
    /// 6 bits, 8-bit scale per 16 values, 256 values per block.
    Q6_K,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// The name in GGUF and in Python.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// The format of that name.
    pub fn from_name(name: &str) -> Result<Self, DequantizeError> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| DequantizeError::UnknownFormat(name.to_owned()))
    }

    /// Values in a block.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => legacy::BLOCK,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => SUPER_BLOCK,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => legacy::Q8_0_BYTES,
            Self::Q4_0 => legacy::Q4_0_BYTES,
            Self::Q4_1 => legacy::Q4_1_BYTES,
            Self::Q5_0 => legacy::Q5_0_BYTES,
            Self::Q5_1 => legacy::Q5_1_BYTES,
            Self::Q4_K => k_quants::Q4_K_BYTES,
            Self::Q5_K => k_quants::Q5_K_BYTES,
            Self::Q6_K => k_quants::Q6_K_BYTES,
        }
    }

    /// Bytes of a row of `num_cols` values.
    pub fn row_bytes(self, num_cols: usize) -> Result<usize, DequantizeError> {
        if !num_cols.is_multiple_of(self.block_len()) {
            return Err(DequantizeError::PartialBlock { format: self, num_cols });
        }
        (num_cols / self.block_len())
            .checked_mul(self.block_bytes())
            .ok_or(DequantizeError::TooLarge { format: self, num_cols })
    }
}

/// What is wrong with the arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DequantizeError {
    /// No such format.
    UnknownFormat(String),
    /// A row does not end with a block.
    PartialBlock {
        /// The format asked for.
        format: Format,
        /// Values per row asked for.
        num_cols: usize,
    },
    /// A row's size does not fit an integer.
    TooLarge {
        /// The format asked for.
        format: Format,
        /// Values per row asked for.
        num_cols: usize,
    },
    /// Bytes and values do not describe the same number of blocks.
    Length {
        /// The format asked for.
        format: Format,
        /// Bytes given.
        num_bytes: usize,
        /// Values asked for.
        num_values: usize,
    },
}

impl fmt::Display for DequantizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownFormat(name) => {
                let known = Format::ALL.map(Format::name).join(", ");
                write!(f, "unknown weight format {name:?}; known: {known}")
            }
            Self::PartialBlock { format, num_cols } => write!(
                f,
                "a row of {num_cols} values is not a whole number of {} blocks of {} values",
                format.name(),
                format.block_len()
            ),
            Self::TooLarge { format, num_cols } => {
                write!(f, "a row of {num_cols} {} values is too large", format.name())
            }
            Self::Length { format, num_bytes, num_values } => write!(
                f,
                "{num_bytes} bytes do not hold {num_values} values of format {}: {} bytes per {} values",
                format.name(),
                format.block_bytes(),
                format.block_len()
            ),
        }
    }
}

impl std::error::Error for DequantizeError {}

/// Decode all of `data` into `out`. Rows are whole blocks, so any number of whole rows may be
/// given as one slice.
pub fn dequantize(format: Format, data: &[u8], out: &mut [f32]) -> Result<(), DequantizeError> {
    let num_blocks = data.len() / format.block_bytes();
    if !data.len().is_multiple_of(format.block_bytes()) || num_blocks * format.block_len() != out.len() {
        return Err(DequantizeError::Length { format, num_bytes: data.len(), num_values: out.len() });
    }
    match format {
        Format::F32 => each_block(data, out, float::f32_value),
        Format::F16 => each_block(data, out, float::f16_value),
        Format::BF16 => each_block(data, out, float::bf16_value),
        Format::Q8_0 => each_block(data, out, legacy::q8_0),
        Format::Q4_0 => each_block(data, out, legacy::q4_0),
        Format::Q4_1 => each_block(data, out, legacy::q4_1),
        Format::Q5_0 => each_block(data, out, legacy::q5_0),
        Format::Q5_1 => each_block(data, out, legacy::q5_1),
        Format::Q4_K => each_block(data, out, k_quants::q4_k),
        Format::Q5_K => each_block(data, out, k_quants::q5_k),
        Format::Q6_K => each_block(data, out, k_quants::q6_k),
    }
    Ok(())
}

fn each_block<const BYTES: usize, const LEN: usize>(
    data: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, _) = data.as_chunks::<BYTES>();
    let (values, _) = out.as_chunks_mut::<LEN>();
    for (block, values) in blocks.iter().zip(values) {
        decode(block, values);
    }
}

/// The half-precision number at `offset` of a block.
fn half_at(block: &[u8], offset: usize) -> f32 {
    half::f16::from_le_bytes([block[offset], block[offset + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_bytes_counts_blocks() {
        assert_eq!(Format::F32.row_bytes(3), Ok(12));
        assert_eq!(Format::Q4_1.row_bytes(64), Ok(40));
        assert_eq!(Format::Q6_K.row_bytes(512), Ok(420));
        assert_eq!(
            Format::Q8_0.row_bytes(33),
            Err(DequantizeError::PartialBlock { format: Format::Q8_0, num_cols: 33 })
        );
        assert_eq!(
            Format::F32.row_bytes(usize::MAX),
            Err(DequantizeError::TooLarge { format: Format::F32, num_cols: usize::MAX })
        );
    }

    #[test]
    fn names_are_unique_and_found() {
        for format in Format::ALL {
            assert_eq!(Format::from_name(format.name()), Ok(format));
        }
        let message = Format::from_name("Q3_X").err().map(|error| error.to_string());
        assert_eq!(
            message.as_deref(),
            Some(
                "unknown weight format \"Q3_X\"; known: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
            )
        );
    }

    #[test]
    fn lengths_must_agree() {
        for format in Format::ALL {
            let mut out = vec![0.0; 2 * format.block_len()];
            for num_bytes in [0, format.block_bytes(), 2 * format.block_bytes() - 1, 3 * format.block_bytes()]
            {
                let result = dequantize(format, &vec![0; num_bytes], &mut out);
                assert!(matches!(result, Err(DequantizeError::Length { .. })), "{format:?} {num_bytes}");
            }
            assert_eq!(dequantize(format, &vec![0; 2 * format.block_bytes()], &mut out), Ok(()));
        }
    }
}
