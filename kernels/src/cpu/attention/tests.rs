//! Attention against its definition, and the same bits however the work is cut.
#![expect(clippy::cast_possible_wrap, reason = "small numbers")]

use super::*;
use crate::cpu::kv::{BLOCK_SIZE, Bf16Kv, F32Kv, Int8Kv, KvShape, Slot};

const HEAD_DIM: usize = 24;
const NUM_HEADS: usize = 6;
const NUM_KV_HEADS: usize = 2;
const LEN: usize = 600;
const SCALE: f32 = 0.2;

const SHAPE: AttentionShape =
    AttentionShape { num_heads: NUM_HEADS, num_kv_heads: NUM_KV_HEADS, head_dim: HEAD_DIM, window: None };

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Rows of `LEN` positions whose blocks are scattered over the cache; the rest of it is poison.
struct Case<F: KvFormat> {
    kv: Kv<F>,
    tables: Vec<i32>,
    width: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

impl<F: KvFormat> Case<F> {
    fn new(num_rows: usize) -> Self {
        let width = LEN.div_ceil(BLOCK_SIZE);
        let shape = KvShape {
            num_layers: 2,
            num_blocks: num_rows * width + 1,
            num_kv_heads: NUM_KV_HEADS,
            head_dim: HEAD_DIM,
        };
        let mut kv = Kv::<F>::new(shape).unwrap();
        (0..shape.num_blocks).for_each(|block| kv.poison(block));
        let tables: Vec<i32> = (0..num_rows * width).rev().map(|block| block as i32).collect();
        let token = NUM_KV_HEADS * HEAD_DIM;
        let keys = numbers(1, num_rows * LEN * token);
        let values = numbers(2, num_rows * LEN * token);
        let mut scratch = vec![F::Value::default(); shape.dim()];
        let writer = kv.writer();
        for index in 0..num_rows * LEN {
            let (row, position) = (index / LEN, index % LEN);
            let slot = Slot {
                layer: 1,
                block: tables[row * width + position / BLOCK_SIZE] as usize,
                offset: position % BLOCK_SIZE,
            };
            let part = index * token..(index + 1) * token;
            // SAFETY: one thread.
            unsafe { writer.store(slot, &keys[part.clone()], &values[part], &mut scratch) };
        }
        let queries = numbers(3, num_rows * LEN * NUM_HEADS * HEAD_DIM);
        Self { kv, tables, width, keys, values, queries }
    }

    /// Answers of the given positions of each row: (row, first position, number of tokens).
    fn run(
        &self,
        shape: AttentionShape,
        isa: Isa,
        threads: usize,
        chunks: &[(usize, usize, usize)],
    ) -> Vec<Vec<f32>> {
        let token = NUM_HEADS * HEAD_DIM;
        let (mut starts, mut computed, mut tables, mut queries) = (vec![0], vec![], vec![], vec![]);
        for &(row, position, num_tokens) in chunks {
            starts.push(starts[starts.len() - 1] + num_tokens as i32);
            computed.push(position as i32);
            tables.extend(&self.tables[row * self.width..][..self.width]);
            queries.extend(&self.queries[(row * LEN + position) * token..][..num_tokens * token]);
        }
        let mut tiles = AttentionTiles::default();
        tiles.cut(&shape, &starts, &computed, threads);
        let attention = Attention {
            shape,
            kv: &self.kv,
            layer: 1,
            scale: SCALE,
            tiles: &tiles,
            block_tables: &tables,
            table_width: self.width,
            queries: &queries,
        };
        let mut out = vec![f32::NAN; queries.len()];
        let pool = Pool::new(threads).unwrap();
        let mut scratch = AttentionScratch::default();
        attention.run(isa, &pool, &mut scratch, &mut out).unwrap();
        starts.windows(2).map(|s| out[s[0] as usize * token..s[1] as usize * token].to_vec()).collect()
    }

    /// The definition in f64 for one position of a row.
    fn expected(&self, shape: AttentionShape, row: usize, position: usize) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..NUM_HEADS {
            let stored = |values: &[f32], position: usize, d: usize| {
                f64::from(
                    values[((row * LEN + position) * NUM_KV_HEADS + head / shape.group()) * HEAD_DIM + d],
                )
            };
            let query = &self.queries[((row * LEN + position) * NUM_HEADS + head) * HEAD_DIM..][..HEAD_DIM];
            let weights: Vec<f64> = shape
                .visible(position)
                .map(|p| {
                    (0..HEAD_DIM)
                        .map(|d| f64::from(query[d] * SCALE) * stored(&self.keys, p, d))
                        .sum::<f64>()
                        .exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..HEAD_DIM).map(|d| {
                shape
                    .visible(position)
                    .zip(&weights)
                    .map(|(p, w)| w * stored(&self.values, p, d))
                    .sum::<f64>()
                    / sum
            }));
        }
        out
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn equals_the_definition<F: KvFormat>(tolerance: f64) {
    let case = Case::<F>::new(2);
    for window in [None, Some(1), Some(40), Some(300)] {
        let shape = AttentionShape { window, ..SHAPE };
        for isa in Isa::available() {
            for (row, position) in [(0, 0), (1, 15), (0, 255), (1, 256), (1, 599)] {
                let out = &case.run(shape, isa, 1, &[(row, position, 1)])[0];
                for (actual, expected) in out.iter().zip(case.expected(shape, row, position)) {
                    assert!(
                        (f64::from(*actual) - expected).abs() < tolerance,
                        "{isa} {window:?} {position}: {actual} {expected}"
                    );
                }
            }
        }
    }
}

fn same_bits_however_it_is_cut<F: KvFormat>() {
    let case = Case::<F>::new(3);
    let token = NUM_HEADS * HEAD_DIM;
    for window in [None, Some(70)] {
        let shape = AttentionShape { window, ..SHAPE };
        let whole = bits(&case.run(shape, Isa::Portable, 1, &[(1, 0, LEN)])[0]);
        for isa in Isa::available() {
            for threads in [1, 3] {
                for chunks in [vec![LEN], vec![1, 255, 1, 343], vec![7; 85], vec![300, 300]] {
                    let mut position = 0;
                    for len in chunks {
                        let part = position * token..(position + len) * token;
                        let alone = case.run(shape, isa, threads, &[(1, position, len)]);
                        assert!(bits(&alone[0]) == whole[part.clone()], "{isa} {threads} {position} {len}");
                        position += len;
                    }
                }
                let batch =
                    case.run(shape, isa, threads, &[(0, 300, 1), (1, 590, 10), (2, 0, 40), (1, 599, 1)]);
                assert!(bits(&batch[1]) == whole[590 * token..], "{isa} {threads}");
                assert!(bits(&batch[3]) == whole[599 * token..], "{isa} {threads}");
            }
        }
    }
}

#[test]
fn f32_equals_the_definition() {
    equals_the_definition::<F32Kv>(2e-6);
}

#[test]
fn bf16_equals_the_definition() {
    equals_the_definition::<Bf16Kv>(5e-3);
}

#[test]
fn int8_equals_the_definition() {
    equals_the_definition::<Int8Kv>(1e-2);
}

#[test]
fn f32_has_the_same_bits_however_it_is_cut() {
    same_bits_however_it_is_cut::<F32Kv>();
}

#[test]
fn bf16_has_the_same_bits_however_it_is_cut() {
    same_bits_however_it_is_cut::<Bf16Kv>();
}

#[test]
fn int8_has_the_same_bits_however_it_is_cut() {
    same_bits_however_it_is_cut::<Int8Kv>();
}
