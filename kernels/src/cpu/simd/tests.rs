//! Every operation of every instruction set against the portable one, bit for bit.

use super::{LANE_BYTES, LANES, Simd};
use crate::cpu::isa::{Isa, Kernel};

/// A small generator of test values; the same sequence everywhere.
struct Numbers(u64);

impl Numbers {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 32) as u32
    }

    fn floats(&mut self) -> [f32; LANES] {
        std::array::from_fn(|_| match self.bits() % 8 {
            0 => f32::from_bits(self.bits() & 0x807F_FFFF),
            1 => (self.bits().cast_signed() >> 20) as f32 * 0.5,
            2 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::MAX, f32::MIN, 2.5]
                [self.bits() as usize % 8],
            _ => (self.bits().cast_signed() as f32) * 2f32.powi((self.bits() % 40).cast_signed() - 50),
        })
    }

    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let extreme = self.bits().is_multiple_of(4);
        std::array::from_fn(|_| match self.bits() {
            bits if extreme => [0, 1, 127, 128, 129, 255][bits as usize % 6],
            bits => bits as u8,
        })
    }

    /// Bytes as activations are: within ±127.
    fn activations(&mut self) -> [i8; 4] {
        self.bytes().map(|byte: u8| byte.cast_signed().max(-127))
    }
}

/// The results of all operations on inputs drawn from a seed; a NaN counts as one value.
struct AllOperations(u64);

impl Kernel for AllOperations {
    type Output = Vec<(&'static str, Vec<i64>)>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut numbers = Numbers(self.0);
        let mut out = float_operations(s, &mut numbers);
        out.extend(conversions(s, &mut numbers));
        out.extend(byte_operations(s, &mut numbers));
        out
    }
}

fn bits(values: &[f32]) -> Vec<i64> {
    let canonical = |value: f32| {
        if value.is_nan() { -1 } else { i64::from(value.to_bits()) }
    };
    values.iter().copied().map(canonical).collect()
}

#[inline(always)]
fn lanes<S: Simd>(s: S, vector: S::I32) -> Vec<i64> {
    let values = s.to_array(s.bits_to_f32(vector));
    values.iter().map(|value| i64::from(value.to_bits())).collect()
}

#[inline(always)]
fn float_operations<S: Simd>(s: S, numbers: &mut Numbers) -> Vec<(&'static str, Vec<i64>)> {
    let inputs: [_; 3] = std::array::from_fn(|_| numbers.floats());
    let [x, y, z] = inputs.each_ref().map(|input| s.load(input));
    let mut out = vec![
        ("add", s.add(x, y)),
        ("sub", s.sub(x, y)),
        ("mul", s.mul(x, y)),
        ("div", s.div(x, y)),
        ("fma", s.fma(x, y, z)),
        ("min", s.min(x, y)),
        ("max", s.max(x, y)),
        ("abs", s.abs(x)),
        ("select_lt", s.select_lt(x, y, y, z)),
        ("round", s.round(x)),
        ("splat", s.splat(inputs[0][3])),
        ("bits", s.bits_to_f32(s.to_bits(x))),
    ];
    for len in 0..=LANES {
        let partial = s.load_partial(&inputs[0][..len]);
        out.push(("load_partial", partial));
        let mut stored = inputs[1];
        s.store_partial(x, &mut stored[..len]);
        out.push(("store_partial", s.load(&stored)));
    }
    let mut out: Vec<_> = out.into_iter().map(|(name, x)| (name, bits(&s.to_array(x)))).collect();
    out.push(("reduce_add", bits(&[s.reduce_add(x)])));
    out.push(("reduce_max", bits(&[s.reduce_max(x)])));
    out.push(("reduce_add_pair", bits(&s.reduce_add_pair([x, y]))));
    out.push(("reduce_max_pair", bits(&s.reduce_max_pair([x, y]))));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-44] {
        let mut odd = [1.0; LANES];
        odd[numbers.bits() as usize % LANES] = value;
        let odd = s.load(&odd);
        let finite = [s.are_finite([odd, s.zero()]), s.are_finite([s.zero(), odd]), s.are_finite([x, y])];
        out.push(("are_finite", finite.map(i64::from).to_vec()));
    }
    out
}

#[inline(always)]
fn conversions<S: Simd>(s: S, numbers: &mut Numbers) -> Vec<(&'static str, Vec<i64>)> {
    let halves: [u16; LANES] = std::array::from_fn(|_| numbers.bits() as u16);
    let small: [i8; LANES] = numbers.bytes().map(u8::cast_signed);
    let codes = s.mul(s.load_i8(&small), s.splat(0.5));
    let bytes = s.load_bytes(&numbers.bytes());
    let mut narrow = [0_i8; LANES];
    s.store_i8(codes, &mut narrow);
    let mut brain = [0_u16; LANES];
    s.store_bf16(s.load(&numbers.floats()), &mut brain);
    let mut nan = [0_u16; LANES];
    s.store_bf16(s.splat(f32::from_bits(0x7F80_0001)), &mut nan);
    let pairs = s.load_bf16_pairs(&halves.map(|half| [half, half ^ 0x1234]));
    let integers = s.to_i32(codes);
    let largest = s.reduce_max_i32(integers);
    vec![
        ("load_bf16", bits(&s.to_array(s.load_bf16(&halves)))),
        ("first of load_bf16_pairs", bits(&s.to_array(pairs[0]))),
        ("second of load_bf16_pairs", bits(&s.to_array(pairs[1]))),
        ("load_f16", bits(&s.to_array(s.load_f16(&numbers.bytes())))),
        ("load_u8", bits(&s.to_array(s.load_u8(&numbers.bytes())))),
        ("load_i8", bits(&s.to_array(codes))),
        ("store_i8", narrow.map(i64::from).to_vec()),
        ("store_bf16", brain.map(i64::from).to_vec()),
        ("store_bf16 of NaN", nan.map(i64::from).to_vec()),
        ("to_i32", lanes(s, integers)),
        ("add_i32", lanes(s, s.add_i32(integers, s.splat_i32(i32::MAX)))),
        ("reduce_max_i32", vec![i64::from(largest)]),
        ("shl_i32", lanes(s, s.shl_i32::<23>(integers))),
        ("byte 0", bits(&s.to_array(s.byte_to_f32::<0>(bytes)))),
        ("byte 1", bits(&s.to_array(s.byte_to_f32::<1>(bytes)))),
        ("byte 2", bits(&s.to_array(s.byte_to_f32::<2>(bytes)))),
        ("byte 3", bits(&s.to_array(s.byte_to_f32::<3>(bytes)))),
    ]
}

#[inline(always)]
fn byte_operations<S: Simd>(s: S, numbers: &mut Numbers) -> Vec<(&'static str, Vec<i64>)> {
    let base = numbers.bits().cast_signed() >> 8;
    let activations: [[i8; 4]; 8] = std::array::from_fn(|_| numbers.activations());
    let weights: [[u8; LANE_BYTES]; 8] = std::array::from_fn(|_| numbers.bytes());
    let total: i32 = activations.iter().flatten().copied().map(i32::from).sum();
    let mut signed = s.start_signed(base, base - 128 * total);
    let mut nibbles = s.start_nibbles(base);
    for (weights, &activations) in weights.iter().zip(&activations) {
        let weights = s.load_bytes(weights);
        signed = s.dot_signed(signed, s.signed(weights), activations);
        nibbles = s.dot_nibbles(nibbles, s.low_nibbles(weights), activations);
    }
    let mut high = [0; LANE_BYTES];
    s.store_bytes(s.high_nibbles(s.load_bytes(&weights[0])), &mut high);
    vec![
        ("dot_signed", lanes(s, signed)),
        ("dot_nibbles", lanes(s, s.finish_nibbles(nibbles, base))),
        ("high_nibbles", high.map(i64::from).to_vec()),
    ]
}

#[test]
fn every_operation_equals_the_portable_one() {
    for seed in 0..2_000 {
        let expected = Isa::Portable.dispatch(AllOperations(seed));
        for isa in Isa::available() {
            let actual = isa.dispatch(AllOperations(seed));
            for ((name, actual), (_, expected)) in actual.iter().zip(&expected) {
                assert_eq!(actual, expected, "{isa} {name} seed {seed}");
            }
        }
    }
}

#[test]
fn dots_are_exact_at_the_extremes() {
    struct Extremes(u8, i8);
    impl Kernel for Extremes {
        type Output = (f32, f32);
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> (f32, f32) {
            let Self(weight, activation) = self;
            let weights = s.load_bytes(&[weight; LANE_BYTES]);
            let total = 32 * i32::from(activation);
            let mut signed = s.start_signed(0, -128 * total);
            let mut nibbles = s.start_nibbles(0);
            for _ in 0..8 {
                signed = s.dot_signed(signed, s.signed(weights), [activation; 4]);
                nibbles = s.dot_nibbles(nibbles, s.low_nibbles(weights), [activation; 4]);
            }
            let first = |sums| s.to_array(s.bits_to_f32(sums))[0];
            (first(signed), first(s.finish_nibbles(nibbles, 0)))
        }
    }
    for isa in Isa::available() {
        for weight in [0_u8, 1, 127, 128, 129, 255, 15] {
            for activation in [-127_i8, -1, 0, 1, 127] {
                let (signed, nibbles) = isa.dispatch(Extremes(weight, activation));
                let activation = i32::from(activation);
                let expected = 32 * (i32::from(weight) - 128) * activation;
                assert_eq!(signed.to_bits().cast_signed(), expected, "{isa} {weight}");
                let expected = 32 * i32::from(weight & 15) * activation;
                assert_eq!(nibbles.to_bits().cast_signed(), expected, "{isa} {weight}");
            }
        }
    }
}
