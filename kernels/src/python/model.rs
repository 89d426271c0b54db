//! `rung_kernels.Model`: arguments and results of a model's calls as numpy arrays.

use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::value_error;
use crate::cpu::attention::AttentionShape;
use crate::cpu::isa::Isa;
use crate::cpu::kv::{BLOCK_SIZE, KvDtype, KvShape};
use crate::cpu::model::{Batch, Choice, Draw, Model, ModelSettings, OpSpec, PHASES, Scores, Wanted};
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

/// Whether finite, logprobs and ranks of the given ids, top ids and their logprobs one after the other.
type Scored<'py> = (
    Bound<'py, PyArray1<bool>>,
    Bound<'py, PyArray1<f32>>,
    Bound<'py, PyArray1<i32>>,
    Bound<'py, PyArray1<i32>>,
    Bound<'py, PyArray1<f32>>,
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

    #[pyo3(signature = (token_ids, query_start, num_computed, block_tables, sample_rows, scored_tokens=None))]
    #[expect(clippy::too_many_arguments, reason = "columns of one step")]
    fn forward(
        &mut self,
        py: Python<'_>,
        token_ids: PyReadonlyArray1<'_, i32>,
        query_start: PyReadonlyArray1<'_, i32>,
        num_computed: PyReadonlyArray1<'_, i32>,
        block_tables: PyReadonlyArray2<'_, i32>,
        sample_rows: PyReadonlyArray1<'_, i32>,
        scored_tokens: Option<PyReadonlyArray1<'_, i32>>,
    ) -> PyResult<()> {
        let batch = Batch {
            token_ids: token_ids.as_slice()?,
            query_start: query_start.as_slice()?,
            num_computed: num_computed.as_slice()?,
            block_tables: block_tables.as_slice()?,
            table_width: block_tables.shape()[1],
            sample_rows: sample_rows.as_slice()?,
            scored_tokens: match &scored_tokens {
                Some(tokens) => tokens.as_slice()?,
                None => &[],
            },
        };
        py.detach(|| self.model.forward(&batch)).map_err(value_error)
    }

    #[expect(clippy::too_many_arguments, reason = "the columns of the rows that sample")]
    fn sample<'py>(
        &mut self,
        py: Python<'py>,
        num_top: PyReadonlyArray1<'py, i32>,
        on_host: PyReadonlyArray1<'py, bool>,
        temperature: PyReadonlyArray1<'py, f32>,
        top_k: PyReadonlyArray1<'py, i32>,
        top_p: PyReadonlyArray1<'py, f32>,
        number: PyReadonlyArray1<'py, f64>,
    ) -> PyResult<Sampled<'py>> {
        let columns = SampleColumns {
            num_top: num_top.as_slice()?,
            on_host: on_host.as_slice()?,
            temperature: temperature.as_slice()?,
            top_k: top_k.as_slice()?,
            top_p: top_p.as_slice()?,
            number: number.as_slice()?,
        };
        let wanted = columns.wanted().map_err(PyValueError::new_err)?;
        let mut logits = Vec::new();
        let scores = py.detach(|| self.model.sample(&wanted, &mut logits)).map_err(value_error)?;
        let tops = PyDict::new(py);
        for (row, (scores, wanted)) in scores.iter().zip(&wanted).enumerate() {
            if wanted.num_top.is_some() && wanted.choice != Choice::Host {
                let ids: Vec<i32> = scores.top.iter().map(|(id, _)| *id).collect();
                let logprobs: Vec<f32> =
                    scores.top.iter().map(|(_, logit)| logit - scores.logsumexp).collect();
                tops.set_item(row, (PyArray1::from_vec(py, ids), PyArray1::from_vec(py, logprobs)))?;
            }
        }
        let logits = PyArray1::from_vec(py, logits).reshape([
            wanted.iter().filter(|row| row.choice == Choice::Host).count(),
            self.settings.vocab_size,
        ])?;
        let column = |value: fn(&Scores) -> f32| PyArray1::from_vec(py, scores.iter().map(value).collect());
        Ok((
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.id).collect()),
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.is_finite).collect()),
            column(|scores| scores.logit - scores.logsumexp),
            tops,
            logits,
        ))
    }

    fn score<'py>(
        &mut self,
        py: Python<'py>,
        target_ids: PyReadonlyArray1<'py, i32>,
        num_top: PyReadonlyArray1<'py, i32>,
    ) -> PyResult<Scored<'py>> {
        let target_ids = target_ids.as_slice()?;
        let num_top: Vec<usize> = num_top
            .as_slice()?
            .iter()
            .map(|&count| usize::try_from(count))
            .collect::<Result<_, _>>()
            .map_err(|_| PyValueError::new_err("num_top holds a negative number"))?;
        if num_top.len() != target_ids.len() {
            return Err(PyValueError::new_err("target_ids and num_top differ in length"));
        }
        let scores = py.detach(|| self.model.score_targets(target_ids, &num_top)).map_err(value_error)?;
        let finite = || scores.iter().filter(|scores| scores.is_finite);
        let tops = || finite().flat_map(|scores| scores.top.iter().map(move |top| (scores, top)));
        Ok((
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.is_finite).collect()),
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.logit - scores.logsumexp).collect()),
            PyArray1::from_vec(py, scores.iter().map(|scores| scores.rank.cast_signed()).collect()),
            PyArray1::from_vec(py, tops().map(|(_, (id, _))| *id).collect()),
            PyArray1::from_vec(py, tops().map(|(scores, (_, logit))| logit - scores.logsumexp).collect()),
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

/// Columns over the rows that sample.
struct SampleColumns<'a> {
    num_top: &'a [i32],
    on_host: &'a [bool],
    temperature: &'a [f32],
    top_k: &'a [i32],
    top_p: &'a [f32],
    number: &'a [f64],
}

impl SampleColumns<'_> {
    fn wanted(&self) -> Result<Vec<Wanted>, String> {
        let num_rows = self.num_top.len();
        let lengths = [
            self.on_host.len(),
            self.temperature.len(),
            self.top_k.len(),
            self.top_p.len(),
            self.number.len(),
        ];
        if lengths.iter().any(|&len| len != num_rows) {
            return Err("the columns of the rows that sample differ in length".to_owned());
        }
        (0..num_rows).map(|row| self.row(row)).collect()
    }

    fn row(&self, row: usize) -> Result<Wanted, String> {
        let (temperature, top_p, number) = (self.temperature[row], self.top_p[row], self.number[row]);
        let choice = if self.on_host[row] {
            Choice::Host
        } else if temperature == 0.0 {
            Choice::Best
        } else {
            let top_k = usize::try_from(self.top_k[row]);
            let is_finite = temperature.is_finite() && temperature > 0.0;
            match top_k {
                Ok(top_k) if is_finite && top_p > 0.0 && (0.0..1.0).contains(&number) => {
                    Choice::Draw(Draw { temperature, top_k, top_p, number })
                }
                _ => {
                    return Err(format!(
                        "row {row} cannot be drawn with temperature {temperature}, top_k {}, top_p {top_p} \
                         and the number {number}",
                        self.top_k[row]
                    ));
                }
            }
        };
        Ok(Wanted { choice, num_top: usize::try_from(self.num_top[row]).ok() })
    }
}
