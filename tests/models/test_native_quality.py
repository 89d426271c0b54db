"""How far the native runner is from the float32 golden values and from its own float path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from rung.runner.native import NativeRunner
from rung.sampling.sampler import SampledTokens
from rung.scheduler.batch import SamplingColumns, StepPlan
from tests.models.test_golden import PROMPTS, check, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rung.models.loader import OpenModel

BLOCK_SIZE = 16
# Activations, KV format, and how far their next-token distributions may be from float activations
# over f32 KV: mean Kullback-Leibler divergence in nats per token.
CHOICES = [("float", "bf16", 0.0001), ("float", "int8", 0.002), ("int8", "bf16", 0.002)]
# Texts for it: the golden prompts with their answers, cut into rows; 2,048 tokens.
NUM_ROWS, ROW_LEN = 8, 256


def make_runner(model: OpenModel, **options: Any) -> NativeRunner:
    """A runner with room for every golden prompt at once."""
    return NativeRunner(
        model.metadata.config, model.weights, num_blocks=300, block_size=BLOCK_SIZE, **options
    )


def test_float_activations_give_the_golden_answers(smollm2: OpenModel) -> None:
    names = list(PROMPTS)
    runner = make_runner(smollm2, activations="float", kv_dtype="f32", poison_freed=True)
    check(names, run(runner, names).answers)


class LogitsTaker:
    """Stands in for the host sampler: keeps the logits that it is given and chooses id 0."""

    def __init__(self) -> None:
        self.logits: npt.NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)

    def __call__(self, logits: npt.NDArray[np.float32], columns: SamplingColumns) -> SampledTokens:
        self.logits = logits
        return SampledTokens(np.zeros(len(columns.seed), dtype=np.int32), {}, {})


def next_token_logprobs(
    runner: NativeRunner, rows: npt.NDArray[np.int32], taker: LogitsTaker
) -> Iterator[npt.NDArray[np.float64]]:
    """Log-softmax after each token of texts [num_rows, len]: [num_rows, vocab_size] per position."""
    num_rows, length = rows.shape
    tables = np.arange(num_rows * length // BLOCK_SIZE, dtype=np.int32).reshape(num_rows, -1)
    for position in range(length):
        plan = one_token_each(rows[:, position], position, tables)
        runner.forward(plan)
        runner.sample(plan)
        values = taker.logits.astype(np.float64)
        values -= values.max(axis=1, keepdims=True)
        yield values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def one_token_each(
    token_ids: npt.NDArray[np.int32], position: int, tables: npt.NDArray[np.int32]
) -> StepPlan:
    """A step of one token per row, all at one position, whose logits are wanted on the host."""
    num_rows = len(token_ids)
    rows = np.arange(num_rows, dtype=np.int32)
    zeros = np.zeros(num_rows, dtype=np.int32)
    sampling = SamplingColumns(
        temperature=np.zeros(num_rows, dtype=np.float32),
        top_k=zeros,
        top_p=np.ones(num_rows, dtype=np.float32),
        seed=zeros.astype(np.uint64),
        sample_index=zeros,
        position=zeros.astype(np.int64),
        top_logprobs=zeros - 1,
        min_p=zeros.astype(np.float32),
        typical_p=np.ones(num_rows, dtype=np.float32),
        # Any ban makes the host choose, which sees all logits.
        banned_ids=tuple((int(row), rows[:1]) for row in rows),
    )
    return StepPlan(
        step_id=position + 1,
        rows=rows,
        request_ids=rows.astype(np.int64),
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        token_ids=np.ascontiguousarray(token_ids),
        num_computed=np.full(num_rows, position, dtype=np.int32),
        block_tables=tables,
        sample_rows=rows,
        sampling=sampling,
        freed_blocks=zeros[:0],
    )


def test_small_formats_cost_little(
    smollm2: OpenModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = [token for prompt in PROMPTS.values() for token in prompt["prompt_ids"] + prompt["output_ids"]]
    rows = np.array(text[: NUM_ROWS * ROW_LEN], dtype=np.int32).reshape(NUM_ROWS, ROW_LEN)
    taker = LogitsTaker()
    monkeypatch.setattr("rung.runner.native.runner.sample", taker)

    def logprobs(activations: str, kv_dtype: str) -> Iterator[npt.NDArray[np.float64]]:
        return next_token_logprobs(
            make_runner(smollm2, activations=activations, kv_dtype=kv_dtype), rows, taker
        )

    divergences: dict[tuple[str, str], list[float]] = {choice[:2]: [] for choice in CHOICES}
    same_best: dict[tuple[str, str], list[bool]] = {choice[:2]: [] for choice in CHOICES}
    others = [logprobs(activations, kv_dtype) for activations, kv_dtype, _ in CHOICES]
    # In step with each other: the distributions of one position alone are held.
    for p, *qs in zip(logprobs("float", "f32"), *others, strict=True):
        for q, choice in zip(qs, divergences, strict=True):
            divergences[choice] += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            same_best[choice] += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    for activations, kv_dtype, limit in CHOICES:
        found = divergences[activations, kv_dtype]
        with capsys.disabled():
            print(
                f"\n{activations} activations, {kv_dtype} KV against float activations, f32 KV on "
                f"{rows.size} tokens: mean KL {np.mean(found):.6f}, largest {max(found):.4f}, "
                f"same best id {np.mean(same_best[activations, kv_dtype]):.2%}"
            )
        assert np.mean(found) < limit
