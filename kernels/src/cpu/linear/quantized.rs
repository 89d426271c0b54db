//! Quantized weights repacked for the kernels: sixteen outputs side by side.
//!
//! A tile is 16 outputs; a group is 32 inputs. Per tile and group, 8 chunks of 64 bytes hold
//! 4 consecutive inputs of each output; in nibble layouts chunks j and j + 4 share bytes, the
//! first below. Scales and minima are columns of 16. Outputs beyond the last are zeros.

#![expect(unsafe_code, reason = "units write their own tiles of one slice")]

use super::LinearError;
use super::scales::ScaleLayout;
use super::stored::{self, BIAS};
use crate::cpu::buffer::Buffer;
use crate::cpu::pool::Pool;
use crate::cpu::quantize::GROUP;
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANE_BYTES, LANES};
use crate::dequantize::Format;

/// How codes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CodeLayout {
    /// 4 bits; the value is code - zero.
    Nibbles {
        /// 0 or 8.
        zero: u8,
    },
    /// 8 bits; the value is code - 128.
    Bytes,
}

impl CodeLayout {
    /// Bytes of one group of a tile.
    pub(super) fn group_bytes(self) -> usize {
        match self {
            Self::Nibbles { .. } => 4 * LANE_BYTES,
            Self::Bytes => 8 * LANE_BYTES,
        }
    }

    /// The code of the value zero.
    pub(super) fn zero(self) -> u8 {
        match self {
            Self::Nibbles { zero } => zero,
            Self::Bytes => BIAS,
        }
    }

    /// Put the codes of one output's group in place.
    fn write(self, codes: &[u8; GROUP], lane: usize, group: &mut [u8]) {
        for (chunk, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
            let (chunk, shift) = match self {
                Self::Nibbles { .. } => (chunk % 4, 4 * (chunk / 4)),
                Self::Bytes => (chunk, 0),
            };
            let start = chunk * LANE_BYTES + 4 * lane;
            for (byte, code) in group[start..start + 4].iter_mut().zip(codes) {
                *byte |= code << shift;
            }
        }
    }

    /// The codes of one output's group.
    fn read(self, lane: usize, group: &[u8]) -> [u8; GROUP] {
        std::array::from_fn(|i| {
            let (chunk, byte) = (i / 4, i % 4);
            match self {
                Self::Nibbles { .. } => {
                    let packed = group[chunk % 4 * LANE_BYTES + 4 * lane + byte];
                    (packed >> (4 * (chunk / 4))) & 0x0F
                }
                Self::Bytes => group[chunk * LANE_BYTES + 4 * lane + byte],
            }
        })
    }
}

/// A quantized weight matrix `[num_outputs, num_inputs]`.
#[derive(Debug)]
pub(super) struct QuantizedWeight {
    pub(super) code_layout: CodeLayout,
    pub(super) scale_layout: ScaleLayout,
    num_outputs: usize,
    num_groups: usize,
    /// `[num_tiles, tile_bytes]`: codes `[num_groups, group_bytes]`, then scales, then up to 32
    /// bytes that fill the cache line.
    tiles: Buffer<u8>,
    tile_bytes: usize,
}

/// Codes and scales of one tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl QuantizedWeight {
    /// Repack stored rows; their sizes are checked by the caller.
    pub(super) fn pack(
        format: Format,
        data: &[u8],
        num_outputs: usize,
        num_inputs: usize,
        pool: &Pool,
    ) -> Result<Self, LinearError> {
        let (code_layout, scale_layout) = layouts(format);
        let row_bytes = format.row_bytes(num_inputs).map_err(LinearError::Stored)?;
        let (num_tiles, num_groups) = (num_outputs.div_ceil(LANES), num_inputs / GROUP);
        let code_bytes = num_groups * code_layout.group_bytes();
        let scale_bytes = scale_layout.tile_bytes(num_groups);
        let tile_bytes = (code_bytes + scale_bytes).next_multiple_of(LANE_BYTES);
        let mut tiles = Buffer::zeroed(num_tiles * tile_bytes);
        let shared = SharedSlice::new(&mut tiles);
        pool.run(num_tiles, |tile, _| {
            // SAFETY: each unit has its own tile.
            let packed = unsafe { shared.part(tile * tile_bytes..(tile + 1) * tile_bytes) };
            let (codes, scales) = packed.split_at_mut(code_bytes);
            let scales = &mut scales[..scale_bytes];
            for lane in 0..LANES.min(num_outputs - tile * LANES) {
                let start = (tile * LANES + lane) * row_bytes;
                let row = &data[start..start + row_bytes];
                let groups = codes.chunks_exact_mut(code_layout.group_bytes());
                for (index, group) in groups.enumerate() {
                    code_layout.write(&stored::codes(format, row, index), lane, group);
                }
                scale_layout.write(format, row, lane, scales);
            }
        })
        .map_err(LinearError::Pool)?;
        Ok(Self { code_layout, scale_layout, num_outputs, num_groups, tiles, tile_bytes })
    }

    /// Bytes resident.
    pub(super) fn num_bytes(&self) -> usize {
        self.tiles.num_bytes()
    }

    /// Bytes of a tile, which follow each other.
    pub(super) fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Groups of inputs.
    pub(super) fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// Codes and scales of tile `index`.
    pub(super) fn tile(&self, index: usize) -> Tile<'_> {
        let tile = &self.tiles[index * self.tile_bytes..(index + 1) * self.tile_bytes];
        let (codes, scales) = tile.split_at(self.num_groups * self.code_layout.group_bytes());
        let scales = &scales[..self.scale_layout.tile_bytes(self.num_groups)];
        Tile { codes, scales }
    }

    /// The values of one output, bit for bit those of `dequantize`.
    pub(super) fn dequantize_row(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.num_outputs && out.len() == self.num_groups * GROUP);
        let (tile, lane) = (self.tile(output / LANES), output % LANES);
        let zero = i16::from(self.code_layout.zero());
        let groups = tile.codes.chunks_exact(self.code_layout.group_bytes());
        for ((index, group), out) in groups.enumerate().zip(out.as_chunks_mut::<GROUP>().0) {
            let codes = self.code_layout.read(lane, group);
            let (scales, min) = self.scale_layout.read(tile.scales, index, lane);
            for (i, (value, code)) in out.iter_mut().zip(codes).enumerate() {
                let product = scales[i / (GROUP / 2)] * f32::from(i16::from(code) - zero);
                *value = min.map_or(product, |min| product + min);
            }
        }
    }
}

/// How a format is laid out.
pub(super) fn layouts(format: Format) -> (CodeLayout, ScaleLayout) {
    match format {
        Format::Q4_0 => (CodeLayout::Nibbles { zero: 8 }, ScaleLayout::Half),
        Format::Q4_1 => (CodeLayout::Nibbles { zero: 0 }, ScaleLayout::HalfMin),
        Format::Q4_K => (CodeLayout::Nibbles { zero: 0 }, ScaleLayout::SuperMin),
        Format::Q5_0 | Format::Q8_0 => (CodeLayout::Bytes, ScaleLayout::Half),
        Format::Q5_1 => (CodeLayout::Bytes, ScaleLayout::HalfMin),
        Format::Q5_K => (CodeLayout::Bytes, ScaleLayout::SuperMin),
        Format::Q6_K => (CodeLayout::Bytes, ScaleLayout::Super),
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("{format:?} is not quantized"),
    }
}
