"""A runner whose answers betray every scheduling and KV mistake; it is an instrument, not a model.

KV memory is one u64 per slot. The slot of a token is a mix of the token, its position and the fold
of all slots before it, read through the block table; the next token is a mix of the fold of all
slots. So a wrong block, a stale slot, a missing copy, a block freed too early or a lost token
changes the answer from there on. `expected_tokens` gives the right one without any blocks.

A row with rules on single ids gets made-up logits that fall from that token on, and of them the best
that the rules leave. It ignores top-k, top-p, min-p and typical-p, and temperature beyond its being 0
or not.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rung.errors import ErrorCode, RequestError
from rung.runner.protocol import RunnerInfo
from rung.sampling.edits import edited_logits
from rung.scheduler.batch import PENDING, LogprobRow, PromptLogprobs, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rung.runner.protocol import PendingOutput
    from rung.scheduler.batch import F32, I32, U64, SamplingColumns, StepPlan

# What memory that belongs to nobody holds.
POISON = 0xDEAD_BEEF_DEAD_BEEF

_MASK = (1 << 64) - 1
# Odd 64-bit constants: one multiplier per input of a mix, and those of the splitmix64 finaliser
# (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_MIX_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_FINAL_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Made-up logits: that of the token itself, and how much they fall from id to id. Exact in float32.
_BEST_LOGIT = 8.0
_LOGIT_STEP = 0.25
# The fold of slots s[0..n) is the sum of s[i] * _FOLD_BASE**i, so order and place count.
_FOLD_BASE = 0x2545F4914F6CDD1D


def mix(*values: int) -> int:
    """Up to four u64 into one, as plain integers."""
    mixed = sum(value * factor for value, factor in zip(values, _MIX_FACTORS, strict=False)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FINAL_FACTORS[0]) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _FINAL_FACTORS[1]) & _MASK
    return mixed ^ (mixed >> 31)


def mix_columns(*columns: U64) -> U64:
    """`mix` for each row of [R] u64 columns: [R] u64."""
    mixed: U64 = np.zeros_like(columns[0])
    for column, factor in zip(columns, _MIX_FACTORS, strict=False):
        mixed += column * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FINAL_FACTORS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_FINAL_FACTORS[1])
    mixed ^= mixed >> np.uint64(31)
    return mixed


def next_allowed(token_id: int, banned_ids: Collection[int], vocab_size: int) -> int | None:
    """The first id from `token_id` on, wrapping, that is not banned; None if all are."""
    for offset in range(min(len(banned_ids) + 1, vocab_size)):
        candidate = (token_id + offset) % vocab_size
        if candidate not in banned_ids:
            return candidate
    return None


def expected_tokens(
    prompt_ids: Sequence[int],
    num_tokens: int,
    *,
    vocab_size: int,
    seed: int = 0,
    sample_index: int = 0,
    temperature: float = 0.0,
    stop_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    choose: Callable[[int, list[int]], int | None] | None = None,
) -> list[int]:
    """What a request alone must yield: at most `num_tokens`, a stop id being the last.

    choose: what the request's rules make of a token after the answer so far; None: nothing.
    Plain integers over one list of slots; shares only `mix` and `next_allowed` with the runner.
    """
    fold, power = 0, 1
    tokens = [int(token) for token in prompt_ids]
    answer: list[int] = []
    stream = (seed, sample_index + 1) if temperature > 0 else (0, 0)
    position = 0
    while len(answer) < num_tokens:
        while position < len(tokens):
            slot = mix(tokens[position], position, fold)
            fold = (fold + slot * power) & _MASK
            power = (power * _FOLD_BASE) & _MASK
            position += 1
        token: int | None = mix(fold, *stream, position) % vocab_size
        assert token is not None
        if choose is not None:
            token = choose(token, answer)
        elif len(answer) < min_tokens:
            token = next_allowed(token, stop_token_ids, vocab_size)
        if token is None:
            break
        tokens.append(token)
        answer.append(token)
        if token in stop_token_ids:
            break
    return answer


def expected_prompt_logprobs(prompt_ids: Sequence[int], vocab_size: int) -> list[tuple[float, int]]:
    """Logprob and rank that each id of a prompt from the second on must get; plain integers again."""
    fold, power, previous = 0, 1, 0
    expected = []
    for position, token in enumerate(int(token) for token in prompt_ids):
        if position > 0:
            state = mix(previous, token)
            expected.append((_made_up_logprob(state), 1 + state % vocab_size))
        fold = (fold + mix(token, position, fold) * power) & _MASK
        power = (power * _FOLD_BASE) & _MASK
        previous = fold
    return expected


def _made_up_logprob(state: int) -> float:
    """Exact in float32."""
    return float(np.float32(-1.0 - (state >> 32) / 2**32))


class FakeRunner:
    """Implements `Runner` over numpy.

    step_s: seconds that `forward` sleeps to stand for the time of a real step.
    depth:  2 makes it a device that runs what was launched when somebody waits for it, and no sooner.
            The poison of freed blocks strikes at once, as a wipe or a copy from outside would.
    """

    def __init__(
        self, num_blocks: int, block_size: int, vocab_size: int, step_s: float = 0.0, depth: int = 1
    ) -> None:
        self._info = RunnerInfo(
            name="fake",
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes_per_block=block_size * 8,
            weight_bytes=0,
            batch_invariant=True,
            depth=depth,
        )
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._kv: U64 = np.full((num_blocks, block_size), POISON, dtype=np.uint64)
        self._powers: U64 = np.ones(1, dtype=np.uint64)
        # Launched and not run; the last id that each state row chose.
        self._launched: deque[StepPlan] = deque()
        self._last_ids: dict[int, int] = {}

    @property
    def info(self) -> RunnerInfo:
        """Constant after construction."""
        return self._info

    def forward(self, plan: StepPlan) -> None:
        """Poison the freed blocks, copy blocks, then store the slots of the plan's tokens."""
        if self._step_s > 0:
            time.sleep(self._step_s)
        for other in self._launched:
            if np.isin(plan.freed_blocks, other.block_tables).any():
                raise ValueError(f"plan {plan.step_id} frees blocks that plan {other.step_id} still uses")
        self._kv[plan.freed_blocks] = np.uint64(POISON)
        if self._info.depth == 1:
            self._run(plan)
        else:
            self._launched.append(plan)

    def sample(self, plan: StepPlan) -> PendingOutput:
        """Choose tokens from the slots as they stand in memory after `forward`."""
        return self._choose(plan) if self._info.depth == 1 else _Launched(self, plan)

    def wait(self, plan: StepPlan) -> StepOutput:
        """Run what was launched up to this plan's choice of tokens."""
        while self._launched and self._launched[0].step_id <= plan.step_id:
            self._run(self._launched.popleft())
        output = self._choose(plan)
        self._last_ids |= zip(plan.rows[plan.sample_rows].tolist(), output.token_ids.tolist(), strict=True)
        return output

    def _run(self, plan: StepPlan) -> None:
        """Copy blocks, then store the slots of the plan's tokens."""
        if (plan.token_ids == PENDING).any():
            plan = self._with_last_ids(plan)
        self._kv[plan.block_copies[:, 1]] = self._kv[plan.block_copies[:, 0]]
        query_lens = plan.query_lens
        self._check_covered(plan, plan.num_computed + query_lens)
        folds = self._fold(plan.block_tables, plan.num_computed)
        single = np.flatnonzero(query_lens == 1).astype(np.int32)
        self._store_singles(plan, single, folds[single])
        for row in np.flatnonzero(query_lens != 1).tolist():
            self._store_chunk(plan, row, int(folds[row]))

    def _with_last_ids(self, plan: StepPlan) -> StepPlan:
        token_ids = plan.token_ids.copy()
        for row, place in zip(plan.rows.tolist(), (plan.query_start[1:] - 1).tolist(), strict=True):
            if token_ids[place] == PENDING:
                # A row whose step failed has none, and nobody looks at what becomes of it.
                token_ids[place] = self._last_ids.get(row, 0)
        return replace(plan, token_ids=token_ids)

    def _choose(self, plan: StepPlan) -> StepOutput:
        sampling = plan.sampling
        rows = plan.sample_rows
        lengths = plan.num_computed[rows] + plan.query_lens[rows]
        folds = self._fold(plan.block_tables[rows], lengths)
        is_random = sampling.temperature > 0
        seeds = np.where(is_random, sampling.seed, np.uint64(0))
        streams = np.where(is_random, sampling.sample_index.astype(np.uint64) + np.uint64(1), np.uint64(0))
        state = mix_columns(folds, seeds, streams, sampling.position.astype(np.uint64))
        token_ids = (state % np.uint64(self._vocab_size)).astype(np.int32)
        failed = {int(rows[index]): error for index, error in self._follow_rules(sampling, token_ids).items()}
        return StepOutput(
            token_ids, self._logprobs(sampling, state, token_ids), failed, self._prompt_logprobs(plan)
        )

    def close(self) -> None:
        """Nothing to release."""

    def _follow_rules(self, sampling: SamplingColumns, token_ids: I32) -> dict[int, RequestError]:
        """Replace tokens that rules do not leave; returns errors by index in 0..S."""
        rows = sampling.edited_rows()
        if not len(rows):
            return {}
        distance = (np.arange(self._vocab_size) - token_ids[rows, None]) % self._vocab_size
        logits: F32 = (_BEST_LOGIT - _LOGIT_STEP * distance).astype(np.float32)
        edited = edited_logits(logits, sampling.take(rows))[1]
        # Ties are few, and go to the id that comes first from the token on.
        order = np.argsort(distance, axis=1)
        best = np.take_along_axis(edited, order, axis=1).argmax(axis=1)
        token_ids[rows] = order[np.arange(len(rows)), best]
        return {
            int(rows[index]): RequestError(
                ErrorCode.INVALID_ARGUMENT, f"All {self._vocab_size} ids of the vocabulary are banned."
            )
            for index in np.flatnonzero(edited.max(axis=1) == -np.inf).tolist()
        }

    def _check_covered(self, plan: StepPlan, lengths: I32) -> None:
        """A table that does not cover its row would be read or written out of bounds."""
        num_blocks, block_size = self._kv.shape
        needed = np.arange(plan.block_tables.shape[1]) * block_size < lengths[:, None]
        inside = (plan.block_tables >= 0) & (plan.block_tables < num_blocks)
        if (needed & ~inside).any() or (lengths > needed.shape[1] * block_size).any():
            raise ValueError(f"the block tables of plan {plan.step_id} do not cover its tokens")

    def _fold(self, block_tables: I32, lengths: I32) -> U64:
        """Fold of the first `lengths` slots of each row: [R, B] i32, [R] i32 -> [R] u64."""
        longest = int(lengths.max(initial=0))
        powers = self._powers_up_to(longest)
        block_size = self._info.block_size
        width = -(-longest // block_size)
        slots = self._kv[block_tables[:, :width]].reshape(len(block_tables), width * block_size)[:, :longest]
        slots *= np.arange(longest) < lengths[:, None]
        fold: U64 = (slots * powers).sum(axis=1, dtype=np.uint64)
        return fold

    def _powers_up_to(self, count: int) -> U64:
        """`_FOLD_BASE` to the power of 0..count: [count] u64."""
        while len(self._powers) < count:
            next_power = self._powers[-1:] * np.uint64(_FOLD_BASE)
            self._powers = np.concatenate([self._powers, self._powers * next_power])
        return self._powers[:count]

    def _store_singles(self, plan: StepPlan, rows: I32, folds: U64) -> None:
        positions = plan.num_computed[rows]
        tokens = plan.token_ids[plan.query_start[rows]]
        blocks = plan.block_tables[rows, positions // self._info.block_size]
        slots = mix_columns(tokens.astype(np.uint64), positions.astype(np.uint64), folds)
        self._kv[blocks, positions % self._info.block_size] = slots

    def _store_chunk(self, plan: StepPlan, row: int, fold: int) -> None:
        block_size = self._info.block_size
        first = int(plan.num_computed[row])
        tokens = plan.token_ids[plan.query_start[row] : plan.query_start[row + 1]].tolist()
        powers = self._powers_up_to(first + len(tokens))[first:].tolist()
        slots = []
        for position, (token, power) in enumerate(zip(tokens, powers, strict=True), start=first):
            slots.append(mix(token, position, fold))
            fold = (fold + slots[-1] * power) & _MASK
        positions = np.arange(first, first + len(tokens))
        blocks = plan.block_tables[row, positions // block_size]
        self._kv[blocks, positions % block_size] = np.array(slots, dtype=np.uint64)

    def _logprobs(self, sampling: SamplingColumns, state: U64, token_ids: I32) -> dict[int, LogprobRow]:
        """Made-up logprobs of which the chosen id is the most likely, falling by 1 from id to id."""
        rows = {}
        for index in np.flatnonzero(sampling.top_logprobs >= 0).tolist():
            chosen = _made_up_logprob(int(state[index]))
            ranks = np.arange(min(int(sampling.top_logprobs[index]), self._vocab_size), dtype=np.int32)
            rows[index] = LogprobRow(
                chosen=chosen,
                top_ids=((token_ids[index] + ranks) % self._vocab_size).astype(np.int32),
                top_logprobs=(chosen - ranks).astype(np.float32),
            )
        return rows

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, PromptLogprobs]:
        """Made-up logprobs that betray the slots before each id; alternatives fall by 1 from it on."""
        prompts = plan.prompts
        if prompts is None:
            return {}
        row_of_token = np.repeat(prompts.rows, prompts.counts)
        lengths = plan.num_computed[row_of_token] + prompts.tokens - plan.query_start[row_of_token] + 1
        folds = self._fold(plan.block_tables[row_of_token], lengths.astype(np.int32))
        state = mix_columns(folds, prompts.target_ids.astype(np.uint64))
        chosen = np.array([_made_up_logprob(int(one)) for one in state], dtype=np.float32)
        ranks = (state % np.uint64(self._vocab_size)).astype(np.int32) + np.int32(1)
        found = {}
        last = np.cumsum(prompts.counts)
        for row, count, top, end in zip(prompts.rows, prompts.counts, prompts.num_top, last, strict=True):
            ids = slice(end - count, end)
            steps = np.arange(min(int(top), self._vocab_size), dtype=np.int32)
            found[int(row)] = PromptLogprobs(
                chosen=chosen[ids],
                ranks=ranks[ids],
                top_ids=((prompts.target_ids[ids, None] + steps) % self._vocab_size).astype(np.int32),
                top_logprobs=(chosen[ids, None] - steps).astype(np.float32),
            )
        return found


@dataclass(frozen=True, slots=True)
class _Launched:
    """The choice of a plan's tokens that has been launched."""

    runner: FakeRunner
    plan: StepPlan

    def wait(self) -> StepOutput:
        """See `PendingOutput`."""
        return self.runner.wait(self.plan)
