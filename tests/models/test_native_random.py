"""The native runner on random models: every stored format and head layout against the definition
in float64, the same bits on every instruction set and in every batch, and rows that break alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from rung.errors import ErrorCode, ModelError
from rung.request import FinishReason
from rung.runner.native import NativeRunner
from rung_kernels import AVAILABLE_ISAS, FORMATS
from tests.models.driver import drive, request
from tests.models.test_native_contract import bits
from tests.native_models import CONFIG, RandomWeights, expected_logprobs, make_runner, shaped

if TYPE_CHECKING:
    from rung.models.config import ModelConfig
    from rung.runner.protocol import Runner
    from tests.models.test_native_contract import Bits

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 80, length).tolist() for length in (1, 7, 40, 300)]
MAX_TOKENS = 5

SHAPES: dict[str, ModelConfig] = {
    "one_head_per_kv_head": shaped(num_kv_heads=4),
    "one_kv_head": shaped(num_kv_heads=1),
    "head_dim_12": shaped(head_dim=12),
    "head_dim_96": shaped(head_dim=96, num_heads=3, num_kv_heads=1),
    "odd_sizes": shaped(hidden_size=50, intermediate_size=37, vocab_size=31, head_dim=10),
    "untied_head": shaped(tie_word_embeddings=False),
}


def run(runner: Runner, prompts: list[list[int]], **schedule: int) -> Bits:
    """All prompts together."""
    requests = [request(index, prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(prompts)]
    return bits(drive(runner, requests, **schedule).answers)


def check_against_definition(config: ModelConfig, weight_format: str) -> None:
    weights = RandomWeights(config, weight_format)
    runner = NativeRunner(
        config, weights, num_blocks=128, block_size=16, activations="float", kv_dtype="f32", num_threads=2
    )
    prompts = [[token % config.vocab_size for token in prompt] for prompt in PROMPTS]
    requests = [
        request(index, prompt, max_tokens=MAX_TOKENS, top_logprobs=config.vocab_size)
        for index, prompt in enumerate(prompts)
    ]
    for prompt, answer in zip(
        prompts, drive(runner, requests, max_num_batched_tokens=64).answers, strict=True
    ):
        assert len(answer.token_ids) == MAX_TOKENS
        expected = expected_logprobs(config, weights, prompt + answer.token_ids)[len(prompt) - 1 :]
        for row, logprobs in zip(answer.logprobs, expected, strict=False):
            np.testing.assert_allclose(row.top_logprobs, logprobs[row.top_ids], atol=1e-4, rtol=0)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_format_gives_the_definition(weight_format: str) -> None:
    check_against_definition(CONFIG, weight_format)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_head_layout_gives_the_definition(shape: str) -> None:
    check_against_definition(SHAPES[shape], "F32")


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_same_bits_on_every_instruction_set_and_in_every_batch(weight_format: str, activations: str) -> None:
    # Plain Rust multiplies floats slowly, and attention does not care what feeds it.
    prompts = PROMPTS if activations == "int8" else PROMPTS[:3]
    expected = run(
        make_runner(weight_format, activations=activations, isa="portable", num_threads=1), prompts
    )
    for isa in AVAILABLE_ISAS:
        runner = make_runner(weight_format, activations=activations, isa=isa)
        assert run(runner, prompts) == expected, isa
        assert run(runner, prompts, max_num_batched_tokens=33, max_num_seqs=3) == expected, isa
        assert run(runner, prompts, max_num_seqs=1) == expected, isa


def test_one_row_or_many() -> None:
    runner = make_runner("Q4_K", num_blocks=512)
    alone = bits(drive(runner, [request(0, PROMPTS[1], max_tokens=MAX_TOKENS)]).answers)
    requests = [request(index, PROMPTS[1], max_tokens=MAX_TOKENS) for index in range(300)]
    assert bits(drive(runner, requests, max_num_seqs=300, max_num_batched_tokens=2100).answers) == alone * 300


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("weight_format", ["F32", "Q8_0"])
def test_a_row_that_is_not_finite_fails_alone_and_leaves_no_trace(
    weight_format: str, kv_dtype: str, value: float
) -> None:
    config = shaped(tie_word_embeddings=False)
    weights, broken = RandomWeights(config, weight_format), 13
    embeddings = RandomWeights(config, "F32")
    embeddings.replace_row("embed_tokens", broken, value)
    weights.replace("embed_tokens", embeddings.get("embed_tokens"))
    runner = NativeRunner(config, weights, num_blocks=16, block_size=16, kv_dtype=kv_dtype)

    def answers(middle: list[int]) -> list[tuple[list[int], FinishReason | None]]:
        prompts = [PROMPTS[2], middle, PROMPTS[1]]
        done = drive(runner, [request(index, prompt, max_tokens=8) for index, prompt in enumerate(prompts)])
        assert all(a.error is None or a.error.code is ErrorCode.NON_FINITE for a in done.answers)
        return [(answer.token_ids, answer.reason) for answer in done.answers]

    healthy = answers([1, 2, 3])
    failed = answers([1, broken, 3])
    assert failed[1] == ([], FinishReason.ERROR)
    assert [failed[0], failed[2]] == [healthy[0], healthy[2]]
    # Its blocks serve the next requests.
    assert answers([1, 2, 3]) == healthy


def test_a_closed_runner_has_no_threads_left() -> None:
    process = psutil.Process()
    before = process.num_threads()
    runner = make_runner(num_threads=5)
    assert process.num_threads() == before + 4
    runner.close()
    runner.close()
    assert process.num_threads() == before


def test_a_weight_of_the_wrong_size_is_refused() -> None:
    weights = RandomWeights(shaped(num_heads=2), "F32")
    with pytest.raises(ModelError, match=r"The native runner cannot run this model: op 3 \(rope_store"):
        NativeRunner(CONFIG, weights, num_blocks=8, block_size=16)
