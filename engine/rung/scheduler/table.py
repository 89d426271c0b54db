"""State of the admitted requests as columns over stable rows, so that a step is array work.

It holds facts and takes no decisions; who enters, grows and leaves is the scheduler's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rung.scheduler.batch import I32, PENDING, PromptColumns, RuledRow, SamplingColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.request import Request
    from rung.sampling.rules import TokenRules

# Stop ids compared as a column; the rare row with more is looked up on its own.
STOP_COLUMN_WIDTH = 8

Bool = npt.NDArray[np.bool_]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


class StateTable:
    """Columns over N = max_num_seqs rows. Length columns count tokens.

    request_id   [N] i64       -1: the row is empty
    num_prompt, num_tokens, num_computed, min_total, max_total   [N] i32
                               min_total: stop ids are banned while num_tokens is below it
    num_pending  [N] i32       tokens that steps in flight choose: not in num_tokens, and PENDING in token_ids
    num_stored   [N] i32       tokens whose KV a step that has landed stored; num_computed runs ahead
                               of it by what is in flight
    num_named    [N] i32       blocks from the first on that need no name in the prefix cache any more
    planned      [N] i32       tokens for which the row was let in
    priority, arrival [N] i64  of the request
    started      [N] bool      the request's first token exists
    token_ids    [N, max_model_len] i32
    num_blocks, max_blocks [N] i32   blocks held, and held at most in its life
    block_tables [N, blocks of max_model_len] i32   -1 past num_blocks
    stop_ids     [N, 8] i32    -1 past the end
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        width = min(blocks_for(max_model_len, block_size), num_blocks)
        self.request_id = np.full(max_num_seqs, -1, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_pending = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_stored = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_named = np.zeros(max_num_seqs, dtype=np.int32)
        self.planned = np.zeros(max_num_seqs, dtype=np.int32)
        self.priority = np.zeros(max_num_seqs, dtype=np.int64)
        self.arrival = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_total = np.zeros(max_num_seqs, dtype=np.int32)
        self.max_total = np.zeros(max_num_seqs, dtype=np.int32)
        self.started = np.zeros(max_num_seqs, dtype=np.bool_)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.max_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_tables = np.full((max_num_seqs, width), -1, dtype=np.int32)
        self.stop_ids = np.full((max_num_seqs, STOP_COLUMN_WIDTH), -1, dtype=np.int32)
        self._has_more_stop_ids = np.zeros(max_num_seqs, dtype=np.bool_)
        self._all_stop_ids = [np.empty(0, dtype=np.int32)] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._sample_index = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._typical_p = np.ones(max_num_seqs, dtype=np.float32)
        self._has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self._rules: list[TokenRules | None] = [None] * max_num_seqs
        self._prompt_top_logprobs = np.full(max_num_seqs, -1, dtype=np.int32)
        self._num_scored = np.zeros(max_num_seqs, dtype=np.int32)
        self._distinct_prompt_ids = [np.empty(0, dtype=np.int32)] * max_num_seqs

    def enter(self, row: int, request: Request, num_stored: int, num_named: int) -> None:
        """Fill an empty row with a request whose first `num_stored` tokens have their KV."""
        sampling, stopping = request.sampling, request.stopping
        num_tokens = len(request.token_ids)
        self.request_id[row] = request.request_id
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_tokens[row] = num_tokens
        self.num_computed[row] = num_stored
        self.num_pending[row] = 0
        self.num_stored[row] = num_stored
        self.num_named[row] = num_named
        self.min_total[row] = request.num_prompt_tokens + min(stopping.min_tokens, stopping.max_tokens)
        self.max_total[row] = request.max_total_tokens
        self.priority[row] = request.priority
        self.arrival[row] = request.arrival
        self.started[row] = request.started
        self.token_ids[row, :num_tokens] = request.token_ids
        self.max_blocks[row] = blocks_for(request.max_total_tokens, self.block_size)
        stop_ids = np.array(sorted(stopping.stop_token_ids), dtype=np.int32)
        self._all_stop_ids[row] = stop_ids
        self._has_more_stop_ids[row] = len(stop_ids) > STOP_COLUMN_WIDTH
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids[:STOP_COLUMN_WIDTH]
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._seed[row] = sampling.seed
        self._sample_index[row] = sampling.sample_index
        self._top_logprobs[row] = -1 if sampling.top_logprobs is None else sampling.top_logprobs
        self._min_p[row] = sampling.min_p
        self._typical_p[row] = sampling.typical_p
        prompt_top = sampling.prompt_top_logprobs
        self._prompt_top_logprobs[row] = -1 if prompt_top is None else prompt_top
        self._num_scored[row] = request.num_scored
        rules = sampling.rules
        self._rules[row] = rules
        self._has_rules[row] = rules is not None
        if rules is not None:
            prompt_ids = request.prompt_ids if rules.reads_prompt else request.prompt_ids[:0]
            self._distinct_prompt_ids[row] = np.unique(prompt_ids)

    def leave(self, row: int) -> list[int]:
        """Empty a row and return the blocks that it held."""
        blocks = self.blocks(row)
        self.block_tables[row, : len(blocks)] = -1
        self.num_blocks[row] = 0
        self.request_id[row] = -1
        return blocks

    def add_blocks(self, row: int, blocks: Sequence[int]) -> None:
        """Append blocks to a row's block table."""
        held = int(self.num_blocks[row])
        self.block_tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def blocks(self, row: int) -> list[int]:
        """The row's block table."""
        held: list[int] = self.block_tables[row, : self.num_blocks[row]].tolist()
        return held

    def missing_blocks(self, rows: I32, query_lens: I32) -> I32:
        """Blocks that each row lacks to store its next `query_lens` tokens: [R] i32."""
        block_size = self.block_size
        needed = (self.num_computed[rows] + query_lens + (block_size - 1)) // block_size
        missing: I32 = np.maximum(needed - self.num_blocks[rows], 0)
        return missing

    def expect_tokens(self, rows: I32) -> None:
        """A step in flight chooses one more token for each row."""
        self.token_ids[rows, self.num_tokens[rows] + self.num_pending[rows]] = PENDING
        self.num_pending[rows] += 1

    def append_tokens(self, rows: I32, token_ids: I32) -> None:
        """Here is the first expected token of each row: [R] i32."""
        position = self.num_tokens[rows]
        self.token_ids[rows, position] = token_ids
        self.num_tokens[rows] = position + 1
        self.num_pending[rows] -= 1

    def is_stop(self, rows: I32, token_ids: I32) -> Bool:
        """Whether each row's token is one of its stop ids: [R] bool."""
        stops: Bool = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        more = self._has_more_stop_ids[rows]
        if more.any():
            for index in np.flatnonzero(more).tolist():
                stops[index] = token_ids[index] in self._all_stop_ids[rows[index]]
        return stops

    def query_token_ids(self, rows: I32, query_lens: I32, query_start: I32) -> I32:
        """The next `query_lens` uncomputed tokens of each row, row after row: [T] i32."""
        first = self.num_computed[rows]
        token_ids = np.empty(query_start[-1], dtype=np.int32)
        single = query_lens == 1
        token_ids[query_start[:-1][single]] = self.token_ids[rows[single], first[single]]
        for index in np.flatnonzero(~single).tolist():
            start, length = first[index], query_lens[index]
            chunk = self.token_ids[rows[index], start : start + length]
            token_ids[query_start[index] : query_start[index + 1]] = chunk
        return token_ids

    def sampling_columns(self, rows: I32) -> SamplingColumns:
        """Parameters of the rows that sample, in this order."""
        position = self.num_tokens[rows] + self.num_pending[rows]
        banned = np.flatnonzero(position < self.min_total[rows]).tolist()
        return SamplingColumns(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            seed=self._seed[rows],
            sample_index=self._sample_index[rows],
            position=position.astype(np.int64),
            top_logprobs=self._top_logprobs[rows],
            min_p=self._min_p[rows],
            typical_p=self._typical_p[rows],
            banned_ids=tuple(
                (index, self._all_stop_ids[rows[index]])
                for index in banned
                if len(self._all_stop_ids[rows[index]])
            ),
            ruled=tuple(
                self._ruled_row(index, int(rows[index]))
                for index in np.flatnonzero(self._has_rules[rows]).tolist()
            ),
        )

    def prompt_columns(self, rows: I32, query_lens: I32, query_start: I32) -> PromptColumns | None:
        """Prompt ids that follow the next `query_lens` tokens and whose logprobs are still to be given."""
        wanting = np.flatnonzero(self._prompt_top_logprobs[rows] >= 0)
        if not len(wanting):
            return None
        rows, lens, starts = rows[wanting], query_lens[wanting], query_start[:-1][wanting]
        computed = self.num_computed[rows]
        # The token at position p says how likely the id at p + 1 was; the first id follows nothing.
        first = np.maximum(computed, self._num_scored[rows])
        counts = np.minimum(computed + lens, self.num_prompt[rows] - 1) - first
        inside = np.flatnonzero(counts > 0)
        if not len(inside):
            return None
        spans = list(
            zip(rows[inside], first[inside], counts[inside], (starts + first - computed)[inside], strict=True)
        )
        return PromptColumns(
            rows=wanting[inside].astype(np.int32),
            counts=counts[inside].astype(np.int32),
            num_top=self._prompt_top_logprobs[rows[inside]],
            tokens=np.concatenate([np.arange(token, token + count) for _, _, count, token in spans]).astype(
                np.int32
            ),
            target_ids=np.concatenate(
                [self.token_ids[row, at + 1 : at + 1 + count] for row, at, count, _ in spans]
            ),
        )

    def add_scored(self, row: int, count: int) -> int:
        """Note that logprobs of `count` more prompt ids were given; returns how many there are now."""
        self._num_scored[row] += count
        return int(self._num_scored[row])

    def _ruled_row(self, index: int, row: int) -> RuledRow:
        rules = self._rules[row]
        assert rules is not None
        answer_ids = self.token_ids[row, self.num_prompt[row] : self.num_tokens[row]]
        # A copy: the row may belong to another request before the plan has run.
        answer_ids = answer_ids.copy() if rules.reads_answer else answer_ids[:0]
        return RuledRow(index, rules, self._distinct_prompt_ids[row], answer_ids)
