//! Layouts against `dequantize`, products against their definition, instruction sets against the
//! portable one: all bit for bit.

use proptest::prelude::*;

use super::*;
use crate::cpu::quantize::{BLOCK_ROWS, GROUP, START};
use crate::dequantize::dequantize;

const QUANTIZED: [Format; 8] = [
    Format::Q8_0,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q4_K,
    Format::Q5_K,
    Format::Q6_K,
];

/// Numbers that depend on the seed alone.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn float(&mut self) -> f32 {
        self.next() as f32 / 2f32.powi(30) - 1.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }

    /// A scale: mostly ordinary, sometimes zero, subnormal or large.
    fn half(&mut self) -> [u8; 2] {
        let value = match self.next() % 12 {
            0 => 0.0,
            1 => self.float() * 2f32.powi(-20),
            2 => self.float() * 100.0,
            _ => self.float() * 0.01,
        };
        half::f16::from_f32(value).to_le_bytes()
    }

    /// Stored rows with random codes and sane scales; some blocks all low or all high.
    fn stored(&mut self, format: Format, num_outputs: usize, num_inputs: usize) -> Vec<u8> {
        let mut data = vec![0; num_outputs * format.row_bytes(num_inputs).unwrap()];
        for block in data.chunks_exact_mut(format.block_bytes()) {
            match self.next() % 8 {
                0 => block.fill(0),
                1 => block.fill(0xFF),
                2 => block.fill(0x80),
                _ => block.fill_with(|| self.next() as u8),
            }
            let halves: &[usize] = match format {
                Format::Q8_0 | Format::Q4_0 | Format::Q5_0 | Format::F16 => &[0],
                Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[0, 2],
                Format::Q6_K => &[208],
                Format::F32 | Format::BF16 => &[],
            };
            for &start in halves {
                block[start..start + 2].copy_from_slice(&self.half());
            }
            match format {
                Format::F32 => block.copy_from_slice(&self.float().to_le_bytes()),
                Format::BF16 => block.copy_from_slice(&self.float().to_le_bytes()[2..]),
                _ => {}
            }
        }
        data
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn product(ctx: Context<'_>, weight: &PackedLinear, input: Input<'_>, num_rows: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; num_rows * weight.num_outputs()];
    let output = Output::Store(&mut out);
    project(ctx, input, num_rows, &mut [Projection { weight, output }]).unwrap();
    out
}

fn quantized(ctx: Context<'_>, x: &[f32], num_rows: usize) -> QuantizedRows {
    let mut rows = QuantizedRows::zeros(num_rows, x.len() / num_rows);
    rows.quantize(ctx.isa, ctx.pool, x).unwrap();
    rows
}

#[test]
fn layouts_hold_what_dequantize_reads() {
    let pool = Pool::new(2).unwrap();
    let mut numbers = Numbers(1);
    for format in Format::ALL {
        for (num_outputs, num_inputs) in [(1, 256), (16, 512), (37, 768), (64, 256)] {
            let data = numbers.stored(format, num_outputs, num_inputs);
            let weight = PackedLinear::pack(format, &data, num_outputs, num_inputs, &pool).unwrap();
            let mut expected = vec![0.0; num_outputs * num_inputs];
            dequantize(format, &data, &mut expected).unwrap();
            let mut row = vec![f32::NAN; num_inputs];
            for (output, expected) in expected.chunks_exact(num_inputs).enumerate() {
                weight.dequantize_row(output, &mut row);
                assert_eq!(bits(&row), bits(expected), "{format:?} row {output}");
            }
        }
    }
}

/// Scale and minimum of half `half` of a group, and its codes' values, from the stored bytes.
fn stored_group(format: Format, row: &[u8], group: usize) -> ([f32; 2], f32, [i32; GROUP]) {
    let (code_layout, scale_layout) = quantized::layouts(format);
    let mut tile = vec![0; scale_layout.tile_bytes(row_groups(format, row))];
    scale_layout.write(format, row, 0, &mut tile);
    let (scales, min) = scale_layout.read(&tile, group, 0);
    let zero = i32::from(code_layout.zero());
    let codes = stored::codes(format, row, group).map(|code| i32::from(code) - zero);
    (scales, min.unwrap_or(0.0), codes)
}

fn row_groups(format: Format, row: &[u8]) -> usize {
    row.len() / format.block_bytes() * format.block_len() / GROUP
}

/// One output of one row, as `int8` defines it.
fn defined(format: Format, row: &[u8], x: &QuantizedRows, x_row: usize) -> f32 {
    let (_, scale_layout) = quantized::layouts(format);
    let halves = scale_layout == scales::ScaleLayout::Super;
    let has_min = matches!(scale_layout, scales::ScaleLayout::HalfMin | scales::ScaleLayout::SuperMin);
    let mut acc = 0.0_f32;
    for group in 0..x.num_groups() {
        let block = &x.blocks()[x_row / BLOCK_ROWS * x.num_groups() + group];
        let lane = x_row % BLOCK_ROWS;
        let (scales, min, codes) = stored_group(format, row, group);
        let activations = block.codes[lane].as_flattened();
        let dot = |range: std::ops::Range<usize>| -> i32 {
            range.map(|i| codes[i] * i32::from(activations[i])).sum()
        };
        let parts = if halves {
            vec![(dot(0..16), scales[0]), (dot(16..32), scales[1])]
        } else {
            vec![(dot(0..32), scales[0])]
        };
        let sum = |range: std::ops::Range<usize>| codes[range].iter().sum::<i32>() as f32;
        let weight_sum =
            if halves { sum(0..16) * scales[0] + sum(16..32) * scales[1] } else { sum(0..32) * scales[0] };
        for (dot, scale) in parts {
            assert!(dot.abs() < 1 << 22 && START > 0);
            acc = (dot as f32 * scale).mul_add(block.scales[lane], acc);
        }
        acc = weight_sum.mul_add(block.middles[lane], acc);
        if has_min {
            acc = min.mul_add(block.sums[lane], acc);
        }
    }
    acc
}

#[test]
fn quantized_products_follow_the_definition() {
    let pool = Pool::new(2).unwrap();
    let mut numbers = Numbers(2);
    for format in QUANTIZED {
        for (num_outputs, num_inputs, num_rows) in [(1, 256, 1), (37, 768, 3), (70, 512, 19)] {
            let data = numbers.stored(format, num_outputs, num_inputs);
            let weight = PackedLinear::pack(format, &data, num_outputs, num_inputs, &pool).unwrap();
            let x = numbers.floats(num_rows * num_inputs);
            let row_bytes = data.len() / num_outputs;
            for isa in Isa::available() {
                let ctx = Context { pool: &pool, isa };
                let x = quantized(ctx, &x, num_rows);
                let actual = product(ctx, &weight, Input::Quantized(&x), num_rows);
                for (index, actual) in actual.iter().enumerate() {
                    let (row, output) = (index / num_outputs, index % num_outputs);
                    let stored = &data[output * row_bytes..(output + 1) * row_bytes];
                    let expected = defined(format, stored, &x, row);
                    assert_eq!(
                        actual.to_bits(),
                        expected.to_bits(),
                        "{format:?} {isa} row {row} output {output}: {actual} {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn float_products_follow_the_definition() {
    let pool = Pool::new(2).unwrap();
    let mut numbers = Numbers(3);
    for format in Format::ALL {
        for (num_outputs, num_inputs, num_rows) in [(1, 256, 1), (37, 768, 3), (70, 512, 19)] {
            let data = numbers.stored(format, num_outputs, num_inputs);
            let weight = PackedLinear::pack(format, &data, num_outputs, num_inputs, &pool).unwrap();
            let mut values = vec![0.0; num_outputs * num_inputs];
            dequantize(format, &data, &mut values).unwrap();
            let x = numbers.floats(num_rows * num_inputs);
            for isa in Isa::available() {
                let ctx = Context { pool: &pool, isa };
                let actual = product(ctx, &weight, Input::Float(&x), num_rows);
                for (index, actual) in actual.iter().enumerate() {
                    let (row, output) = (index / num_outputs, index % num_outputs);
                    let weights = &values[output * num_inputs..(output + 1) * num_inputs];
                    let x = &x[row * num_inputs..(row + 1) * num_inputs];
                    let expected = weights.iter().zip(x).fold(0.0_f32, |acc, (w, x)| w.mul_add(*x, acc));
                    assert_eq!(actual.to_bits(), expected.to_bits(), "{format:?} {isa} {index}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any row alone, on one thread, on any set, equals that row of any batch.
    #[test]
    fn a_row_is_the_same_in_any_batch(
        seed in any::<u64>(),
        format in prop::sample::select(QUANTIZED.to_vec()),
        num_outputs in 1_usize..120,
        num_blocks in 1_usize..4,
        num_rows in 1_usize..80,
        num_threads in 1_usize..4,
        float in any::<bool>(),
    ) {
        let (one, many) = (Pool::new(1).unwrap(), Pool::new(num_threads).unwrap());
        let mut numbers = Numbers(seed);
        let num_inputs = num_blocks * format.block_len();
        let data = numbers.stored(format, num_outputs, num_inputs);
        let weight = PackedLinear::pack(format, &data, num_outputs, num_inputs, &many).unwrap();
        let x = numbers.floats(num_rows * num_inputs);
        let row = numbers.next() as usize % num_rows;
        let x_row = &x[row * num_inputs..(row + 1) * num_inputs];
        let ctx = Context { pool: &one, isa: Isa::Portable };
        let alone = if float {
            product(ctx, &weight, Input::Float(x_row), 1)
        } else {
            product(ctx, &weight, Input::Quantized(&quantized(ctx, x_row, 1)), 1)
        };
        for isa in Isa::available() {
            let ctx = Context { pool: &many, isa };
            let all = if float {
                product(ctx, &weight, Input::Float(&x), num_rows)
            } else {
                product(ctx, &weight, Input::Quantized(&quantized(ctx, &x, num_rows)), num_rows)
            };
            let in_batch = &all[row * num_outputs..(row + 1) * num_outputs];
            prop_assert_eq!(bits(in_batch), bits(&alone), "{} {:?}", isa, format);
        }
    }
}

#[test]
fn projections_share_an_input_and_may_add() {
    let pool = Pool::new(2).unwrap();
    let mut numbers = Numbers(4);
    let x = numbers.floats(5 * 64);
    for isa in Isa::available() {
        let ctx = Context { pool: &pool, isa };
        let rows = quantized(ctx, &x, 5);
        let input = Input::Quantized(&rows);
        let weights =
            [(48, Format::Q4_1), (16, Format::Q8_0), (17, Format::Q4_0)].map(|(num_outputs, format)| {
                let data = numbers.stored(format, num_outputs, 64);
                PackedLinear::pack(format, &data, num_outputs, 64, &pool).unwrap()
            });
        let alone = weights.each_ref().map(|weight| product(ctx, weight, input, 5));
        let residual = numbers.floats(alone[1].len());
        let mut outs = [vec![0.0; alone[0].len()], residual.clone(), vec![0.0; alone[2].len()]];
        let [first, second, third] = &mut outs;
        let outputs = [Output::Store(first), Output::Add(second), Output::Store(third)];
        let mut projections: Vec<_> =
            weights.iter().zip(outputs).map(|(weight, output)| Projection { weight, output }).collect();
        project(ctx, input, 5, &mut projections).unwrap();
        assert_eq!(bits(&outs[0]), bits(&alone[0]));
        assert_eq!(bits(&outs[2]), bits(&alone[2]));
        for ((actual, residual), alone) in outs[1].iter().zip(&residual).zip(&alone[1]) {
            assert_eq!(actual.to_bits(), (residual + alone).to_bits());
        }
    }
}

#[test]
fn gated_silu_is_the_same_apart_and_fused() {
    struct Silu<'a>(&'a mut [f32], &'a [f32]);
    impl crate::cpu::isa::Kernel for Silu<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: crate::cpu::simd::Simd>(self, s: S) {
            for (gate, up) in self.0.iter_mut().zip(self.1) {
                let silu = crate::cpu::math::silu(s, s.splat(*gate));
                *gate = s.to_array(s.mul(silu, s.splat(*up)))[0];
            }
        }
    }
    let pool = Pool::new(2).unwrap();
    let mut numbers = Numbers(5);
    for num_outputs in [32, 80, 96, 352] {
        let data = [0, 1].map(|_| numbers.stored(Format::Q4_1, num_outputs, 96));
        let [gate, up] =
            data.map(|data| PackedLinear::pack(Format::Q4_1, &data, num_outputs, 96, &pool).unwrap());
        for num_rows in [1, 2, 7, 8, 9, 70] {
            let x = numbers.floats(num_rows * 96);
            for isa in Isa::available() {
                let ctx = Context { pool: &pool, isa };
                let rows = quantized(ctx, &x, num_rows);
                for input in [Input::Quantized(&rows), Input::Float(&x)] {
                    let mut expected = product(ctx, &gate, input, num_rows);
                    let ups = product(ctx, &up, input, num_rows);
                    isa.dispatch(Silu(&mut expected, &ups));
                    let mut actual = vec![f32::NAN; expected.len()];
                    let output = GatedOutput::Float(&mut actual);
                    gated_silu(ctx, input, num_rows, &gate, &up, output).unwrap();
                    assert_eq!(bits(&actual), bits(&expected), "{isa} {num_outputs} {num_rows}");
                    if !num_outputs.is_multiple_of(GROUP) {
                        continue;
                    }
                    let mut actual = QuantizedRows::zeros(num_rows, num_outputs);
                    let output = GatedOutput::Quantized(&mut actual);
                    gated_silu(ctx, input, num_rows, &gate, &up, output).unwrap();
                    let expected = quantized(ctx, &expected, num_rows);
                    let same = product_of_rows(&actual, num_rows) == product_of_rows(&expected, num_rows);
                    assert!(same, "{isa} {num_outputs} {num_rows}");
                }
            }
        }
    }
}

/// What the rows hold, without the unused rows of the last block.
fn product_of_rows(rows: &QuantizedRows, num_rows: usize) -> Vec<(Vec<i8>, u32, u32, u32, i32)> {
    let num_groups = rows.num_groups();
    (0..num_rows * num_groups)
        .map(|index| {
            let (row, group) = (index / num_groups, index % num_groups);
            let block = &rows.blocks()[row / BLOCK_ROWS * num_groups + group];
            let lane = row % BLOCK_ROWS;
            (
                block.codes[lane].as_flattened().to_vec(),
                block.scales[lane].to_bits(),
                block.middles[lane].to_bits(),
                block.sums[lane].to_bits(),
                block.minus_bias[lane],
            )
        })
        .collect()
}

#[test]
fn extremes_are_exact() {
    let pool = Pool::new(1).unwrap();
    // Codes -128 and activations -127: the largest sum there is.
    let mut data = vec![0x80; 16 * 34];
    for block in data.chunks_exact_mut(34) {
        block[..2].copy_from_slice(&half::f16::from_f32(1.0).to_le_bytes());
    }
    let weight = PackedLinear::pack(Format::Q8_0, &data, 16, 32, &pool).unwrap();
    for isa in Isa::available() {
        let ctx = Context { pool: &pool, isa };
        for (x, expected) in [(-127.0, 520_192.0), (127.0, -520_192.0), (0.0, 0.0)] {
            let rows = quantized(ctx, &[x; 32], 1);
            let out = product(ctx, &weight, Input::Quantized(&rows), 1);
            assert_eq!(bits(&out), bits(&[expected; 16]), "{isa} {x}");
        }
    }
}

#[test]
fn a_row_that_is_not_finite_stays_so_alone() {
    let pool = Pool::new(1).unwrap();
    let mut numbers = Numbers(6);
    let data = numbers.stored(Format::Q4_1, 32, 64);
    let weight = PackedLinear::pack(Format::Q4_1, &data, 32, 64, &pool).unwrap();
    for isa in Isa::available() {
        let ctx = Context { pool: &pool, isa };
        let mut x = numbers.floats(3 * 64);
        let clean = product(ctx, &weight, Input::Quantized(&quantized(ctx, &x, 3)), 3);
        for bad in [f32::NAN, f32::INFINITY] {
            x[64 + 5] = bad;
            let out = product(ctx, &weight, Input::Quantized(&quantized(ctx, &x, 3)), 3);
            assert!(out[32..64].iter().all(|value| value.is_nan()), "{isa}");
            assert_eq!(bits(&out[..32]), bits(&clean[..32]), "{isa}");
            assert_eq!(bits(&out[64..]), bits(&clean[64..]), "{isa}");
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let pool = Pool::new(1).unwrap();
    let ctx = Context { pool: &pool, isa: Isa::best() };
    let message = |result: Result<PackedLinear, LinearError>| result.unwrap_err().to_string();
    assert_eq!(
        message(PackedLinear::pack(Format::Q4_0, &[0; 18], 1, 33, &pool)),
        "a row of 33 values is not a whole number of Q4_0 blocks of 32 values"
    );
    assert_eq!(
        message(PackedLinear::pack(Format::Q4_0, &[0; 18], 2, 32, &pool)),
        "the weight has 18 bytes; its shape and format take 36"
    );
    assert_eq!(
        message(PackedLinear::pack(Format::F32, &[], 0, 32, &pool)),
        "a weight matrix of [0, 32] has no values"
    );
    let weight = PackedLinear::pack(Format::F32, &[0; 4 * 64], 2, 32, &pool).unwrap();
    let rows = QuantizedRows::zeros(1, 32);
    let run = |input: Input<'_>, num_rows: usize, out: &mut [f32]| {
        let output = Output::Store(out);
        project(ctx, input, num_rows, &mut [Projection { weight: &weight, output }])
    };
    assert_eq!(run(Input::Quantized(&rows), 1, &mut [0.0; 2]), Err(LinearError::FloatWeight));
    let shape = |what, actual, expected| Err(LinearError::Shape { what, actual, expected });
    assert_eq!(run(Input::Float(&[0.0; 32]), 2, &mut [0.0; 4]), shape("the input", 32, 64));
    assert_eq!(run(Input::Float(&[0.0; 32]), 1, &mut [0.0; 3]), shape("the output", 3, 2));
}
