//! One step's rows, checked before anything is computed.

use std::fmt;

use crate::cpu::kv::{BLOCK_SIZE, Slot};

/// What a step is to compute. R rows, T query tokens, S rows that sample.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// `[T]`: query tokens, row after row.
    pub token_ids: &'a [i32],
    /// `[R + 1]`: row r has the tokens `query_start[r]..query_start[r + 1]`.
    pub query_start: &'a [i32],
    /// `[R]`: tokens already stored, which is the position of the row's first query token.
    pub num_computed: &'a [i32],
    /// `[R, table_width]`: blocks of each row; entries past its last token are ignored.
    pub block_tables: &'a [i32],
    /// Entries per row of `block_tables`.
    pub table_width: usize,
    /// `[S]`: rows whose last query token gets logits.
    pub sample_rows: &'a [i32],
    /// `[Q]`: tokens, by their place among the T, which get logits besides.
    pub scored_tokens: &'a [i32],
}

/// What the entries of a batch may not exceed.
#[derive(Debug, Clone, Copy)]
pub struct BatchLimits {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Positions are below this.
    pub max_len: usize,
    /// Block numbers are below this.
    pub num_blocks: usize,
}

/// A batch that does not make sense; nothing was computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchError(String);

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BatchError {}

/// A batch that passed all checks, and where each of its tokens stands.
#[derive(Debug, Default)]
pub struct CheckedTokens {
    /// `[T]`: absolute positions.
    pub positions: Vec<usize>,
    /// `[T]`: where keys and values go, of layer 0.
    pub slots: Vec<Slot>,
    /// `[S]`: the packed token whose logits a sampling row needs.
    pub last_tokens: Vec<usize>,
    /// `[Q]`: packed tokens that get logits besides.
    pub scored_tokens: Vec<usize>,
    /// Blocks written in this step.
    written: Vec<usize>,
}

fn is_below(value: i32, limit: usize) -> bool {
    usize::try_from(value).is_ok_and(|value| value < limit)
}

fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), BatchError> {
    if holds { Ok(()) } else { Err(BatchError(message())) }
}

impl CheckedTokens {
    /// Check a batch and lay out its tokens. No two tokens have the same slot afterwards.
    pub fn check(&mut self, batch: &Batch<'_>, limits: &BatchLimits) -> Result<(), BatchError> {
        let num_rows = batch.num_computed.len();
        ensure(
            batch.query_start.len() == num_rows + 1
                && batch.block_tables.len() == num_rows * batch.table_width,
            || {
                format!(
                    "{num_rows} rows have {} query starts and {} table entries of {} per row",
                    batch.query_start.len(),
                    batch.block_tables.len(),
                    batch.table_width
                )
            },
        )?;
        ensure(
            batch.query_start[0] == 0
                && batch.query_start[num_rows] as usize == batch.token_ids.len()
                && batch.query_start.windows(2).all(|bounds| bounds[0] < bounds[1]),
            || format!("the query starts do not cut {} tokens into rows", batch.token_ids.len()),
        )?;
        if let Some(token) = batch.token_ids.iter().find(|&&id| !is_below(id, limits.vocab_size)) {
            return Err(BatchError(format!(
                "token id {token} is outside the vocabulary of {}",
                limits.vocab_size
            )));
        }
        self.positions.clear();
        self.slots.clear();
        self.written.clear();
        for row in 0..num_rows {
            self.lay_out_row(batch, row, limits)?;
        }
        self.written.sort_unstable();
        ensure(self.written.windows(2).all(|blocks| blocks[0] != blocks[1]), || {
            "two rows write to the same block".to_owned()
        })?;
        self.last_tokens.clear();
        for &row in batch.sample_rows {
            ensure(is_below(row, num_rows), || {
                format!("sampling row {row} is not among the {num_rows} rows")
            })?;
            self.last_tokens.push(batch.query_start[row as usize + 1] as usize - 1);
        }
        self.scored_tokens.clear();
        for &token in batch.scored_tokens {
            ensure(is_below(token, batch.token_ids.len()), || {
                format!("scored token {token} is not among the {} tokens", batch.token_ids.len())
            })?;
            self.scored_tokens.push(token as usize);
        }
        Ok(())
    }

    fn lay_out_row(&mut self, batch: &Batch<'_>, row: usize, limits: &BatchLimits) -> Result<(), BatchError> {
        let num_tokens = (batch.query_start[row + 1] - batch.query_start[row]) as usize;
        let first = usize::try_from(batch.num_computed[row])
            .map_err(|_| BatchError(format!("row {row} starts at position {}", batch.num_computed[row])))?;
        let end = first + num_tokens;
        ensure(end <= limits.max_len, || {
            format!("row {row} ends at position {end}; the limit is {}", limits.max_len)
        })?;
        let table = &batch.block_tables[row * batch.table_width..][..batch.table_width];
        let table = table.get(..end.div_ceil(BLOCK_SIZE)).unwrap_or(&[]);
        ensure(!table.is_empty() && table.iter().all(|&block| is_below(block, limits.num_blocks)), || {
            format!("the block table of row {row} does not cover its {end} tokens")
        })?;
        for position in first..end {
            let block = table[position / BLOCK_SIZE] as usize;
            if position == first || position % BLOCK_SIZE == 0 {
                self.written.push(block);
            }
            self.positions.push(position);
            self.slots.push(Slot { layer: 0, block, offset: position % BLOCK_SIZE });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: BatchLimits = BatchLimits { vocab_size: 10, max_len: 40, num_blocks: 5 };

    const GOOD: Batch<'static> = Batch {
        token_ids: &[1, 2, 9],
        query_start: &[0, 2, 3],
        num_computed: &[15, 0],
        block_tables: &[3, 4, 0, -1],
        table_width: 2,
        sample_rows: &[0],
        scored_tokens: &[2, 0],
    };

    fn message(batch: Batch<'_>) -> String {
        CheckedTokens::default().check(&batch, &LIMITS).unwrap_err().to_string()
    }

    #[test]
    fn tokens_are_laid_out() {
        let mut tokens = CheckedTokens::default();
        tokens.check(&GOOD, &LIMITS).unwrap();
        assert_eq!(tokens.positions, [15, 16, 0]);
        let slots: Vec<_> = tokens.slots.iter().map(|slot| (slot.block, slot.offset)).collect();
        assert_eq!(slots, [(3, 15), (4, 0), (0, 0)]);
        assert_eq!(tokens.last_tokens, [1]);
        assert_eq!(tokens.scored_tokens, [2, 0]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let cases = [
            (Batch { query_start: &[0, 2], ..GOOD }, "2 rows have 2 query starts"),
            (Batch { query_start: &[0, 0, 3], ..GOOD }, "do not cut 3 tokens"),
            (Batch { query_start: &[0, 2, 4], ..GOOD }, "do not cut 3 tokens"),
            (Batch { token_ids: &[1, 2, 10], ..GOOD }, "token id 10 is outside"),
            (Batch { token_ids: &[1, -2, 9], ..GOOD }, "token id -2 is outside"),
            (Batch { num_computed: &[-1, 0], ..GOOD }, "row 0 starts at position -1"),
            (Batch { num_computed: &[39, 0], ..GOOD }, "row 0 ends at position 41; the limit is 40"),
            (Batch { num_computed: &[31, 0], ..GOOD }, "row 0 does not cover its 33 tokens"),
            (Batch { block_tables: &[3, 5, 0, -1], ..GOOD }, "row 0 does not cover its 17 tokens"),
            (Batch { block_tables: &[3, 4, -1, -1], ..GOOD }, "row 1 does not cover its 1 tokens"),
            (Batch { block_tables: &[3, 4, 4, -1], ..GOOD }, "two rows write to the same block"),
            (Batch { sample_rows: &[2], ..GOOD }, "sampling row 2 is not among the 2 rows"),
            (Batch { scored_tokens: &[3], ..GOOD }, "scored token 3 is not among the 3 tokens"),
            (Batch { scored_tokens: &[-1], ..GOOD }, "scored token -1 is not among the 3 tokens"),
        ];
        for (batch, expected) in cases {
            let message = message(batch);
            assert!(message.contains(expected), "{message}");
        }
    }
}
