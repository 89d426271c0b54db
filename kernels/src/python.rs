//! The Python module `rung_kernels._native`: argument checks and numpy arrays, no arithmetic.

mod limits;
mod model;

use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::cpu::isa::Isa;
use crate::dequantize::{self, Format};

fn value_error(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pyfunction]
fn row_bytes(format: &str, num_cols: usize) -> PyResult<usize> {
    Format::from_name(format).and_then(|format| format.row_bytes(num_cols)).map_err(value_error)
}

#[pyfunction]
#[pyo3(name = "dequantize")]
fn dequantize_rows<'py>(
    py: Python<'py>,
    format: &str,
    data: PyReadonlyArray2<'py, u8>,
    num_cols: usize,
) -> PyResult<Bound<'py, PyArray2<f32>>> {
    let format = Format::from_name(format).map_err(value_error)?;
    let expected = format.row_bytes(num_cols).map_err(value_error)?;
    let &[num_rows, actual] = data.shape() else {
        return Err(PyValueError::new_err("data must have two dimensions"));
    };
    if actual != expected {
        return Err(PyValueError::new_err(format!(
            "data has rows of {actual} bytes; {num_cols} values of format {} take {expected}",
            format.name()
        )));
    }
    let bytes =
        data.as_slice().map_err(|_| PyValueError::new_err("data must be contiguous, row after row"))?;
    let out = PyArray2::<f32>::zeros(py, [num_rows, num_cols], false);
    {
        let mut writer = out.readwrite();
        let values = writer.as_slice_mut()?;
        py.detach(|| dequantize::dequantize(format, bytes, values)).map_err(value_error)?;
    }
    Ok(out)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("FORMATS", PyTuple::new(module.py(), Format::ALL.map(Format::name))?)?;
    module.add("AVAILABLE_ISAS", PyTuple::new(module.py(), Isa::available().into_iter().map(Isa::name))?)?;
    module.add_class::<model::PyModel>()?;
    module.add_function(wrap_pyfunction!(model::kv_bytes_per_block, module)?)?;
    module.add_function(wrap_pyfunction!(limits::measure_limits, module)?)?;
    module.add_function(wrap_pyfunction!(row_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(dequantize_rows, module)?)
}
