//! The operations with AVX2, FMA and F16C: a vector is a pair of registers.

#![expect(unsafe_code, reason = "intrinsics, called where the token proves the processor has them")]
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "one reason for all: an `Avx2` exists only after detection, and pointers come from \
              references to arrays of the size that is read or written"
)]

use std::arch::is_x86_feature_detected as has;
#[allow(clippy::wildcard_imports)]
use std::arch::x86_64::*;

use super::{Isa, LANE_BYTES, LANES, Simd};

/// Proof that the processor has AVX2, FMA and F16C, and the bit instructions of their time.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// A token, if the processor has all of it.
    pub fn detect() -> Option<Self> {
        let found = has!("avx2")
            && has!("fma")
            && has!("f16c")
            && has!("popcnt")
            && has!("bmi1")
            && has!("bmi2")
            && has!("lzcnt");
        found.then_some(Self(()))
    }
}

type Pair<T> = [T; 2];

#[inline(always)]
fn both<T: Copy, U>(a: Pair<T>, f: impl Fn(T) -> U) -> Pair<U> {
    [f(a[0]), f(a[1])]
}

#[inline(always)]
fn zip<T: Copy, U: Copy, V>(a: Pair<T>, b: Pair<U>, f: impl Fn(T, U) -> V) -> Pair<V> {
    [f(a[0], b[0]), f(a[1], b[1])]
}

#[inline(always)]
fn load_pair<T>(values: &[T]) -> Pair<__m256i> {
    assert!(size_of_val(values) == 64, "a pair of registers has 64 bytes");
    let start: *const __m256i = values.as_ptr().cast();
    unsafe { [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))] }
}

/// The upper halves of two registers of i32 below 2^16, as sixteen u16 in order.
#[inline(always)]
fn pack_u16(pair: Pair<__m256i>) -> __m256i {
    unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(pair[0], pair[1])) }
}

/// The last four levels of a reduction.
#[inline(always)]
fn reduce(a: __m256, f: impl Fn(__m128, __m128) -> __m128) -> f32 {
    unsafe {
        let a = f(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = f(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(f(a, _mm_movehdup_ps(a)))
    }
}

impl Simd for Avx2 {
    type F32 = Pair<__m256>;
    type I32 = Pair<__m256i>;
    type Bytes = Pair<__m256i>;
    /// Absolute values, then signed ones.
    type Signed = (Pair<__m256i>, Pair<__m256i>);
    /// Sums of 16 bits: two per lane.
    type NibbleSums = Pair<__m256i>;

    const ISA: Isa = Isa::Avx2;
    const ROWS: usize = 4;
    const STRIPS: bool = false;

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F32 {
        [unsafe { _mm256_set1_ps(value) }; 2]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::F32 {
        let start = values.as_ptr();
        unsafe { [_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(8))] }
    }

    #[inline(always)]
    fn load_partial(self, values: &[f32]) -> Self::F32 {
        let mut full = [0.0; LANES];
        full[..values.len()].copy_from_slice(values);
        self.load(&full)
    }

    #[inline(always)]
    fn store(self, vector: Self::F32, values: &mut [f32; LANES]) {
        let start = values.as_mut_ptr();
        unsafe {
            _mm256_storeu_ps(start, vector[0]);
            _mm256_storeu_ps(start.add(8), vector[1]);
        }
    }

    #[inline(always)]
    fn store_partial(self, vector: Self::F32, values: &mut [f32]) {
        let full = self.to_array(vector);
        values.copy_from_slice(&full[..values.len()]);
    }

    #[inline(always)]
    fn load_bf16(self, values: &[u16; LANES]) -> Self::F32 {
        let start: *const __m128i = values.as_ptr().cast();
        let halves = unsafe { [_mm_loadu_si128(start), _mm_loadu_si128(start.add(1))] };
        both(halves, |halves| unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        })
    }

    #[inline(always)]
    fn load_bf16_pairs(self, values: &[[u16; 2]; LANES]) -> [Self::F32; 2] {
        let start: *const __m256i = values.as_ptr().cast();
        let pairs = unsafe { [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))] };
        let first = both(pairs, |pairs| unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)) });
        let second = both(pairs, |pairs| unsafe {
            let upper = _mm256_set1_epi32(0xFFFF_0000_u32.cast_signed());
            _mm256_castsi256_ps(_mm256_and_si256(pairs, upper))
        });
        [first, second]
    }

    #[inline(always)]
    fn store_bf16(self, vector: Self::F32, values: &mut [u16; LANES]) {
        let upper = both(vector, |vector| unsafe {
            let bits = _mm256_castps_si256(vector);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let rounded = _mm256_blendv_epi8(_mm256_add_epi32(bits, bias), quiet, nan);
            _mm256_srli_epi32::<16>(rounded)
        });
        unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), pack_u16(upper)) }
    }

    #[inline(always)]
    fn load_f16(self, values: &[u8; 2 * LANES]) -> Self::F32 {
        let start: *const __m128i = values.as_ptr().cast();
        let halves = unsafe { [_mm_loadu_si128(start), _mm_loadu_si128(start.add(1))] };
        both(halves, |halves| unsafe { _mm256_cvtph_ps(halves) })
    }

    #[inline(always)]
    fn load_i8(self, values: &[i8; LANES]) -> Self::F32 {
        unsafe {
            let bytes = _mm_loadu_si128(values.as_ptr().cast());
            let halves = [bytes, _mm_unpackhi_epi64(bytes, bytes)];
            both(halves, |bytes| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
        }
    }

    #[inline(always)]
    fn load_u8(self, values: &[u8; LANES]) -> Self::F32 {
        unsafe {
            let bytes = _mm_loadu_si128(values.as_ptr().cast());
            let halves = [bytes, _mm_unpackhi_epi64(bytes, bytes)];
            both(halves, |bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
        }
    }

    #[inline(always)]
    fn store_i8(self, vector: Self::F32, values: &mut [i8; LANES]) {
        let [low, high] = self.to_i32(vector);
        unsafe {
            let words = _mm256_packs_epi32(low, high);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(values.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_add_ps(a, b) })
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_sub_ps(a, b) })
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_mul_ps(a, b) })
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_div_ps(a, b) })
    }

    #[inline(always)]
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_min_ps(a, b) })
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        zip(a, b, |a, b| unsafe { _mm256_max_ps(a, b) })
    }

    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        both(a, |a| unsafe { _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFF_FFFF))) })
    }

    #[inline(always)]
    fn select_lt(self, a: Self::F32, b: Self::F32, yes: Self::F32, no: Self::F32) -> Self::F32 {
        let less = zip(a, b, |a, b| unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) });
        unsafe { [_mm256_blendv_ps(no[0], yes[0], less[0]), _mm256_blendv_ps(no[1], yes[1], less[1])] }
    }

    #[inline(always)]
    fn round(self, a: Self::F32) -> Self::F32 {
        both(a, |a| unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) })
    }

    #[inline(always)]
    fn to_i32(self, a: Self::F32) -> Self::I32 {
        both(a, |a| unsafe { _mm256_cvtps_epi32(a) })
    }

    #[inline(always)]
    fn to_bits(self, a: Self::F32) -> Self::I32 {
        both(a, |a| unsafe { _mm256_castps_si256(a) })
    }

    #[inline(always)]
    fn splat_i32(self, value: i32) -> Self::I32 {
        [unsafe { _mm256_set1_epi32(value) }; 2]
    }

    #[inline(always)]
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        zip(a, b, |a, b| unsafe { _mm256_add_epi32(a, b) })
    }

    #[inline(always)]
    fn shl_i32<const BITS: u32>(self, a: Self::I32) -> Self::I32 {
        both(a, |a| unsafe { _mm256_sll_epi32(a, _mm_cvtsi32_si128(BITS.cast_signed())) })
    }

    #[inline(always)]
    fn bits_to_f32(self, a: Self::I32) -> Self::F32 {
        both(a, |a| unsafe { _mm256_castsi256_ps(a) })
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; LANE_BYTES]) -> Self::Bytes {
        load_pair(bytes)
    }

    #[inline(always)]
    fn low_nibbles(self, bytes: Self::Bytes) -> Self::Bytes {
        both(bytes, |bytes| unsafe { _mm256_and_si256(bytes, _mm256_set1_epi8(0x0F)) })
    }

    #[inline(always)]
    fn high_nibbles(self, bytes: Self::Bytes) -> Self::Bytes {
        self.low_nibbles(both(bytes, |bytes| unsafe { _mm256_srli_epi16::<4>(bytes) }))
    }

    #[inline(always)]
    fn store_bytes(self, bytes: Self::Bytes, out: &mut [u8; LANE_BYTES]) {
        let start: *mut __m256i = out.as_mut_ptr().cast();
        unsafe {
            _mm256_storeu_si256(start, bytes[0]);
            _mm256_storeu_si256(start.add(1), bytes[1]);
        }
    }

    #[inline(always)]
    fn byte_to_f32<const BYTE: usize>(self, bytes: Self::Bytes) -> Self::F32 {
        both(bytes, |bytes| unsafe {
            let shifted = match BYTE {
                0 => bytes,
                1 => _mm256_srli_epi32::<8>(bytes),
                2 => _mm256_srli_epi32::<16>(bytes),
                _ => _mm256_srli_epi32::<24>(bytes),
            };
            _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(0xFF)))
        })
    }

    #[inline(always)]
    fn signed(self, biased: Self::Bytes) -> Self::Signed {
        let signed = both(biased, |bytes| unsafe { _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)) });
        (both(signed, |bytes| unsafe { _mm256_abs_epi8(bytes) }), signed)
    }

    #[inline(always)]
    fn start_signed(self, base: i32, _: i32) -> Self::I32 {
        self.splat_i32(base)
    }

    /// `vpmaddubsw` takes unsigned by signed bytes and saturates at 16 bits: absolute weights, at
    /// most 128, times activations within ±127 that carry the weight's sign stay below.
    #[inline(always)]
    fn dot_signed(self, sum: Self::I32, weights: Self::Signed, activations: [i8; 4]) -> Self::I32 {
        let activations = i32::from_ne_bytes(activations.map(i8::cast_unsigned));
        let (magnitudes, signed) = weights;
        let products = zip(magnitudes, signed, |magnitude, signed| unsafe {
            let activations = _mm256_sign_epi8(_mm256_set1_epi32(activations), signed);
            let pairs = _mm256_maddubs_epi16(magnitude, activations);
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        });
        self.add_i32(sum, products)
    }

    #[inline(always)]
    fn start_nibbles(self, _: i32) -> Self::NibbleSums {
        [unsafe { _mm256_setzero_si256() }; 2]
    }

    /// Eight sums of two products of at most 15 * 127 stay below 2^15.
    #[inline(always)]
    fn dot_nibbles(
        self,
        sums: Self::NibbleSums,
        weights: Self::Bytes,
        activations: [i8; 4],
    ) -> Self::NibbleSums {
        let activations = i32::from_ne_bytes(activations.map(i8::cast_unsigned));
        zip(sums, weights, |sums, weights| unsafe {
            let pairs = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(activations));
            _mm256_add_epi16(sums, pairs)
        })
    }

    #[inline(always)]
    fn finish_nibbles(self, sums: Self::NibbleSums, base: i32) -> Self::I32 {
        let sums = both(sums, |sums| unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) });
        self.add_i32(sums, self.splat_i32(base))
    }

    /// Zero times a number is zero only if the number is finite.
    #[inline(always)]
    fn are_finite(self, pair: [Self::F32; 2]) -> bool {
        let zeros = self.fma(pair[0], self.zero(), self.mul(pair[1], self.zero()));
        unsafe {
            let zeros = _mm256_add_ps(zeros[0], zeros[1]);
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(zeros, _mm256_setzero_ps())) == 0
        }
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::F32) -> f32 {
        let sum = unsafe { _mm256_add_ps(a[0], a[1]) };
        reduce(sum, |a, b| unsafe { _mm_add_ps(a, b) })
    }

    #[inline(always)]
    fn reduce_max(self, a: Self::F32) -> f32 {
        let max = unsafe { _mm256_max_ps(a[0], a[1]) };
        reduce(max, |a, b| unsafe { _mm_max_ps(a, b) })
    }

    #[inline(always)]
    fn reduce_max_i32(self, a: Self::I32) -> i32 {
        unsafe {
            let a = _mm256_max_epi32(a[0], a[1]);
            let a = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            let a = _mm_max_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a));
            _mm_cvtsi128_si32(a)
        }
    }
}
