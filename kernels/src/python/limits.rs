//! `rung_kernels.measure_limits`.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::value_error;
use crate::cpu::isa::Isa;
use crate::cpu::limits;
use crate::cpu::pool::{Pool, default_num_threads};

/// Rates by name.
#[pyfunction]
#[pyo3(signature = (num_threads=None))]
pub(super) fn measure_limits(py: Python<'_>, num_threads: Option<usize>) -> PyResult<Bound<'_, PyDict>> {
    let pool = Pool::new(num_threads.unwrap_or_else(default_num_threads)).map_err(value_error)?;
    let limits = py.detach(|| limits::measure(&pool, Isa::best())).map_err(value_error)?;
    let rates = PyDict::new(py);
    rates.set_item("read_gb_s", limits.read_gb_s)?;
    rates.set_item("int8_gop_s", limits.int8_gop_s)?;
    rates.set_item("f32_gflop_s", limits.f32_gflop_s)?;
    Ok(rates)
}
