//! How a step's queries are cut into pieces of work. The cut decides who computes what and when,
//! never what comes out.

use std::ops::Range;

use super::span::SPAN;
use crate::cpu::attention::AttentionShape;

/// Queries, over all heads that share a KV head, that read a context together.
const TILE_QUERIES: usize = 32;

/// Pieces of work per thread below which contexts are split by span.
const UNITS_PER_THREAD: usize = 4;

/// Neighbouring query tokens of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueryTile {
    pub(super) row: usize,
    /// Place of the first among the step's packed tokens.
    pub(super) first_token: usize,
    /// Absolute position of the first.
    pub(super) first_position: usize,
    pub(super) num_tokens: usize,
    /// Spans that one of the queries sees: the first, and how many.
    pub(super) first_span: usize,
    pub(super) num_spans: usize,
    /// Where the tile's units begin when the step is split by span.
    first_unit: usize,
}

impl QueryTile {
    /// The units of its spans for a KV head, in order.
    pub(super) fn span_units(&self, head: usize) -> Range<usize> {
        let first = self.first_unit + head * self.num_spans;
        first..first + self.num_spans
    }
}

/// The tiles of a step, the same for all its layers.
#[derive(Debug, Default)]
pub struct AttentionTiles {
    pub(super) tiles: Vec<QueryTile>,
    /// Whether each span of a tile is a unit of its own.
    pub(super) by_span: bool,
    num_kv_heads: usize,
}

impl AttentionTiles {
    /// Cut a step anew.
    ///
    /// `query_start`: `[num_rows + 1]`, row r has the tokens `query_start[r]..query_start[r + 1]`;
    /// `num_computed`: `[num_rows]`, absolute position of each row's first token. Both checked.
    pub fn cut(
        &mut self,
        shape: &AttentionShape,
        query_start: &[i32],
        num_computed: &[i32],
        num_threads: usize,
    ) {
        let tile_len = match TILE_QUERIES / shape.group() {
            0 => 1,
            len @ 1..4 => len,
            len => len / 4 * 4,
        };
        self.num_kv_heads = shape.num_kv_heads;
        self.tiles.clear();
        for (row, (bounds, &computed)) in query_start.windows(2).zip(num_computed).enumerate() {
            let (start, end) = (bounds[0] as usize, bounds[1] as usize);
            for first_token in (start..end).step_by(tile_len) {
                let num_tokens = tile_len.min(end - first_token);
                let first_position = computed as usize + first_token - start;
                let first_span = shape.visible(first_position).start / SPAN;
                let end_position = first_position + num_tokens;
                self.tiles.push(QueryTile {
                    row,
                    first_token,
                    first_position,
                    num_tokens,
                    first_span,
                    num_spans: end_position.div_ceil(SPAN) - first_span,
                    first_unit: 0,
                });
            }
        }
        // The longest work first, so that no thread is left alone with it at the end.
        self.tiles.sort_by_key(|tile| std::cmp::Reverse(tile.num_spans * tile.num_tokens));
        let num_units = self.tiles.len() * self.num_kv_heads;
        self.by_span =
            num_units < UNITS_PER_THREAD * num_threads && self.tiles.iter().any(|tile| tile.num_spans > 1);
        let mut first_unit = 0;
        for tile in &mut self.tiles {
            tile.first_unit = first_unit;
            first_unit += tile.num_spans * self.num_kv_heads;
        }
    }

    /// Units that each are all spans of one tile and KV head.
    pub(super) fn num_units(&self) -> usize {
        self.tiles.len() * self.num_kv_heads
    }

    /// Tile and KV head of a unit.
    pub(super) fn unit(&self, unit: usize) -> (&QueryTile, usize) {
        (&self.tiles[unit / self.num_kv_heads], unit % self.num_kv_heads)
    }

    /// Units that each are one span of one tile and KV head.
    pub(super) fn num_span_units(&self) -> usize {
        self.tiles.last().map_or(0, |tile| tile.first_unit + tile.num_spans * self.num_kv_heads)
    }

    /// Tile, KV head and span of a unit.
    pub(super) fn span_unit(&self, unit: usize) -> (&QueryTile, usize, usize) {
        let index = self.tiles.partition_point(|tile| tile.first_unit <= unit) - 1;
        let tile = &self.tiles[index];
        let inside = unit - tile.first_unit;
        (tile, inside / tile.num_spans, tile.first_span + inside % tile.num_spans)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { num_heads: 6, num_kv_heads: 2, head_dim: 32, window: None };

    #[test]
    fn tiles_cover_every_token_once() {
        let mut tiles = AttentionTiles::default();
        tiles.cut(&SHAPE, &[0, 1, 21, 22], &[700, 250, 0], 2);
        let mut tokens: Vec<_> = tiles
            .tiles
            .iter()
            .flat_map(|tile| {
                (0..tile.num_tokens).map(|i| (tile.first_token + i, tile.first_position + i, tile.row))
            })
            .collect();
        tokens.sort_unstable();
        let expected: Vec<_> = std::iter::once((0, 700, 0))
            .chain((0..20).map(|i| (1 + i, 250 + i, 1)))
            .chain([(21, 0, 2)])
            .collect();
        assert_eq!(tokens, expected);
        assert!(tiles.tiles.iter().all(|tile| tile.num_tokens <= 8));
    }

    #[test]
    fn span_units_name_every_tile_head_and_span_once() {
        let mut tiles = AttentionTiles::default();
        tiles.cut(&SHAPE, &[0, 1, 2], &[1000, 10], 4);
        assert!(tiles.by_span);
        let units: Vec<_> = (0..tiles.num_span_units())
            .map(|unit| {
                let (tile, head, span) = tiles.span_unit(unit);
                assert!(tile.span_units(head).contains(&unit));
                (tile.row, head, span)
            })
            .collect();
        let expected: Vec<_> = (0..2)
            .flat_map(|head| (0..4).map(move |span| (0, head, span)))
            .chain((0..2).map(|head| (1, head, 0)))
            .collect();
        assert_eq!(units, expected);
    }

    #[test]
    fn a_window_leaves_out_the_spans_before_it() {
        let shape = AttentionShape { window: Some(100), ..SHAPE };
        let mut tiles = AttentionTiles::default();
        tiles.cut(&shape, &[0, 1], &[1000], 1);
        assert_eq!((tiles.tiles[0].first_span, tiles.tiles[0].num_spans), (3, 1));
        assert_eq!(shape.visible(1000), 901..1001);
    }
}
