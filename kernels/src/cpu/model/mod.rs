//! A model ready to run: packed weights, paged keys and values, a program, threads. Knows no
//! architecture: what a step does is in the recorded program.

mod batch;
mod buffer;
mod draw;
mod forward;
mod head;
mod program;
mod rows;
mod score;

use std::collections::HashMap;
use std::fmt;

use super::attention::{AttentionScratch, AttentionShape, AttentionTiles};
use super::isa::Isa;
use super::kv::{Bf16Kv, F32Kv, Int8Kv, Kv, KvDtype, KvShape};
use super::linear::{Context, LinearError, PackedLinear};
use super::pool::{Pool, PoolError};
use super::rope::RopeTable;
use crate::dequantize::{DequantizeError, Format, dequantize};

pub use batch::{Batch, BatchError, BatchLimits, CheckedTokens};
use buffer::Buffer;
pub use draw::Draw;
pub use forward::{PHASES, PhaseTimes};
use head::Head;
pub use program::{Op, OpSpec, Program, ProgramError, ProgramLimits, RegisterType, WeightShape};
pub use score::{Choice, Scores, Wanted};

/// Shape of a model and how to run it.
#[derive(Debug, Clone, Copy)]
pub struct ModelSettings {
    /// Layers with keys and values.
    pub num_layers: usize,
    /// Heads.
    pub attention: AttentionShape,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Positions are below this.
    pub max_len: usize,
    /// Blocks of 16 tokens.
    pub num_blocks: usize,
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
    /// Whether the head's inputs are quantized where its matrix takes that.
    pub quantize_activations: bool,
    /// Threads, the caller's included.
    pub num_threads: usize,
    /// The instruction set.
    pub isa: Isa,
}

/// Why a model could not be built or run.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelError {
    /// A setting makes no sense.
    Settings(String),
    /// A weight that cannot be used; its name and why.
    Weight(String, LinearError),
    /// The program does not fit.
    Program(ProgramError),
    /// The step does not make sense; nothing was computed.
    Batch(BatchError),
    /// Kernels refused or failed.
    Kernel(LinearError),
}

impl fmt::Display for ModelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settings(reason) => f.write_str(reason),
            Self::Weight(name, error) => write!(f, "weight {name:?}: {error}"),
            Self::Program(error) => error.fmt(f),
            Self::Batch(error) => error.fmt(f),
            Self::Kernel(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ModelError {}

impl From<LinearError> for ModelError {
    fn from(error: LinearError) -> Self {
        Self::Kernel(error)
    }
}

impl From<PoolError> for ModelError {
    fn from(error: PoolError) -> Self {
        Self::Kernel(LinearError::Pool(error))
    }
}

impl From<BatchError> for ModelError {
    fn from(error: BatchError) -> Self {
        Self::Batch(error)
    }
}

#[derive(Debug)]
enum Weight {
    Matrix(PackedLinear),
    Vector(Vec<f32>),
}

impl Weight {
    fn shape(&self) -> WeightShape {
        match self {
            Self::Matrix(matrix) => WeightShape::Matrix {
                num_outputs: matrix.num_outputs(),
                num_inputs: matrix.num_inputs(),
                takes_quantized: matrix.takes_quantized(),
            },
            Self::Vector(values) => WeightShape::Vector(values.len()),
        }
    }
}

/// Keys and values in the format that was asked for.
#[derive(Debug)]
enum KvCache {
    F32(Kv<F32Kv>),
    Bf16(Kv<Bf16Kv>),
    Int8(Kv<Int8Kv>),
}

/// A model, its memory and its threads.
pub struct Model {
    settings: ModelSettings,
    pool: Pool,
    weights: Vec<Weight>,
    names: HashMap<String, usize>,
    kv: KvCache,
    rope: RopeTable,
    program: Program,
    buffers: Vec<Buffer>,
    tokens: CheckedTokens,
    tiles: AttentionTiles,
    attention: AttentionScratch,
    head: Head,
    times: PhaseTimes,
}

impl Model {
    /// A model without weights and program.
    pub fn new(settings: ModelSettings) -> Result<Self, ModelError> {
        check_settings(&settings)?;
        let shape = KvShape {
            num_layers: settings.num_layers,
            num_blocks: settings.num_blocks,
            num_kv_heads: settings.attention.num_kv_heads,
            head_dim: settings.attention.head_dim,
        };
        let kv = match settings.kv_dtype {
            KvDtype::F32 => Kv::new(shape).map(KvCache::F32),
            KvDtype::Bf16 => Kv::new(shape).map(KvCache::Bf16),
            KvDtype::Int8 => Kv::new(shape).map(KvCache::Int8),
        };
        let kv = kv.ok_or_else(|| {
            ModelError::Settings(format!("{} KV blocks do not fit into memory", settings.num_blocks))
        })?;
        let pool = Pool::new(settings.num_threads)?;
        Ok(Self {
            settings,
            pool,
            weights: Vec::new(),
            names: HashMap::new(),
            kv,
            rope: RopeTable::new(settings.max_len, settings.attention.head_dim, settings.rope_theta),
            program: Program { ops: Vec::new(), buffers: Vec::new() },
            buffers: Vec::new(),
            tokens: CheckedTokens::default(),
            tiles: AttentionTiles::default(),
            attention: AttentionScratch::default(),
            head: Head::default(),
            times: PhaseTimes::default(),
        })
    }

    /// Bytes of one block of 16 tokens over all layers.
    pub fn kv_bytes_per_block(&self) -> usize {
        let shape = match &self.kv {
            KvCache::F32(kv) => kv.shape(),
            KvCache::Bf16(kv) => kv.shape(),
            KvCache::Int8(kv) => kv.shape(),
        };
        shape.block_bytes(self.settings.kv_dtype)
    }

    /// Repack a matrix `[num_outputs, num_inputs]`; returns whether it takes quantized inputs.
    pub fn add_matrix(
        &mut self,
        name: &str,
        format: Format,
        data: &[u8],
        num_outputs: usize,
        num_inputs: usize,
    ) -> Result<bool, ModelError> {
        let matrix = PackedLinear::pack(format, data, num_outputs, num_inputs, &self.pool)
            .map_err(|error| ModelError::Weight(name.to_owned(), error))?;
        let takes_quantized = matrix.takes_quantized();
        self.add(name, Weight::Matrix(matrix))?;
        Ok(takes_quantized)
    }

    /// Decode a vector, such as the factors of a norm.
    pub fn add_vector(
        &mut self,
        name: &str,
        format: Format,
        data: &[u8],
        len: usize,
    ) -> Result<(), ModelError> {
        let mut values = vec![0.0; len];
        dequantize(format, data, &mut values).map_err(|error: DequantizeError| {
            ModelError::Weight(name.to_owned(), LinearError::Stored(error))
        })?;
        self.add(name, Weight::Vector(values))
    }

    fn add(&mut self, name: &str, weight: Weight) -> Result<(), ModelError> {
        if self.names.contains_key(name) {
            return Err(ModelError::Settings(format!("weight {name:?} was added before")));
        }
        self.names.insert(name.to_owned(), self.weights.len());
        self.weights.push(weight);
        Ok(())
    }

    /// Bytes that the weights take, and how many values of matrices they hold.
    pub fn weight_bytes(&self) -> (usize, usize) {
        self.weights.iter().fold((0, 0), |(bytes, values), weight| match weight {
            Weight::Matrix(matrix) => {
                (bytes + matrix.num_bytes(), values + matrix.num_outputs() * matrix.num_inputs())
            }
            Weight::Vector(vector) => (bytes + size_of_val(&**vector), values),
        })
    }

    /// Take in what a step does.
    pub fn load_program(&mut self, specs: &[OpSpec]) -> Result<(), ModelError> {
        let attention = &self.settings.attention;
        let limits = ProgramLimits {
            num_layers: self.settings.num_layers,
            query_width: attention.num_heads * attention.head_dim,
            kv_width: attention.num_kv_heads * attention.head_dim,
        };
        let find = |name: &str| self.names.get(name).map(|&index| (index, self.weights[index].shape()));
        let program = Program::compile(specs, &limits, find).map_err(ModelError::Program)?;
        for op in &program.ops {
            if let Op::Embed { weight, .. } | Op::Logits { weight, .. } = op
                && let WeightShape::Matrix { num_outputs, .. } = self.weights[*weight].shape()
                && num_outputs != self.settings.vocab_size
            {
                return Err(ModelError::Settings(format!(
                    "a table of {num_outputs} rows for a vocabulary of {}",
                    self.settings.vocab_size
                )));
            }
        }
        self.buffers = program.buffers.iter().map(|_| Buffer::empty()).collect();
        self.program = program;
        Ok(())
    }

    /// Fill blocks with numbers that make NaN of all that they touch; a check of the scheduler.
    pub fn poison(&mut self, blocks: &[i32]) -> Result<(), ModelError> {
        for &block in blocks {
            let block = self.block_index(block)?;
            match &mut self.kv {
                KvCache::F32(kv) => kv.poison(block),
                KvCache::Bf16(kv) => kv.poison(block),
                KvCache::Int8(kv) => kv.poison(block),
            }
        }
        Ok(())
    }

    /// Copy blocks over others, pair after pair.
    pub fn copy_blocks(&mut self, sources: &[i32], targets: &[i32]) -> Result<(), ModelError> {
        if sources.len() != targets.len() {
            return Err(ModelError::Settings("sources and targets differ in length".to_owned()));
        }
        for (&source, &target) in sources.iter().zip(targets) {
            let (source, target) = (self.block_index(source)?, self.block_index(target)?);
            match &mut self.kv {
                KvCache::F32(kv) => kv.copy(source, target),
                KvCache::Bf16(kv) => kv.copy(source, target),
                KvCache::Int8(kv) => kv.copy(source, target),
            }
        }
        Ok(())
    }

    fn block_index(&self, block: i32) -> Result<usize, ModelError> {
        usize::try_from(block)
            .ok()
            .filter(|&block| block < self.settings.num_blocks)
            .ok_or_else(|| ModelError::Settings(format!("there is no block {block}")))
    }
}

fn matrix(weights: &[Weight], index: usize) -> &PackedLinear {
    match &weights[index] {
        Weight::Matrix(matrix) => matrix,
        Weight::Vector(_) => unreachable!("the program was compiled against the weights"),
    }
}

fn vector(weights: &[Weight], index: usize) -> &[f32] {
    match &weights[index] {
        Weight::Vector(values) => values,
        Weight::Matrix(_) => unreachable!("the program was compiled against the weights"),
    }
}

fn check_settings(settings: &ModelSettings) -> Result<(), ModelError> {
    let AttentionShape { num_heads, num_kv_heads, head_dim, window } = settings.attention;
    let fail = |reason: String| Err(ModelError::Settings(reason));
    if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
        return fail(format!("{num_heads} query heads cannot share {num_kv_heads} KV heads evenly"));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return fail(format!("head_dim is {head_dim}; rotary embedding needs an even number"));
    }
    if window == Some(0) {
        return fail("a sliding window must see at least the query's own position".to_owned());
    }
    if settings.max_len == 0 || settings.num_blocks == 0 || settings.vocab_size == 0 {
        return fail("max_len, num_blocks and vocab_size must be at least 1".to_owned());
    }
    let sizes = [settings.max_len, settings.num_blocks, settings.vocab_size];
    if sizes.iter().any(|&size| i32::try_from(size).is_err()) {
        return fail("max_len, num_blocks and vocab_size must fit 32 bits".to_owned());
    }
    if !settings.isa.is_available() {
        return fail(format!("this processor lacks instruction set {}", settings.isa));
    }
    Ok(())
}
