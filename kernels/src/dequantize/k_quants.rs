//! Super-blocks of 256 values: a half-precision scale `d` (and `dmin`) over groups of 32 or 16
//! values, each with its own small integer scale. Source: the `block_q*_K` structures of ggml.

use super::{SUPER_BLOCK, half_at};

/// d, dmin, 12 bytes of scales, 128 bytes of nibbles.
pub(super) const Q4_K_BYTES: usize = 144;
/// d, dmin, 12 bytes of scales, 32 bytes of fifth bits, 128 bytes of nibbles.
pub(super) const Q5_K_BYTES: usize = 176;
/// 128 bytes of nibbles, 64 bytes of upper bits, 16 signed scales, d.
pub(super) const Q6_K_BYTES: usize = 210;

const GROUP: usize = 32;

/// (d * scale) * q - (dmin * min) per group of 32, q in 0..16.
pub(super) fn q4_k(block: &[u8; Q4_K_BYTES], out: &mut [f32; SUPER_BLOCK]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, packed) = (&block[4..16], &block[16..]);
    for (group, values) in out.chunks_exact_mut(GROUP).enumerate() {
        let (scale, min) = scale_and_min(scales, group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let shift = 4 * (group % 2);
        for (value, &byte) in values.iter_mut().zip(&packed[group / 2 * GROUP..]) {
            *value = scale * f32::from((byte >> shift) & 0x0F) - min;
        }
    }
}

/// (d * scale) * q - (dmin * min) per group of 32, q in 0..32.
pub(super) fn q5_k(block: &[u8; Q5_K_BYTES], out: &mut [f32; SUPER_BLOCK]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (scales, fifth_bits, packed) = (&block[4..16], &block[16..48], &block[48..]);
    for (group, values) in out.chunks_exact_mut(GROUP).enumerate() {
        let (scale, min) = scale_and_min(scales, group);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        let shift = 4 * (group % 2);
        let bytes = packed[group / 2 * GROUP..].iter().zip(fifth_bits);
        for (value, (&byte, &bits)) in values.iter_mut().zip(bytes) {
            let q = ((byte >> shift) & 0x0F) | (((bits >> group) & 1) << 4);
            *value = scale * f32::from(q) - min;
        }
    }
}

/// (d * scale) * (q - 32) per group of 16, q in 0..64.
pub(super) fn q6_k(block: &[u8; Q6_K_BYTES], out: &mut [f32; SUPER_BLOCK]) {
    let (packed, upper_bits, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (group, values) in out.chunks_exact_mut(GROUP).enumerate() {
        // Each half of the block: two groups in the low nibbles of 64 bytes, two in the high ones.
        let (half, part) = (group / 4, group % 4);
        let (low_shift, high_shift) = (4 * (part / 2), 2 * part);
        let low = &packed[half * 64 + part % 2 * GROUP..];
        let high = &upper_bits[half * GROUP..];
        for (j, value) in values.iter_mut().enumerate() {
            let q = ((low[j] >> low_shift) & 0x0F) | (((high[j] >> high_shift) & 0x03) << 4);
            let scale = d * f32::from(scales[group * 2 + j / 16].cast_signed());
            *value = scale * f32::from(q.cast_signed() - 32);
        }
    }
}

/// The 6-bit scale and minimum of a group of `Q4_K` and `Q5_K`.
///
/// Bytes 0..4 hold the scales of groups 0..4 in their lower 6 bits, bytes 4..8 the minima; bytes
/// 8..12 hold the lower 4 bits of scale and minimum of groups 4..8, whose upper 2 bits are the
/// upper 2 bits of bytes 0..4 and 4..8.
fn scale_and_min(scales: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (scales[group] & 0x3F, scales[group + 4] & 0x3F);
    }
    let low = scales[group + 4];
    let scale = (low & 0x0F) | ((scales[group - 4] >> 2) & 0x30);
    let min = (low >> 4) | ((scales[group] >> 2) & 0x30);
    (scale, min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_and_minima_unpack() {
        let mut scales = [0; 12];
        // Group 0: scale 0b00_0101, group 4's upper scale bits 0b10.
        scales[0] = 0b1000_0101;
        // Group 0: minimum 0b00_0011, group 4's upper minimum bits 0b01.
        scales[4] = 0b0100_0011;
        // Group 4: lower minimum bits 0b1100, lower scale bits 0b1001.
        scales[8] = 0b1100_1001;
        assert_eq!(scale_and_min(&scales, 0), (0b00_0101, 0b00_0011));
        assert_eq!(scale_and_min(&scales, 4), (0b10_1001, 0b01_1100));
    }

    #[test]
    fn q6_k_groups_land_where_the_format_says() {
        let mut block = [0; Q6_K_BYTES];
        block[208..210].copy_from_slice(&half::f16::from_f32(1.0).to_le_bytes());
        block[192..208].fill(1);
        // Second half, byte 64 + 32 + 5: low nibble is value 128 + 32 + 5, high is 128 + 96 + 5.
        block[64 + 32 + 5] = 0x72;
        // Its upper bits: pairs 1 and 3 of byte 32 + 5.
        block[128 + 32 + 5] = 0b10_00_01_00;
        let mut out = [0.0; SUPER_BLOCK];
        q6_k(&block, &mut out);
        let mut expected = [-32.0_f32; SUPER_BLOCK];
        expected[128 + 32 + 5] = 18.0 - 32.0;
        expected[128 + 96 + 5] = 39.0 - 32.0;
        assert_eq!(out.map(f32::to_bits), expected.map(f32::to_bits));
    }
}
