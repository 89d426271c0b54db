//! The operations with AVX-512 F, BW, VL, DQ and VNNI.

#![expect(unsafe_code, reason = "intrinsics, called where the token proves the processor has them")]
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all: an `Avx512` exists only after detection, and pointers come from \
              references to arrays of the size that is read or written"
)]

use std::arch::is_x86_feature_detected as has;
#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::{Isa, LANE_BYTES, LANES, Simd};

/// Proof that the processor has AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Debug, Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// A token, if the processor has all of it.
    pub fn detect() -> Option<Self> {
        let found = super::Avx2::detect().is_some()
            && has!("avx512f")
            && has!("avx512bw")
            && has!("avx512vl")
            && has!("avx512dq")
            && has!("avx512vnni");
        found.then_some(Self(()))
    }
}

/// The first `len` lanes, at most sixteen.
#[inline(always)]
fn first_lanes(len: usize) -> __mmask16 {
    assert!(len <= LANES, "a vector has {LANES} lanes");
    ((1_u32 << len) - 1) as __mmask16
}

/// Classes of `vfpclassps`: quiet NaN, both infinities, signalling NaN.
const NOT_FINITE: i32 = 0x01 | 0x08 | 0x10 | 0x80;

/// Both reductions at once: after the first level, each vector has a half of the register.
#[inline(always)]
fn reduce_pair([a, b]: [__m512; 2], f: impl Fn(__m512, __m512) -> __m512) -> [f32; 2] {
    unsafe {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b);
        let x = f(low, high);
        let x = f(x, _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x));
        let x = f(x, _mm512_permute_ps::<0b01_00_11_10>(x));
        let x = f(x, _mm512_permute_ps::<0b10_11_00_01>(x));
        [_mm512_cvtss_f32(x), _mm256_cvtss_f32(_mm512_extractf32x8_ps::<1>(x))]
    }
}

impl Simd for Avx512 {
    type F32 = __m512;
    type I32 = __m512i;
    type Bytes = __m512i;
    type Signed = __m512i;
    type NibbleSums = __m512i;

    const ISA: Isa = Isa::Avx512;
    const ROWS: usize = 8;
    const STRIPS: bool = true;

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn load_partial(self, values: &[f32]) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps(first_lanes(values.len()), values.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512, values: &mut [f32; LANES]) {
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn store_partial(self, vector: __m512, values: &mut [f32]) {
        unsafe { _mm512_mask_storeu_ps(values.as_mut_ptr(), first_lanes(values.len()), vector) }
    }

    #[inline(always)]
    fn load_bf16(self, values: &[u16; LANES]) -> __m512 {
        unsafe {
            let halves = _mm256_loadu_si256(values.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }
    }

    #[inline(always)]
    fn load_bf16_pairs(self, values: &[[u16; 2]; LANES]) -> [__m512; 2] {
        unsafe {
            let pairs = _mm512_loadu_si512(values.as_ptr().cast());
            let first = _mm512_slli_epi32::<16>(pairs);
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed()));
            [_mm512_castsi512_ps(first), _mm512_castsi512_ps(second)]
        }
    }

    #[inline(always)]
    fn store_bf16(self, vector: __m512, values: &mut [u16; LANES]) {
        unsafe {
            let bits = _mm512_castps_si512(vector);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let rounded = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, bias), nan, quiet);
            let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            _mm256_storeu_si256(values.as_mut_ptr().cast(), halves);
        }
    }

    #[inline(always)]
    fn load_f16(self, values: &[u8; 2 * LANES]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(values.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_u8(self, values: &[u8; LANES]) -> __m512 {
        unsafe {
            let bytes = _mm_loadu_si128(values.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))
        }
    }

    #[inline(always)]
    fn load_i8(self, values: &[i8; LANES]) -> __m512 {
        unsafe {
            let bytes = _mm_loadu_si128(values.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
        }
    }

    #[inline(always)]
    fn store_i8(self, vector: __m512, values: &mut [i8; LANES]) {
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(vector));
            _mm_storeu_si128(values.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }

    #[inline(always)]
    fn to_i32(self, a: __m512) -> __m512i {
        unsafe { _mm512_cvtps_epi32(a) }
    }

    #[inline(always)]
    fn to_bits(self, a: __m512) -> __m512i {
        unsafe { _mm512_castps_si512(a) }
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    fn add_i32(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: __m512i) -> __m512i {
        unsafe { _mm512_slli_epi32::<BITS>(a) }
    }

    #[inline(always)]
    fn bits_to_f32(self, a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; LANE_BYTES]) -> __m512i {
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn low_nibbles(self, bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F)) }
    }

    #[inline(always)]
    fn high_nibbles(self, bytes: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), _mm512_set1_epi8(0x0F)) }
    }

    #[inline(always)]
    fn store_bytes(self, bytes: __m512i, out: &mut [u8; LANE_BYTES]) {
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), bytes) }
    }

    #[inline(always)]
    fn byte_to_f32<const BYTE: usize>(self, bytes: __m512i) -> __m512 {
        unsafe {
            let shifted = match BYTE {
                0 => bytes,
                1 => _mm512_srli_epi32::<8>(bytes),
                2 => _mm512_srli_epi32::<16>(bytes),
                _ => _mm512_srli_epi32::<24>(bytes),
            };
            _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(0xFF)))
        }
    }

    #[inline(always)]
    fn signed(self, biased: __m512i) -> __m512i {
        biased
    }

    /// The weights enter `vpdpbusd` as unsigned bytes with their bias, which the start takes off.
    #[inline(always)]
    fn start_signed(self, _: i32, base_minus_bias: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(base_minus_bias) }
    }

    #[inline(always)]
    fn dot_signed(self, sum: __m512i, weights: __m512i, activations: [i8; 4]) -> __m512i {
        self.dot_nibbles(sum, weights, activations)
    }

    #[inline(always)]
    fn start_nibbles(self, base: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(base) }
    }

    #[inline(always)]
    fn dot_nibbles(self, sums: __m512i, weights: __m512i, activations: [i8; 4]) -> __m512i {
        let activations = i32::from_ne_bytes(activations.map(i8::cast_unsigned));
        unsafe { _mm512_dpbusd_epi32(sums, weights, _mm512_set1_epi32(activations)) }
    }

    #[inline(always)]
    fn finish_nibbles(self, sums: __m512i, _: i32) -> __m512i {
        sums
    }

    #[inline(always)]
    fn are_finite(self, pair: [Self::F32; 2]) -> bool {
        unsafe {
            let odd = [
                _mm512_fpclass_ps_mask::<NOT_FINITE>(pair[0]),
                _mm512_fpclass_ps_mask::<NOT_FINITE>(pair[1]),
            ];
            odd[0] | odd[1] == 0
        }
    }

    #[inline(always)]
    fn reduce_add_pair(self, pair: [Self::F32; 2]) -> [f32; 2] {
        reduce_pair(pair, |a, b| unsafe { _mm512_add_ps(a, b) })
    }

    #[inline(always)]
    fn reduce_max_pair(self, pair: [Self::F32; 2]) -> [f32; 2] {
        reduce_pair(pair, |a, b| unsafe { _mm512_max_ps(a, b) })
    }

    #[inline(always)]
    fn reduce_add(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
        }
    }

    #[inline(always)]
    fn reduce_max(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)))
        }
    }

    #[inline(always)]
    fn reduce_max_i32(self, a: __m512i) -> i32 {
        unsafe { _mm512_reduce_max_epi32(a) }
    }
}
