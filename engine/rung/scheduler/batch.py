"""What the scheduler and a runner exchange: a frozen plan, an output, and the events of a commit.

Plain values over numpy columns; no torch, clock or I/O. One legend for all shapes:
R rows in the step, T query tokens in the step, S rows that sample, B longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rung.errors import RequestError
    from rung.request import Finished, Started

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of the S rows that sample, in plan order.

    temperature  [S] f32    0 is greedy
    top_k        [S] i32    0 keeps all
    top_p        [S] f32    1 keeps all
    seed         [S] u64
    sample_index [S] i32
    position     [S] i64    absolute position of the token to be chosen
    top_logprobs [S] i32    -1: no logprobs
    banned_ids   one entry per row that has some: (index in 0..S, ids that must not be chosen)
    """

    temperature: F32
    top_k: I32
    top_p: F32
    seed: U64
    sample_index: I32
    position: I64
    top_logprobs: I32
    banned_ids: tuple[tuple[int, I32], ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: which tokens to compute, where their KV goes, which rows sample.

    step_id      counts plans, from 1
    rows         [R] i32    state row of each row, stable while the request is admitted
    request_ids  [R] i64
    query_start  [R+1] i32  row r computes token_ids[query_start[r]:query_start[r+1]]
    token_ids    [T] i32
    num_computed [R] i32    tokens already in KV = absolute position of the row's first query
    block_tables [R, B] i32 -1 past the end; covers num_computed + query length
    sample_rows  [S] i32    indices into R, ascending; the row's last query token is its last known one
    sampling     columns over S
    freed_blocks [F] i32    blocks whose content was dropped since the last plan; a runner may poison
                            them before it does anything else (some may already belong to a row of
                            this plan)
    block_copies [C, 2] i32 (source, target): blocks to be copied before KV is stored
    """

    step_id: int
    rows: I32
    request_ids: I64
    query_start: I32
    token_ids: I32
    num_computed: I32
    block_tables: I32
    sample_rows: I32
    sampling: SamplingColumns
    freed_blocks: I32
    block_copies: I32 = field(default_factory=lambda: np.empty((0, 2), dtype=np.int32))

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def query_lens(self) -> I32:
        """Tokens that each row computes: [R] i32, all at least 1."""
        lens: I32 = self.query_start[1:] - self.query_start[:-1]
        return lens


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Logprobs of one chosen token, raw model distribution, in nats.

    top_ids, top_logprobs: [n], most likely first, ties to the lower id.
    """

    chosen: float
    top_ids: I32
    top_logprobs: F32


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner computed for a plan.

    token_ids [S] i32  chosen ids; the value of a failed row is ignored
    logprobs  {index in 0..S: LogprobRow} for rows that asked
    failed    {index in 0..R: error} for rows that must end, such as non-finite logits
    """

    token_ids: I32
    logprobs: dict[int, LogprobRow]
    failed: dict[int, RequestError]


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a commit means to the outside.

    request_ids [K] i64, token_ids [K] i32: one new token per row that got one, in plan order
    logprobs    {index in 0..K: LogprobRow}
    """

    request_ids: I64
    token_ids: I32
    logprobs: dict[int, LogprobRow]
    started: tuple[Started, ...]
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts after the last call; totals are since the scheduler was made.

    recomputed_tokens_total: tokens computed again after preemptions.
    cached_tokens_total:     prompt tokens whose KV was reused.
    """

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    recomputed_tokens_total: int = 0
    cached_tokens_total: int = 0
