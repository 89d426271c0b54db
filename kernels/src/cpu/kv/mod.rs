//! Paged keys and values, laid out as the attention kernel reads them. Who owns a block is not
//! known here.
//!
//! A tile is what one block of one layer holds for one KV head: keys and values of 16 tokens, in
//! units of 32 numbers that load as two vectors of 16. Key units are two dimensions of all tokens,
//! so that each lane is a token; value units are 32 dimensions of one token, so that each lane is a
//! dimension. `head_dim` is padded with zeros to whole units.
#![expect(unsafe_code, reason = "several threads store tokens into one cache")]

mod format;

use std::alloc::{Layout, alloc_zeroed};
use std::marker::PhantomData;
use std::ops::Range;

pub use format::{Bf16Kv, F32Kv, Int8Kv, KvFormat};

/// Tokens in a block.
pub const BLOCK_SIZE: usize = 16;

/// Numbers that load together, as two vectors.
pub const UNIT: usize = 32;

const CACHE_LINE: usize = 64;

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDtype {
    /// Single precision.
    F32,
    /// The upper half of a single, rounded to nearest even.
    Bf16,
    /// 8 bits with one f32 scale per token and head.
    Int8,
}

impl KvDtype {
    /// The dtype of that name: `f32`, `bf16` or `int8`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "f32" => Some(Self::F32),
            "bf16" => Some(Self::Bf16),
            "int8" => Some(Self::Int8),
            _ => None,
        }
    }

    fn tile_bytes(self, dim: usize) -> usize {
        let num_values = 2 * BLOCK_SIZE * dim;
        match self {
            Self::F32 => num_values * size_of::<f32>(),
            Self::Bf16 => num_values * size_of::<u16>(),
            Self::Int8 => num_values + 2 * BLOCK_SIZE * size_of::<f32>(),
        }
    }
}

/// Sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub num_layers: usize,
    /// Blocks per layer.
    pub num_blocks: usize,
    /// Heads of keys and values.
    pub num_kv_heads: usize,
    /// Numbers per head.
    pub head_dim: usize,
}

impl KvShape {
    /// `head_dim` padded to whole units.
    #[inline(always)]
    pub fn dim(&self) -> usize {
        self.head_dim.next_multiple_of(UNIT)
    }

    /// Bytes of one block over all layers, keys and values.
    pub fn block_bytes(&self, dtype: KvDtype) -> usize {
        self.num_layers * self.num_kv_heads * dtype.tile_bytes(self.dim())
    }

    #[inline(always)]
    fn tile_index(&self, layer: usize, block: usize, head: usize) -> usize {
        debug_assert!(block < self.num_blocks && head < self.num_kv_heads);
        (layer * self.num_blocks + block) * self.num_kv_heads + head
    }

    fn num_tiles(&self) -> Option<usize> {
        self.num_layers.checked_mul(self.num_blocks)?.checked_mul(self.num_kv_heads)
    }
}

/// Keys and values of all layers in one format.
#[derive(Debug)]
pub struct Kv<F: KvFormat> {
    shape: KvShape,
    values: Aligned<F::Value>,
    scales: Aligned<f32>,
}

/// What one block of one layer holds for one KV head.
#[derive(Debug, Clone, Copy)]
pub struct Tile<'a, V> {
    /// Two dimensions of 16 tokens per unit: `dim / 2` units.
    pub keys: &'a [[V; UNIT]],
    /// 32 dimensions of a token per unit: `dim / 32` units per token.
    pub values: &'a [[V; UNIT]],
    /// One scale per token; ones where the format has none.
    pub key_scales: &'a [f32; BLOCK_SIZE],
    /// One scale per token; ones where the format has none.
    pub value_scales: &'a [f32; BLOCK_SIZE],
}

/// Where one token's keys and values go.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    /// Layer of the model.
    pub layer: usize,
    /// Block, below `num_blocks`.
    pub block: usize,
    /// Place in the block, below `BLOCK_SIZE`.
    pub offset: usize,
}

const NO_SCALES: [f32; BLOCK_SIZE] = [1.0; BLOCK_SIZE];

impl<F: KvFormat> Kv<F> {
    /// Zeroed memory, not resident before it is written; None when its size does not fit.
    pub fn new(shape: KvShape) -> Option<Self> {
        let num_tiles = shape.num_tiles()?;
        let num_values = num_tiles.checked_mul(2 * BLOCK_SIZE * shape.dim())?;
        let num_scales = if F::SCALED { num_tiles * 2 * BLOCK_SIZE } else { 0 };
        Some(Self { shape, values: Aligned::zeroed(num_values)?, scales: Aligned::zeroed(num_scales)? })
    }

    /// Sizes.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The tile of a layer, block and KV head.
    #[inline(always)]
    pub fn tile(&self, layer: usize, block: usize, head: usize) -> Tile<'_, F::Value> {
        let index = self.shape.tile_index(layer, block, head);
        let num_values = 2 * BLOCK_SIZE * self.shape.dim();
        let (units, _) = self.values.as_slice()[index * num_values..][..num_values].as_chunks::<UNIT>();
        let (keys, values) = units.split_at(units.len() / 2);
        let (key_scales, value_scales) = if F::SCALED {
            let (scales, _) = self.scales.as_slice()[index * 2 * BLOCK_SIZE..].as_chunks::<BLOCK_SIZE>();
            (&scales[0], &scales[1])
        } else {
            (&NO_SCALES, &NO_SCALES)
        };
        Tile { keys, values, key_scales, value_scales }
    }

    /// Fill a block of every layer with numbers that make NaN of all that they touch.
    pub fn poison(&mut self, block: usize) {
        let num_values = 2 * BLOCK_SIZE * self.shape.dim();
        for layer in 0..self.shape.num_layers {
            let first = self.shape.tile_index(layer, block, 0);
            let tiles = first..first + self.shape.num_kv_heads;
            self.values.as_mut_slice()[scaled(&tiles, num_values)].fill(F::POISON);
            if F::SCALED {
                self.scales.as_mut_slice()[scaled(&tiles, 2 * BLOCK_SIZE)].fill(f32::NAN);
            }
        }
    }

    /// Make a block of every layer hold what another one does.
    pub fn copy(&mut self, source: usize, target: usize) {
        let num_values = 2 * BLOCK_SIZE * self.shape.dim();
        for layer in 0..self.shape.num_layers {
            let tiles = |block| {
                let first = self.shape.tile_index(layer, block, 0);
                first..first + self.shape.num_kv_heads
            };
            let (from, to) = (tiles(source), tiles(target));
            self.values.as_mut_slice().copy_within(scaled(&from, num_values), to.start * num_values);
            if F::SCALED {
                self.scales
                    .as_mut_slice()
                    .copy_within(scaled(&from, 2 * BLOCK_SIZE), to.start * 2 * BLOCK_SIZE);
            }
        }
    }

    /// A handle through which several threads store tokens.
    pub fn writer(&mut self) -> KvWriter<'_, F> {
        KvWriter {
            shape: self.shape,
            values: self.values.as_mut_slice().as_mut_ptr(),
            scales: self.scales.as_mut_slice().as_mut_ptr(),
            cache: PhantomData,
        }
    }
}

fn scaled(range: &Range<usize>, factor: usize) -> Range<usize> {
    range.start * factor..range.end * factor
}

/// Stores tokens from several threads at once.
#[derive(Debug)]
pub struct KvWriter<'a, F: KvFormat> {
    shape: KvShape,
    values: *mut F::Value,
    scales: *mut f32,
    cache: PhantomData<&'a mut Kv<F>>,
}

// SAFETY: the pointers are to memory that the borrow of the cache keeps; `store` leaves it to its
// callers that no slot is written by two threads at once, and different slots share no number.
unsafe impl<F: KvFormat> Sync for KvWriter<'_, F> {}

impl<F: KvFormat> KvWriter<'_, F> {
    /// Store one token's rotated keys and its values, `[num_kv_heads * head_dim]` each. `scratch`
    /// holds `dim` numbers, those from `head_dim` on zero.
    ///
    /// # Safety
    /// No other thread stores to the same slot at the same time.
    #[inline(always)]
    pub unsafe fn store(&self, slot: Slot, keys: &[f32], values: &[f32], scratch: &mut [F::Value]) {
        let shape = &self.shape;
        let (dim, head_dim) = (shape.dim(), shape.head_dim);
        assert!(slot.layer < shape.num_layers && slot.block < shape.num_blocks && slot.offset < BLOCK_SIZE);
        assert!(keys.len() == shape.num_kv_heads * head_dim && keys.len() == values.len());
        assert_eq!(scratch.len(), dim);
        for head in 0..shape.num_kv_heads {
            let tile = shape.tile_index(slot.layer, slot.block, head);
            let key_scale = F::encode(&keys[head * head_dim..][..head_dim], &mut scratch[..head_dim]);
            // SAFETY: the tile lies inside the cache, and so do all places in it that are computed
            // below from an offset below BLOCK_SIZE and dimensions below `dim`.
            let base = unsafe { self.values.add(tile * 2 * BLOCK_SIZE * dim) };
            for (d, &value) in scratch.iter().enumerate() {
                let place = d / 2 * UNIT + F::place(d % 2, slot.offset);
                unsafe { base.add(place).write(value) };
            }
            let value_scale = F::encode(&values[head * head_dim..][..head_dim], &mut scratch[..head_dim]);
            let base = unsafe { base.add(BLOCK_SIZE * dim + slot.offset * dim) };
            for (d, &value) in scratch.iter().enumerate() {
                let place = d / UNIT * UNIT + F::place(d % UNIT / 16, d % 16);
                unsafe { base.add(place).write(value) };
            }
            if F::SCALED {
                // SAFETY: two rows of scales per tile.
                unsafe {
                    let scales = self.scales.add(tile * 2 * BLOCK_SIZE + slot.offset);
                    scales.write(key_scale);
                    scales.add(BLOCK_SIZE).write(value_scale);
                }
            }
        }
    }
}

/// Zeroed numbers that begin on a cache line, resident only once they are written.
#[derive(Debug)]
struct Aligned<T> {
    memory: Box<[T]>,
    offset: usize,
    len: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// None when there is not so much memory.
    fn zeroed(len: usize) -> Option<Self> {
        let padded = len.checked_add(CACHE_LINE / size_of::<T>())?;
        let layout = Layout::array::<T>(padded).ok()?;
        // SAFETY: the padding makes the size more than zero.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: allocated just now with the layout of as many `T`, which are numbers, and zero
        // bytes are a number. Unlike `vec!` this can fail, and like it, it touches no page.
        let memory = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start.cast::<T>(), padded)) };
        let offset = memory.as_ptr().align_offset(CACHE_LINE);
        Some(Self { memory, offset, len })
    }

    #[inline(always)]
    fn as_slice(&self) -> &[T] {
        &self.memory[self.offset..][..self.len]
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.memory[self.offset..][..self.len]
    }
}
