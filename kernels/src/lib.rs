//! Native CPU kernels. Every function checks its shapes; none knows models, files or the engine.

#![deny(unsafe_code)]

pub mod cpu;
pub mod dequantize;

#[cfg(feature = "python")]
mod python;
