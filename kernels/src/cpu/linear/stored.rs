//! Reads the integer codes and the scales of stored quantized rows. Computes no value.

use crate::cpu::quantize::GROUP;
use crate::dequantize::{
    Format,
    k_quants::{Q4_K_BYTES, Q5_K_BYTES, Q6_K_BYTES, scale_and_min},
    legacy::{Q4_0_BYTES, Q4_1_BYTES, Q5_0_BYTES, Q5_1_BYTES, Q8_0_BYTES, nibbles, with_fifth_bits},
};

/// Groups in a block of the K formats.
pub(super) const SUPER_GROUPS: usize = 8;

/// A code in byte layouts is a signed value plus this.
pub(super) const BIAS: u8 = 128;

/// The codes of one group of a row: 0..16 for 4-bit formats, else signed values plus `BIAS`.
pub(super) fn codes(format: Format, row: &[u8], group: usize) -> [u8; GROUP] {
    match format {
        Format::Q4_0 => nibbles(&block(row, group, Q4_0_BYTES)[2..]),
        Format::Q4_1 => nibbles(&block(row, group, Q4_1_BYTES)[4..]),
        Format::Q5_0 => {
            let block = block(row, group, Q5_0_BYTES);
            with_fifth_bits(nibbles(&block[6..]), &block[2..6]).map(|code| code + BIAS - 16)
        }
        Format::Q5_1 => {
            let block = block(row, group, Q5_1_BYTES);
            with_fifth_bits(nibbles(&block[8..]), &block[4..8]).map(|code| code + BIAS)
        }
        Format::Q8_0 => {
            let block = block(row, group, Q8_0_BYTES);
            std::array::from_fn(|i| block[2 + i].wrapping_add(BIAS))
        }
        Format::Q4_K => {
            let block = block(row, group / SUPER_GROUPS, Q4_K_BYTES);
            half_bytes(&block[16..], group % SUPER_GROUPS)
        }
        Format::Q5_K => {
            let block = block(row, group / SUPER_GROUPS, Q5_K_BYTES);
            let group = group % SUPER_GROUPS;
            let low = half_bytes(&block[48..], group);
            std::array::from_fn(|i| (low[i] | (((block[16 + i] >> group) & 1) << 4)) + BIAS)
        }
        Format::Q6_K => {
            let block = block(row, group / SUPER_GROUPS, Q6_K_BYTES);
            six_bits(block, group % SUPER_GROUPS).map(|code| code + BIAS - 32)
        }
        Format::F32 | Format::F16 | Format::BF16 => unreachable!("{format:?} has no codes"),
    }
}

fn block(row: &[u8], index: usize, num_bytes: usize) -> &[u8] {
    &row[index * num_bytes..(index + 1) * num_bytes]
}

/// Group `group` of 64-value pairs of groups: the first in the low halves of 32 bytes.
fn half_bytes(packed: &[u8], group: usize) -> [u8; GROUP] {
    let (start, shift) = (group / 2 * GROUP, 4 * (group % 2));
    std::array::from_fn(|i| (packed[start + i] >> shift) & 0x0F)
}

/// As `dequantize::k_quants::q6_k` reads them.
fn six_bits(block: &[u8], group: usize) -> [u8; GROUP] {
    let (half, part) = (group / 4, group % 4);
    let low = &block[half * 64 + part % 2 * GROUP..];
    let high = &block[128 + half * GROUP..];
    std::array::from_fn(|i| ((low[i] >> (4 * (part / 2))) & 0x0F) | (((high[i] >> (2 * part)) & 0x03) << 4))
}

/// The stored scale of a group of a format with blocks of 32, and its minimum if it has one.
pub(super) fn half_scales(format: Format, row: &[u8], group: usize) -> ([u8; 2], Option<[u8; 2]>) {
    let block = block(row, group, format.block_bytes());
    let min = matches!(format, Format::Q4_1 | Format::Q5_1).then(|| [block[2], block[3]]);
    ([block[0], block[1]], min)
}

/// The scales of a block of 256 of `Q4_K` or `Q5_K`.
pub(super) struct SuperScales {
    /// d and dmin, IEEE halves.
    pub(super) halves: [[u8; 2]; 2],
    /// Scale and minimum per group of 32, 6 bits each.
    pub(super) groups: [(u8, u8); SUPER_GROUPS],
}

/// Of block `index` of a `Q4_K` or `Q5_K` row.
pub(super) fn super_scales(format: Format, row: &[u8], index: usize) -> SuperScales {
    let block = block(row, index, format.block_bytes());
    SuperScales {
        halves: [[block[0], block[1]], [block[2], block[3]]],
        groups: std::array::from_fn(|group| scale_and_min(&block[4..16], group)),
    }
}

/// d, an IEEE half, and 16 signed scales, one per 16 values, of block `index` of a `Q6_K` row.
pub(super) fn six_bit_scales(row: &[u8], index: usize) -> ([u8; 2], [u8; 2 * SUPER_GROUPS]) {
    let block = block(row, index, Q6_K_BYTES);
    ([block[208], block[209]], std::array::from_fn(|i| block[192 + i]))
}
