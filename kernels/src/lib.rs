//! Native CPU kernels. Every function checks its shapes; none knows models, files or the engine.

#![forbid(unsafe_code)]

pub mod dequantize;

#[cfg(feature = "python")]
mod python;
