"""What the scheduler and a runner exchange: a frozen plan, an output, and the events of a commit.

Plain values over numpy columns; no torch, clock or I/O. One legend for all shapes:
R rows in the step, T query tokens in the step, S rows that sample, B longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rung.errors import RequestError
    from rung.request import Finished, Started
    from rung.sampling.rules import TokenRules

# In the place of a token that a step in flight is still to choose.
PENDING = -1

Bool = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A sampling row that has rules on single ids, and what these rules need to know.

    index      in 0..S
    prompt_ids distinct ids of the prompt; empty unless the rules read them
    answer_ids ids of the answer so far, in order; empty unless the rules read them
    """

    index: int
    rules: TokenRules
    prompt_ids: I32
    answer_ids: I32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which ids some sampling rows may choose.

    rows [G] i64                         indices in 0..S, ascending
    bits [G, ceil(vocab_size / 32)] u32  bit k of word w stands for id 32 w + k; set: allowed
    """

    rows: I64
    bits: U32


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
    min_p        [S] f32    0 keeps all
    typical_p    [S] f32    1 keeps all
    banned_ids   one entry per row that has some: (index in 0..S, ids that must not be chosen)
    ruled        one entry per row that has rules on single ids, by rising index
    masks        None: no row follows a grammar. Filled in between planning and sampling
    """

    temperature: F32
    top_k: I32
    top_p: F32
    seed: U64
    sample_index: I32
    position: I64
    top_logprobs: I32
    min_p: F32
    typical_p: F32
    banned_ids: tuple[tuple[int, I32], ...] = ()
    ruled: tuple[RuledRow, ...] = ()
    masks: TokenMasks | None = None

    def edited_rows(self) -> I64:
        """Rows whose logits are changed before a token is chosen, ascending: [E] i64."""
        masked = [] if self.masks is None else self.masks.rows.tolist()
        if not self.banned_ids and not self.ruled and not masked:
            return np.empty(0, dtype=np.int64)
        return np.unique([index for index, _ in self.banned_ids] + [row.index for row in self.ruled] + masked)

    def special_rows(self) -> Bool:
        """Rows that want more than the best id or a draw by temperature, top-k and top-p: [S] bool."""
        special: Bool = (self.temperature > 0) & ((self.min_p > 0) | (self.typical_p < 1))
        special[self.edited_rows()] = True
        return special

    def take(self, rows: I64) -> SamplingColumns:
        """The parameters of some rows, which become 0, 1, ... in this order: rows [S'] i64, ascending."""
        place = {row: index for index, row in enumerate(rows.tolist())}
        changes: dict[str, object] = {
            item.name: getattr(self, item.name)[rows]
            for item in fields(self)
            if item.name not in {"banned_ids", "ruled", "masks"}
        }
        changes["banned_ids"] = tuple((place[row], ids) for row, ids in self.banned_ids if row in place)
        changes["ruled"] = tuple(
            replace(row, index=place[row.index]) for row in self.ruled if row.index in place
        )
        if self.masks is not None:
            kept = np.flatnonzero(np.isin(self.masks.rows, rows))
            places = np.searchsorted(rows, self.masks.rows[kept])
            changes["masks"] = TokenMasks(places, self.masks.bits[kept])
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Prompt ids whose logprobs a step shall give: P rows, Q ids.

    rows       [P] i32  indices into R, ascending
    counts     [P] i32  ids of each row, at least 1
    num_top    [P] i32  alternatives for each of the row's ids
    tokens     [Q] i32  indices into T, row after row: the query token before each id
    target_ids [Q] i32  the ids
    """

    rows: I32
    counts: I32
    num_top: I32
    tokens: I32
    target_ids: I32

    def first_ids(self, plan: StepPlan) -> I32:
        """Position in its prompt of each row's first id: [P] i32."""
        first_tokens = self.tokens[np.cumsum(self.counts) - self.counts]
        first_ids: I32 = plan.num_computed[self.rows] + first_tokens - plan.query_start[self.rows] + 1
        return first_ids


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: which tokens to compute, where their KV goes, which rows sample.

    step_id      counts plans, from 1
    rows         [R] i32    state row of each row, stable while the request is admitted
    request_ids  [R] i64
    query_start  [R+1] i32  row r computes token_ids[query_start[r]:query_start[r+1]]
    token_ids    [T] i32    -1 (PENDING): the id that the row in this state row chose last, which only the
                            runner knows yet
    num_computed [R] i32    tokens already in KV = absolute position of the row's first query
    block_tables [R, B] i32 -1 past the end; covers num_computed + query length
    sample_rows  [S] i32    indices into R, ascending; the row's last query token is its last known one
    sampling     columns over S
    freed_blocks [F] i32    blocks whose content was dropped since the last plan; a runner may poison
                            them before it does anything else (some may already belong to a row of
                            this plan)
    block_copies [C, 2] i32 (source, target): blocks to be copied before KV is stored
    prompts      None: no row wants logprobs of its prompt
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
    prompts: PromptColumns | None = None

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
class PromptLogprobs:
    """Logprobs of consecutive prompt ids of one row, raw model distribution, in nats.

    chosen [n] f32: of the ids; ranks [n] i32: their places among all, 1 being the likeliest.
    top_ids [n, k] i32, top_logprobs [n, k] f32: as in `LogprobRow`.
    """

    chosen: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner computed for a plan.

    token_ids [S] i32  chosen ids; the value of a failed row is ignored
    logprobs  {index in 0..S: LogprobRow} for rows that asked
    failed    {index in 0..R: error} for rows that must end, such as non-finite logits
    prompts   {index in 0..R: logprobs} for rows of `StepPlan.prompts`
    grammar_ns that masks took, beside the forward pass
    """

    token_ids: I32
    logprobs: dict[int, LogprobRow]
    failed: dict[int, RequestError]
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)
    grammar_ns: int = 0

    def wait(self) -> StepOutput:
        """An output that is here: see `rung.runner.protocol.PendingOutput`."""
        return self


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a commit means to the outside.

    request_ids [K] i64, token_ids [K] i32: one new token per row that got one, in plan order
    logprobs    {index in 0..K: LogprobRow}
    prompts     (request id, logprobs of its prompt's next ids), before the row's first token
    """

    request_ids: I64
    token_ids: I32
    logprobs: dict[int, LogprobRow]
    started: tuple[Started, ...]
    finished: tuple[Finished, ...]
    prompts: tuple[tuple[int, PromptLogprobs], ...] = ()


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
