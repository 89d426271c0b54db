//! One step: the program's ops over the batch.

use std::time::Instant;

use super::rows::{Elementwise, Norm, RopeStore, each_row};
use super::{Batch, BatchLimits, Buffer, KvCache, Model, ModelError, Op, matrix, vector};
use crate::cpu::attention::{Attention, AttentionScratch};
use crate::cpu::kv::{Kv, KvFormat};
use crate::cpu::linear::{Context, GatedOutput, Output, Projection, gated_silu, project};
use crate::cpu::pool::PoolError;

/// What the time of a step goes to.
pub const PHASES: [&str; 4] = ["linear", "attention", "head", "rest"];

/// Nanoseconds per phase since they were last taken.
pub type PhaseTimes = [u64; PHASES.len()];

const LINEAR: usize = 0;
const ATTENTION: usize = 1;
pub(super) const HEAD: usize = 2;
const REST: usize = 3;

impl Model {
    /// Compute the tokens of a batch, store their keys and values, and keep what the head needs of
    /// the rows that sample.
    pub fn forward(&mut self, batch: &Batch<'_>) -> Result<(), ModelError> {
        let limits = BatchLimits {
            vocab_size: self.settings.vocab_size,
            max_len: self.settings.max_len,
            num_blocks: self.settings.num_blocks,
        };
        self.head.clear();
        self.tokens.check(batch, &limits)?;
        let threads = self.pool.num_threads();
        self.tiles.cut(&self.settings.attention, batch.query_start, batch.num_computed, threads);
        let num_tokens = batch.token_ids.len();
        for index in 0..self.program.buffers.len() {
            self.buffers[index].make_room(self.program.buffers[index], num_tokens);
        }
        // Ops borrow the model while they run, so the list steps out of it.
        let ops = std::mem::take(&mut self.program.ops);
        let result = self.run_ops(&ops, batch);
        self.program.ops = ops;
        result
    }

    fn run_ops(&mut self, ops: &[Op], batch: &Batch<'_>) -> Result<(), ModelError> {
        let num_tokens = batch.token_ids.len();
        let mut then = Instant::now();
        for op in ops {
            let phase = match op {
                Op::Linear { .. } | Op::AddLinear { .. } | Op::GatedLinear { .. } => {
                    self.run_linear(op, num_tokens)?;
                    LINEAR
                }
                Op::RopeStore { q, k, v, layer } => {
                    self.rope_and_store(*q, *k, *v, *layer)?;
                    REST
                }
                &Op::Attention { q, layer, scale, out } => {
                    self.attend(&AttentionOp { q, layer, scale, out }, batch)?;
                    ATTENTION
                }
                Op::Logits { x, norm, weight } => {
                    self.keep_head_rows(*x, *norm, *weight);
                    HEAD
                }
                _ => {
                    self.run_elementwise(op, batch.token_ids)?;
                    REST
                }
            };
            let now = Instant::now();
            self.times[phase] += (now - then).as_nanos() as u64;
            then = now;
        }
        Ok(())
    }

    /// Time per phase since the last call.
    pub fn take_times(&mut self) -> PhaseTimes {
        std::mem::take(&mut self.times)
    }

    fn run_linear(&mut self, op: &Op, num_rows: usize) -> Result<(), ModelError> {
        let ctx = Context { pool: &self.pool, isa: self.settings.isa };
        match op {
            Op::Linear { x, weights, outs } => {
                let mut outputs: Vec<Buffer> = outs.iter().map(|&out| take(&mut self.buffers, out)).collect();
                let mut projections: Vec<Projection<'_>> = weights
                    .iter()
                    .zip(&mut outputs)
                    .map(|(&weight, output)| Projection {
                        weight: matrix(&self.weights, weight),
                        output: Output::Store(output.float_mut()),
                    })
                    .collect();
                project(ctx, self.buffers[*x].input(), num_rows, &mut projections)?;
                for (&out, output) in outs.iter().zip(outputs) {
                    self.buffers[out] = output;
                }
            }
            Op::AddLinear { x, y, weight } => {
                let mut sum = take(&mut self.buffers, *x);
                let output = Output::Add(sum.float_mut());
                let projection = Projection { weight: matrix(&self.weights, *weight), output };
                project(ctx, self.buffers[*y].input(), num_rows, &mut [projection])?;
                self.buffers[*x] = sum;
            }
            Op::GatedLinear { x, gate, up, out } => {
                let mut output = take(&mut self.buffers, *out);
                let target = match &mut output {
                    Buffer::Float { values, len } => GatedOutput::Float(&mut values[..*len]),
                    Buffer::Quantized(rows) => GatedOutput::Quantized(rows),
                };
                let (gate, up) = (matrix(&self.weights, *gate), matrix(&self.weights, *up));
                gated_silu(ctx, self.buffers[*x].input(), num_rows, gate, up, target)?;
                self.buffers[*out] = output;
            }
            _ => unreachable!("not a linear op"),
        }
        Ok(())
    }

    fn run_elementwise(&mut self, op: &Op, token_ids: &[i32]) -> Result<(), ModelError> {
        let (pool, isa) = (&self.pool, self.settings.isa);
        match op {
            Op::Embed { weight, out } => {
                let mut output = take(&mut self.buffers, *out);
                let table = matrix(&self.weights, *weight);
                each_row(pool, output.float_mut(), table.num_inputs(), |row, values| {
                    table.dequantize_row(token_ids[row] as usize, values);
                })?;
                self.buffers[*out] = output;
            }
            Op::RmsNorm { x, weight, eps, out } => {
                let mut output = take(&mut self.buffers, *out);
                let norm = Norm { weight: vector(&self.weights, *weight), eps: *eps };
                norm.run(pool, isa, self.buffers[*x].float(), &mut output)?;
                self.buffers[*out] = output;
            }
            Op::Quantize { x, out } => {
                let mut output = take(&mut self.buffers, *out);
                output.quantized_mut().quantize(isa, pool, self.buffers[*x].float())?;
                self.buffers[*out] = output;
            }
            Op::SiluMul { gate: a, up: b, out } | Op::Add { a, b, out } => {
                let mut output = take(&mut self.buffers, *out);
                let (a, b) = (self.buffers[*a].float(), self.buffers[*b].float());
                let is_silu = matches!(op, Op::SiluMul { .. });
                let width = a.len() / token_ids.len().max(1);
                each_row(pool, output.float_mut(), width, |row, out| {
                    let part = row * width..(row + 1) * width;
                    isa.dispatch(Elementwise { a: &a[part.clone()], b: &b[part], out, is_silu });
                })?;
                self.buffers[*out] = output;
            }
            _ => unreachable!("not an elementwise op"),
        }
        Ok(())
    }

    fn rope_and_store(&mut self, q: usize, k: usize, v: usize, layer: usize) -> Result<(), ModelError> {
        let mut queries = take(&mut self.buffers, q);
        let mut keys = take(&mut self.buffers, k);
        let work = RopeStore {
            rope: &self.rope,
            positions: &self.tokens.positions,
            slots: &self.tokens.slots,
            layer,
            queries: queries.float_mut(),
            keys: keys.float_mut(),
            values: self.buffers[v].float(),
        };
        match &mut self.kv {
            KvCache::F32(kv) => work.run(&self.pool, self.settings.isa, kv),
            KvCache::Bf16(kv) => work.run(&self.pool, self.settings.isa, kv),
            KvCache::Int8(kv) => work.run(&self.pool, self.settings.isa, kv),
        }?;
        self.buffers[q] = queries;
        self.buffers[k] = keys;
        Ok(())
    }

    fn attend(&mut self, op: &AttentionOp, batch: &Batch<'_>) -> Result<(), ModelError> {
        let mut output = take(&mut self.buffers, op.out);
        let mut scratch = std::mem::take(&mut self.attention);
        let out = output.float_mut();
        match &self.kv {
            KvCache::F32(kv) => self.attention(kv, op, batch, &mut scratch, out),
            KvCache::Bf16(kv) => self.attention(kv, op, batch, &mut scratch, out),
            KvCache::Int8(kv) => self.attention(kv, op, batch, &mut scratch, out),
        }?;
        self.attention = scratch;
        self.buffers[op.out] = output;
        Ok(())
    }

    fn attention<F: KvFormat>(
        &self,
        kv: &Kv<F>,
        op: &AttentionOp,
        batch: &Batch<'_>,
        scratch: &mut AttentionScratch,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let attention = Attention {
            shape: self.settings.attention,
            kv,
            layer: op.layer,
            scale: op.scale,
            tiles: &self.tiles,
            block_tables: batch.block_tables,
            table_width: batch.table_width,
            queries: self.buffers[op.q].float(),
        };
        attention.run(self.settings.isa, &self.pool, scratch, out)
    }
}

struct AttentionOp {
    q: usize,
    layer: usize,
    scale: f32,
    out: usize,
}

/// Take a buffer out while it is written, beside others that are read.
fn take(buffers: &mut [Buffer], index: usize) -> Buffer {
    std::mem::replace(&mut buffers[index], Buffer::empty())
}
