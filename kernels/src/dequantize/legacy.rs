//! Blocks of 32 values with one half-precision scale `d` and, in the `_1` formats, a minimum `m`.
//!
//! 4-bit parts are packed so that byte j holds value j below and value j + 16 above; the fifth
//! bits of the Q5 formats are one little-endian u32. Source: the `block_q*` structures of ggml.

use super::half_at;

/// Values in a block.
pub(super) const BLOCK: usize = 32;
/// d, then 32 signed bytes.
pub(super) const Q8_0_BYTES: usize = 34;
/// d, then 16 bytes of nibbles.
pub(super) const Q4_0_BYTES: usize = 18;
/// d, m, then 16 bytes of nibbles.
pub(super) const Q4_1_BYTES: usize = 20;
/// d, fifth bits, then 16 bytes of nibbles.
pub(super) const Q5_0_BYTES: usize = 22;
/// d, m, fifth bits, then 16 bytes of nibbles.
pub(super) const Q5_1_BYTES: usize = 24;

/// d * q, q in -128..=127.
pub(super) fn q8_0(block: &[u8; Q8_0_BYTES], out: &mut [f32; BLOCK]) {
    let d = half_at(block, 0);
    for (value, &q) in out.iter_mut().zip(&block[2..]) {
        *value = f32::from(q.cast_signed()) * d;
    }
}

/// d * (q - 8), q in 0..16.
pub(super) fn q4_0(block: &[u8; Q4_0_BYTES], out: &mut [f32; BLOCK]) {
    let d = half_at(block, 0);
    let q = nibbles(&block[2..]);
    for (value, q) in out.iter_mut().zip(q) {
        *value = d * f32::from(q.cast_signed() - 8);
    }
}

/// d * q + m, q in 0..16.
pub(super) fn q4_1(block: &[u8; Q4_1_BYTES], out: &mut [f32; BLOCK]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let q = nibbles(&block[4..]);
    for (value, q) in out.iter_mut().zip(q) {
        *value = d * f32::from(q) + m;
    }
}

/// d * (q - 16), q in 0..32.
pub(super) fn q5_0(block: &[u8; Q5_0_BYTES], out: &mut [f32; BLOCK]) {
    let d = half_at(block, 0);
    let q = with_fifth_bits(nibbles(&block[6..]), &block[2..6]);
    for (value, q) in out.iter_mut().zip(q) {
        *value = d * f32::from(q.cast_signed() - 16);
    }
}

/// d * q + m, q in 0..32.
pub(super) fn q5_1(block: &[u8; Q5_1_BYTES], out: &mut [f32; BLOCK]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let q = with_fifth_bits(nibbles(&block[8..]), &block[4..8]);
    for (value, q) in out.iter_mut().zip(q) {
        *value = d * f32::from(q) + m;
    }
}

fn nibbles(packed: &[u8]) -> [u8; BLOCK] {
    let mut q = [0; BLOCK];
    for (j, &byte) in packed.iter().enumerate() {
        q[j] = byte & 0x0F;
        q[j + BLOCK / 2] = byte >> 4;
    }
    q
}

fn with_fifth_bits(mut q: [u8; BLOCK], bits: &[u8]) -> [u8; BLOCK] {
    let bits = u32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
    for (j, q) in q.iter_mut().enumerate() {
        *q |= (((bits >> j) & 1) as u8) << 4;
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_and_fifth_bits_land_where_the_format_says() {
        let mut block = [0; Q5_1_BYTES];
        block[0..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
        block[2..4].copy_from_slice(&half::f16::from_f32(-1.0).to_le_bytes());
        // Fifth bits of values 0 and 31.
        block[4..8].copy_from_slice(&0x8000_0001_u32.to_le_bytes());
        // Byte 0 holds values 0 and 16, byte 15 holds values 15 and 31.
        block[8] = 0x21;
        block[23] = 0x43;
        let mut out = [0.0; BLOCK];
        q5_1(&block, &mut out);
        let mut expected = [-1.0_f32; BLOCK];
        expected[0] = 0.5 * 17.0 - 1.0;
        expected[16] = 0.5 * 2.0 - 1.0;
        expected[15] = 0.5 * 3.0 - 1.0;
        expected[31] = 0.5 * 20.0 - 1.0;
        assert_eq!(out.map(f32::to_bits), expected.map(f32::to_bits));
    }

    #[test]
    fn q8_0_keeps_the_lowest_code() {
        let mut block = [0x80; Q8_0_BYTES];
        block[0..2].copy_from_slice(&half::f16::from_f32(2.0).to_le_bytes());
        let mut out = [0.0; BLOCK];
        q8_0(&block, &mut out);
        assert_eq!(out.map(f32::to_bits), [-256.0_f32; BLOCK].map(f32::to_bits));
    }
}
