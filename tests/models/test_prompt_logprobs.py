"""Logprobs of prompts by the real runners: those of the definition, the same bits however they are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from rung.errors import ErrorCode
from rung.request import FinishReason
from rung.runner.native import NativeRunner
from rung_kernels import AVAILABLE_ISAS
from tests.models.driver import Answer, drive, request
from tests.models.test_tiny_llama import PROMPT, VOCAB_SIZE, make_model, open_runner
from tests.native_models import CONFIG, RandomWeights, expected_logprobs, shaped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rung.runner.protocol import Runner

RNG = np.random.default_rng(8)
# More than one tile of rows, one id alone, and two ids.
PROMPTS = [RNG.integers(0, 80, length).tolist() for length in (150, 1, 2, 70, 33)]
TOP = 4


def run(runner: Runner, prompts: Sequence[list[int]] = PROMPTS, **schedule: int) -> list[Answer]:
    """All prompts together."""
    requests = [
        request(index, prompt, max_tokens=6, prompt_top_logprobs=TOP) for index, prompt in enumerate(prompts)
    ]
    return drive(runner, requests, **schedule).answers


def check(answer: Answer, prompt: list[int], expected: np.ndarray, tolerance: float) -> None:
    """`expected`: log-softmax after each id of the prompt, [len(prompt), vocab_size]."""
    assert sum(len(part.chosen) for part in answer.prompts) == len(prompt) - 1
    if len(prompt) == 1:
        return
    chosen = np.concatenate([part.chosen for part in answer.prompts])
    ranks = np.concatenate([part.ranks for part in answer.prompts])
    top_ids = np.concatenate([part.top_ids for part in answer.prompts])
    top_logprobs = np.concatenate([part.top_logprobs for part in answer.prompts])
    targets = np.array(prompt[1:])
    rows = np.arange(len(targets))
    np.testing.assert_allclose(chosen, expected[rows, targets], atol=tolerance, rtol=0)
    np.testing.assert_allclose(top_logprobs, expected[rows[:, None], top_ids], atol=tolerance, rtol=0)
    best = np.sort(expected[:-1], axis=1)[:, ::-1][:, :TOP]
    np.testing.assert_allclose(top_logprobs, best, atol=tolerance, rtol=0)
    # A rank may differ from the exact one only among ids that are as likely up to rounding.
    own = expected[rows, targets][:, None]
    assert (1 + (expected[:-1] > own + tolerance).sum(axis=1) <= ranks).all()
    assert (ranks <= (expected[:-1] > own - tolerance).sum(axis=1)).all()


def bits(answers: Sequence[Answer]) -> list[tuple[bytes, ...]]:
    return [
        tuple(
            np.concatenate([getattr(part, name) for part in answer.prompts] or [np.empty(0)]).tobytes()
            for name in ("chosen", "ranks", "top_ids", "top_logprobs")
        )
        for answer in answers
    ]


def test_the_reference_agrees_with_transformers(tmp_path: Path) -> None:
    model = make_model()
    runner = open_runner(model, tmp_path)
    prompts = [PROMPT * 8, PROMPT[:2]]
    for prompt, answer in zip(
        prompts, run(runner, prompts, max_num_batched_tokens=16, max_num_seqs=4), strict=True
    ):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].double()
        check(answer, prompt, torch.log_softmax(logits, -1).numpy(), 1e-4)
        assert logits.shape[-1] == VOCAB_SIZE


def test_the_native_runner_agrees_with_the_definition() -> None:
    weights = RandomWeights(CONFIG, "F32")
    runner = NativeRunner(
        CONFIG, weights, num_blocks=64, block_size=16, activations="float", kv_dtype="f32", num_threads=2
    )
    for prompt, answer in zip(PROMPTS, run(runner, max_num_batched_tokens=100), strict=True):
        check(answer, prompt, expected_logprobs(CONFIG, weights, prompt), 1e-4)


@pytest.mark.parametrize("isa", AVAILABLE_ISAS[-1:])
def test_the_bits_do_not_depend_on_chunks_batch_or_preemption(isa: str) -> None:
    def runner() -> NativeRunner:
        return NativeRunner(
            CONFIG, RandomWeights(CONFIG, "Q8_0"), num_blocks=64, block_size=16, num_threads=2, isa=isa
        )

    whole = bits(run(runner(), max_num_batched_tokens=1024))
    alone = [bits(run(runner(), [prompt]))[0] for prompt in PROMPTS]
    assert whole == alone
    for budget in (64, 100):
        assert bits(run(runner(), max_num_batched_tokens=budget)) == whole
    assert bits(run(runner(), max_num_batched_tokens=64, num_blocks=17)) == whole


def test_a_prompt_that_is_not_finite_fails_alone() -> None:
    config = shaped(tie_word_embeddings=False)
    weights, broken = RandomWeights(config, "F32"), 13
    weights.replace_row("embed_tokens", broken, np.nan)
    runner = NativeRunner(config, weights, num_blocks=64, block_size=16, num_threads=1)
    healthy = [1, 2, 3, 4, 5, 6]
    failed, fine = run(runner, [[1, 2, broken, 4, 5, 6], healthy])
    assert failed.reason is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error.code is ErrorCode.NON_FINITE
    assert failed.prompts == []
    assert bits([fine]) == bits(run(runner, [healthy]))
