//! Plain floating-point formats. A block is one value.

#![expect(clippy::trivially_copy_pass_by_ref, reason = "the signature of every block decoder")]

/// IEEE single precision, little-endian.
pub(super) fn f32_value(block: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*block);
}

/// IEEE half precision, little-endian.
pub(super) fn f16_value(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = half::f16::from_le_bytes(*block).to_f32();
}

/// The upper half of a single, little-endian.
pub(super) fn bf16_value(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let mut out = [0.0];
        f32_value(&1.5_f32.to_le_bytes(), &mut out);
        assert_eq!(out[0].to_bits(), 1.5_f32.to_bits());
        f16_value(&0x0001_u16.to_le_bytes(), &mut out);
        assert_eq!(out[0].to_bits(), 2.0_f32.powi(-24).to_bits());
        f16_value(&0xFC00_u16.to_le_bytes(), &mut out);
        assert_eq!(out[0].to_bits(), f32::NEG_INFINITY.to_bits());
        bf16_value(&0xBF80_u16.to_le_bytes(), &mut out);
        assert_eq!(out[0].to_bits(), (-1.0_f32).to_bits());
    }
}
