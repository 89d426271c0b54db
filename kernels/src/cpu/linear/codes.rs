//! Integer codes of quantized weights as the kernels read them, and their exact sums of products.

use crate::cpu::quantize::{GroupBlock, START};
use crate::cpu::simd::{LANE_BYTES, Simd};

/// Chunks of four inputs in a group.
pub(super) const CHUNKS: usize = 8;

/// Asks for the cache lines that come next while there is work on those at hand.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    address: *const u8,
    lines_per_group: usize,
}

impl Ahead {
    /// Of the `num_bytes` from `start` on, spread over `num_groups` calls of `step`.
    pub(super) fn new(start: *const u8, num_bytes: usize, num_groups: usize) -> Self {
        Self { address: start, lines_per_group: num_bytes.div_ceil(LANE_BYTES).div_ceil(num_groups.max(1)) }
    }

    /// Called once per group.
    #[inline(always)]
    pub(super) fn step<S: Simd>(&mut self, s: S) {
        for _ in 0..self.lines_per_group {
            s.prefetch(self.address);
            self.address = self.address.wrapping_add(LANE_BYTES);
        }
    }
}

/// A code layout as the kernel reads it.
pub(super) trait Codes {
    /// Bytes of a group of a tile.
    const GROUP_BYTES: usize;
    /// Whether a byte holds two codes.
    const PACKED: bool;
    /// Four weights per lane, ready for `dot`.
    type Weights<S: Simd>: Copy;
    /// Running sums.
    type Sums<S: Simd>: Copy;

    /// Chunks `j` and `j + 4` of a group, j in 0..4.
    fn pair<S: Simd>(s: S, group: &[u8], j: usize) -> [Self::Weights<S>; 2];
    /// A chunk of a group that is stored one byte per code.
    fn wide<S: Simd>(s: S, chunk: &[u8; LANE_BYTES]) -> Self::Weights<S>;
    /// Empty sums for row `row` of the block.
    fn start<S: Simd>(s: S, block: &GroupBlock, row: usize) -> Self::Sums<S>;
    /// Empty sums for half `half` of a group.
    fn start_half<S: Simd>(s: S, block: &GroupBlock, row: usize, half: usize) -> Self::Sums<S>;
    /// Add the products of four weights per lane with four activations.
    fn dot<S: Simd>(
        s: S,
        sums: Self::Sums<S>,
        weights: Self::Weights<S>,
        activations: [i8; 4],
    ) -> Self::Sums<S>;
    /// `START` plus the sums.
    fn finish<S: Simd>(s: S, sums: Self::Sums<S>, block: &GroupBlock, row: usize) -> S::I32;
}

/// 4 bits, with the zero at `ZERO`, 0 or 8.
pub(super) struct Nibbles<const ZERO: u8>;
/// 8 bits with a bias of 128.
pub(super) struct Bytes;

#[inline(always)]
fn chunk(group: &[u8], index: usize) -> &[u8; LANE_BYTES] {
    match group[index * LANE_BYTES..].first_chunk() {
        Some(chunk) => chunk,
        None => panic!("chunk {index} of a group of {} bytes", group.len()),
    }
}

impl<const ZERO: u8> Nibbles<ZERO> {
    #[inline(always)]
    fn base(block: &GroupBlock, row: usize) -> i32 {
        if ZERO == 8 { block.minus_eight[row] } else { START }
    }
}

impl<const ZERO: u8> Codes for Nibbles<ZERO> {
    const GROUP_BYTES: usize = CHUNKS / 2 * LANE_BYTES;
    const PACKED: bool = true;
    type Weights<S: Simd> = S::Bytes;
    type Sums<S: Simd> = S::NibbleSums;

    #[inline(always)]
    fn pair<S: Simd>(s: S, group: &[u8], j: usize) -> [S::Bytes; 2] {
        let packed = s.load_bytes(chunk(group, j));
        [s.low_nibbles(packed), s.high_nibbles(packed)]
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, chunk: &[u8; LANE_BYTES]) -> S::Bytes {
        s.load_bytes(chunk)
    }

    #[inline(always)]
    fn start<S: Simd>(s: S, block: &GroupBlock, row: usize) -> S::NibbleSums {
        s.start_nibbles(Self::base(block, row))
    }

    #[inline(always)]
    fn start_half<S: Simd>(s: S, block: &GroupBlock, row: usize, _: usize) -> S::NibbleSums {
        Self::start(s, block, row)
    }

    #[inline(always)]
    fn dot<S: Simd>(s: S, sums: S::NibbleSums, weights: S::Bytes, activations: [i8; 4]) -> S::NibbleSums {
        s.dot_nibbles(sums, weights, activations)
    }

    #[inline(always)]
    fn finish<S: Simd>(s: S, sums: S::NibbleSums, block: &GroupBlock, row: usize) -> S::I32 {
        s.finish_nibbles(sums, Self::base(block, row))
    }
}

impl Codes for Bytes {
    const GROUP_BYTES: usize = CHUNKS * LANE_BYTES;
    const PACKED: bool = false;
    type Weights<S: Simd> = S::Signed;
    type Sums<S: Simd> = S::I32;

    #[inline(always)]
    fn pair<S: Simd>(s: S, group: &[u8], j: usize) -> [S::Signed; 2] {
        [s.signed(s.load_bytes(chunk(group, j))), s.signed(s.load_bytes(chunk(group, j + CHUNKS / 2)))]
    }

    #[inline(always)]
    fn wide<S: Simd>(s: S, chunk: &[u8; LANE_BYTES]) -> S::Signed {
        s.signed(s.load_bytes(chunk))
    }

    #[inline(always)]
    fn start<S: Simd>(s: S, block: &GroupBlock, row: usize) -> S::I32 {
        s.start_signed(START, block.minus_bias[row])
    }

    #[inline(always)]
    fn start_half<S: Simd>(s: S, block: &GroupBlock, row: usize, half: usize) -> S::I32 {
        s.start_signed(START, block.half_minus_bias[half][row])
    }

    #[inline(always)]
    fn dot<S: Simd>(s: S, sums: S::I32, weights: S::Signed, activations: [i8; 4]) -> S::I32 {
        s.dot_signed(sums, weights, activations)
    }

    #[inline(always)]
    fn finish<S: Simd>(_: S, sums: S::I32, _: &GroupBlock, _: usize) -> S::I32 {
        sums
    }
}
