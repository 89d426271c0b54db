//! Work on one row of a step at a time: norms, elementwise ops, rotary embedding and KV stores.
#![expect(unsafe_code, reason = "units write disjoint rows of one buffer, or disjoint KV slots")]

use super::buffer::Buffer;
use crate::cpu::isa::{Isa, Kernel};
use crate::cpu::kv::{Kv, KvFormat, KvWriter, Slot};
use crate::cpu::math;
use crate::cpu::norm::rms_norm;
use crate::cpu::pool::{Pool, PoolError};
use crate::cpu::quantize::{BLOCK_ROWS, GroupBlock, quantize_row};
use crate::cpu::rope::RopeTable;
use crate::cpu::shared::SharedSlice;
use crate::cpu::simd::{LANES, Simd};

/// Rows of one unit; those of a step of a few rows are done at once by the caller.
const UNIT_ROWS: usize = BLOCK_ROWS;

/// Call `work(row, values)` for each row of `out`, `[num_rows, width]`.
pub(super) fn each_row(
    pool: &Pool,
    out: &mut [f32],
    width: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), PoolError> {
    let num_rows = out.len().checked_div(width).unwrap_or(0);
    let out = SharedSlice::new(out);
    pool.run(num_rows.div_ceil(UNIT_ROWS), |unit, _| {
        for row in unit * UNIT_ROWS..num_rows.min((unit + 1) * UNIT_ROWS) {
            // SAFETY: every unit has its own rows.
            work(row, unsafe { out.part(row * width..(row + 1) * width) });
        }
    })
}

/// A norm of rows.
#[derive(Clone, Copy)]
pub(super) struct Norm<'a> {
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
}

impl Norm<'_> {
    /// Norm `x` `[num_rows, width]` into `out`, quantized if that is what it holds.
    pub(super) fn run(self, pool: &Pool, isa: Isa, x: &[f32], out: &mut Buffer) -> Result<(), PoolError> {
        let width = self.weight.len();
        match out {
            Buffer::Float { values, len } => each_row(pool, &mut values[..*len], width, |row, out| {
                let x = &x[row * width..(row + 1) * width];
                isa.dispatch(NormRow { norm: self, x, out });
            }),
            Buffer::Quantized(rows) => {
                let (num_rows, num_groups) = (rows.num_rows(), rows.num_groups());
                let blocks = SharedSlice::new(rows.blocks_mut());
                pool.run(num_rows.div_ceil(BLOCK_ROWS), |unit, _| {
                    // SAFETY: every unit has the blocks of its own rows.
                    let blocks = unsafe { blocks.part(unit * num_groups..(unit + 1) * num_groups) };
                    let rows = unit * BLOCK_ROWS..num_rows.min((unit + 1) * BLOCK_ROWS);
                    let x = &x[rows.start * width..rows.end * width];
                    isa.dispatch(NormQuantizeRows { norm: self, x, blocks });
                })
            }
        }
    }
}

/// One row; returns whether it was finite.
pub(super) struct NormRow<'a> {
    pub(super) norm: Norm<'a>,
    pub(super) x: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        rms_norm(s, self.x, self.norm.weight, self.norm.eps, self.out)
    }
}

/// Up to eight rows into one block of quantized rows.
struct NormQuantizeRows<'a> {
    norm: Norm<'a>,
    x: &'a [f32],
    blocks: &'a mut [GroupBlock],
}

impl Kernel for NormQuantizeRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.norm.weight.len();
        let mut normed = vec![0.0; width];
        for (row, x) in self.x.chunks_exact(width).enumerate() {
            rms_norm(s, x, self.norm.weight, self.norm.eps, &mut normed);
            quantize_row(s, &normed, self.blocks, row);
        }
    }
}

/// One row of silu(a) * b, or of a + b.
pub(super) struct Elementwise<'a> {
    pub(super) a: &'a [f32],
    pub(super) b: &'a [f32],
    pub(super) out: &'a mut [f32],
    pub(super) is_silu: bool,
}

impl Kernel for Elementwise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for ((a, b), out) in self.a.chunks(LANES).zip(self.b.chunks(LANES)).zip(self.out.chunks_mut(LANES)) {
            let (a, b) = (s.load_partial(a), s.load_partial(b));
            let result = if self.is_silu { s.mul(math::silu(s, a), b) } else { s.add(a, b) };
            s.store_partial(result, out);
        }
    }
}

/// Rotate the step's queries and keys by position and store its keys and values.
pub(super) struct RopeStore<'a> {
    pub(super) rope: &'a RopeTable,
    /// `[num_tokens]`.
    pub(super) positions: &'a [usize],
    /// `[num_tokens]`, each once; their layer is not looked at.
    pub(super) slots: &'a [Slot],
    pub(super) layer: usize,
    /// `[num_tokens, num_heads * head_dim]`, rotated in place.
    pub(super) queries: &'a mut [f32],
    /// `[num_tokens, num_kv_heads * head_dim]`, rotated in place.
    pub(super) keys: &'a mut [f32],
    /// `[num_tokens, num_kv_heads * head_dim]`.
    pub(super) values: &'a [f32],
}

/// Tokens that one unit rotates and stores.
const STORE_TOKENS: usize = 4;

impl RopeStore<'_> {
    pub(super) fn run<F: KvFormat>(self, pool: &Pool, isa: Isa, kv: &mut Kv<F>) -> Result<(), PoolError> {
        let num_tokens = self.positions.len();
        let (q_width, kv_width) =
            (self.queries.len() / num_tokens.max(1), self.values.len() / num_tokens.max(1));
        let dim = kv.shape().dim();
        let writer = kv.writer();
        let (queries, keys) = (SharedSlice::new(self.queries), SharedSlice::new(self.keys));
        pool.run(num_tokens.div_ceil(STORE_TOKENS), |unit, _| {
            let mut scratch = vec![F::Value::default(); dim];
            for token in unit * STORE_TOKENS..num_tokens.min((unit + 1) * STORE_TOKENS) {
                // SAFETY: every unit has its own tokens.
                let queries = unsafe { queries.part(token * q_width..(token + 1) * q_width) };
                // SAFETY: as above.
                let keys = unsafe { keys.part(token * kv_width..(token + 1) * kv_width) };
                isa.dispatch(StoreToken {
                    rope: self.rope,
                    position: self.positions[token],
                    slot: Slot { layer: self.layer, ..self.slots[token] },
                    queries,
                    keys,
                    values: &self.values[token * kv_width..(token + 1) * kv_width],
                    writer: &writer,
                    scratch: &mut scratch,
                });
            }
        })
    }
}

struct StoreToken<'a, F: KvFormat> {
    rope: &'a RopeTable,
    position: usize,
    slot: Slot,
    queries: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a [f32],
    writer: &'a KvWriter<'a, F>,
    scratch: &'a mut [F::Value],
}

impl<F: KvFormat> Kernel for StoreToken<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        self.rope.rotate(self.position, self.queries);
        self.rope.rotate(self.position, self.keys);
        // SAFETY: the slots of a step are distinct, and a unit's tokens are its own.
        unsafe {
            self.writer.store(self.slot, self.keys, self.values, self.scratch);
        }
    }
}
