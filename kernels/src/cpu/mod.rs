//! Kernels for the processor: what a step of the native runner is made of. Knows tensors, rows
//! and threads; no model, no file and no Python.

#![expect(
    clippy::inline_always,
    reason = "only code inlined into `Isa::dispatch` is compiled for its instruction set"
)]

pub mod attention;
pub mod buffer;
pub mod isa;
pub mod kv;
pub mod limits;
pub mod linear;
pub mod math;
pub mod model;
pub mod norm;
pub mod pool;
pub mod quantize;
pub mod rope;
pub mod shared;
pub mod simd;
