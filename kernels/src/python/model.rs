//! `rung_kernels.Model`: arguments and results of a model's calls as numpy arrays.

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::value_error;
use crate::cpu::attention::AttentionShape;
use crate::cpu::isa::Isa;
use crate::cpu::kv::{BLOCK_SIZE, KvDtype, KvShape};
use crate::cpu::model::{Batch, Model, ModelSettings, OpSpec, PHASES, Scores, Wanted};
use crate::cpu::pool::default_num_threads;
use crate::dequantize::Format;

/// Kind, inputs, weights, outputs, layer, value.
type OpTuple = (String, Vec<usize>, Vec<String>, Vec<usize>, i64, f32);

/// Ids, whether finite, logprobs of the ids, top ids and logprobs by row, all logits.
type Sampled<'py> = (
    Bound<'py, PyArray1<i32>>,
    Bound<'py, PyArray1<bool>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyDict>,
    Bound<'py, PyArray2<f32>>,
);

/// A model on the processor.
#[pyclass(name = "Model", module = "rung_kernels")]
pub(super) struct PyModel {
    model: Model,
    settings: ModelSettings,
}

#[pymethods]
impl PyModel {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python class")]
    #[pyo3(signature = (*, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, rope_theta, max_len,
                        num_blocks, block_size, kv_dtype, activations, num_threads=None, isa=None, window=None))]
    fn new(
        num_layers: usize,
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        vocab_size: usize,
        rope_theta: f64,
        max_len: usize,
        num_blocks: usize,
        block_size: usize,
        kv_dtype: &str,
        activations: &str,
        num_threads: Option<usize>,
        isa: Option<&str>,
        window: Option<usize>,
    ) -> PyResult<Self> {
        if block_size != BLOCK_SIZE {
            return Err(PyValueError::new_err(format!(
                "block_size is {block_size}; the native runner has blocks of {BLOCK_SIZE} tokens"
            )));
        }
        let kv_dtype = kv_dtype_of(kv_dtype)?;
        let quantize_activations = match activations {
            "int8" => true,
            "float" => false,
            other => {
                return Err(PyValueError::new_err(format!("activations is {other:?}; choose int8 or float")));
            }
        };
        let settings = ModelSettings {
            num_layers,
            attention: AttentionShape { num_heads, num_kv_heads, head_dim, window },
            vocab_size,
            rope_theta,
            max_len,
            num_blocks,
            kv_dtype,
            quantize_activations,
            num_threads: num_threads.unwrap_or_else(default_num_threads),
            isa: isa.map_or_else(|| Ok(Isa::best()), Isa::from_name).map_err(value_error)?,
        };
        let model = Model::new(settings).map_err(value_error)?;
        Ok(Self { model, settings })
    }

    /// Name of the instruction set in use.
    #[getter]
    fn isa(&self) -> &'static str {
        self.settings.isa.name()
    }

    #[getter]
    fn num_threads(&self) -> usize {
        self.settings.num_threads
    }

    #[getter]
    fn kv_bytes_per_block(&self) -> usize {
        self.model.kv_bytes_per_block()
    }

    /// Bytes that the weights take, and how many numbers the matrices hold.
    #[getter]
    fn weight_bytes(&self) -> (usize, usize) {
        self.model.weight_bytes()
    }

    fn add_matrix(
        &mut self,
        py: Python<'_>,
        name: &str,
        format: &str,
        data: PyReadonlyArray2<'_, u8>,
        num_cols: usize,
    ) -> PyResult<bool> {
        let format = Format::from_name(format).map_err(value_error)?;
        let num_rows = data.shape()[0];
        let bytes = data.as_slice()?;
        py.detach(|| self.model.add_matrix(name, format, bytes, num_rows, num_cols)).map_err(value_error)
    }

    fn add_vector(
        &mut self,
        name: &str,
        format: &str,
        data: PyReadonlyArray2<'_, u8>,
        len: usize,
    ) -> PyResult<()> {
        let format = Format::from_name(format).map_err(value_error)?;
        self.model.add_vector(name, format, data.as_slice()?, len).map_err(value_error)
    }

    fn load_program(&mut self, ops: Vec<OpTuple>) -> PyResult<()> {
        let specs: Vec<OpSpec> = ops
            .into_iter()
            .map(|(kind, inputs, weights, outputs, layer, value)| OpSpec {
                kind,
                inputs,
                weights,
                outputs,
                layer,
                value,
            })
            .collect();
        self.model.load_program(&specs).map_err(value_error)
    }

    fn poison(&mut self, py: Python<'_>, blocks: PyReadonlyArray1<'_, i32>) -> PyResult<()> {
        let blocks = blocks.as_slice()?;
        py.detach(|| self.model.poison(blocks)).map_err(value_error)
    }

    fn copy_blocks(
        &mut self,
        py: Python<'_>,
        sources: PyReadonlyArray1<'_, i32>,
        targets: PyReadonlyArray1<'_, i32>,
    ) -> PyResult<()> {
        let (sources, targets) = (sources.as_slice()?, targets.as_slice()?);
        py.detach(|| self.model.copy_blocks(sources, targets)).map_err(value_error)
    }

    fn forward(
        &mut self,
        py: Python<'_>,
        token_ids: PyReadonlyArray1<'_, i32>,
        query_start: PyReadonlyArray1<'_, i32>,
        num_computed: PyReadonlyArray1<'_, i32>,
        block_tables: PyReadonlyArray2<'_, i32>,
        sample_rows: PyReadonlyArray1<'_, i32>,
    ) -> PyResult<()> {
        let batch = Batch {
            token_ids: token_ids.as_slice()?,
            query_start: query_start.as_slice()?,
            num_computed: num_computed.as_slice()?,
            block_tables: block_tables.as_slice()?,
            table_width: block_tables.shape()[1],
            sample_rows: sample_rows.as_slice()?,
        };
        py.detach(|| self.model.forward(&batch)).map_err(value_error)
    }

    fn sample<'py>(
        &mut self,
        py: Python<'py>,
        num_top: PyReadonlyArray1<'py, i32>,
        needs_logits: PyReadonlyArray1<'py, bool>,
    ) -> PyResult<Sampled<'py>> {
        let (num_top, needs_logits) = (num_top.as_slice()?, needs_logits.as_slice()?);
        if num_top.len() != needs_logits.len() {
            return Err(PyValueError::new_err("num_top and needs_logits differ in length"));
        }
        let wanted: Vec<Wanted> =
            num_top.iter().zip(needs_logits).map(|(&top, &all)| wanted(top, all)).collect();
        let mut logits = Vec::new();
        let scores = py.detach(|| self.model.sample(&wanted, &mut logits)).map_err(value_error)?;
        let tops = PyDict::new(py);
        for (row, (scores, wanted)) in scores.iter().zip(&wanted).enumerate() {
            if let Wanted::Top(_) = wanted {
                let ids: Vec<i32> = scores.top.iter().map(|(id, _)| *id).collect();
                let logprobs: Vec<f32> =
                    scores.top.iter().map(|(_, logit)| logit - scores.logsumexp).collect();
                tops.set_item(row, (PyArray1::from_vec(py, ids), PyArray1::from_vec(py, logprobs)))?;
            }
        }
        let logits = PyArray1::from_vec(py, logits)
            .reshape([needs_logits.iter().filter(|all| **all).count(), self.settings.vocab_size])?;
        let column = |value: fn(&Scores) -> f32| PyArray1::from_vec(py, scores.iter().map(value).collect());
        Ok((
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.best_id).collect()),
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.is_finite).collect()),
            column(|scores| scores.best_logit - scores.logsumexp),
            tops,
            logits,
        ))
    }

    /// Nanoseconds of `forward` by phase since the last call.
    fn take_times<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let times = PyDict::new(py);
        for (phase, nanoseconds) in PHASES.iter().zip(self.model.take_times()) {
            times.set_item(phase, nanoseconds)?;
        }
        Ok(times)
    }
}

/// Bytes of a block of 16 tokens over all layers.
#[pyfunction]
pub(super) fn kv_bytes_per_block(
    num_layers: usize,
    num_kv_heads: usize,
    head_dim: usize,
    kv_dtype: &str,
) -> PyResult<usize> {
    let shape = KvShape { num_layers, num_blocks: 1, num_kv_heads, head_dim };
    Ok(shape.block_bytes(kv_dtype_of(kv_dtype)?))
}

fn kv_dtype_of(name: &str) -> PyResult<KvDtype> {
    KvDtype::from_name(name)
        .ok_or_else(|| PyValueError::new_err(format!("kv_dtype is {name:?}; choose f32, bf16 or int8")))
}

fn wanted(num_top: i32, all: bool) -> Wanted {
    match usize::try_from(num_top) {
        _ if all => Wanted::All,
        Ok(count) => Wanted::Top(count),
        Err(_) => Wanted::Best,
    }
}
