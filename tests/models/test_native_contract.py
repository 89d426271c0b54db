"""The bitwise contract of the native runner on the default model: a request's ids and logprobs do
not depend on what else runs, on how its prompt is cut, on preemption, on threads or on the
instruction set. Nothing here allows for any difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rung.runner.native import NativeRunner
from rung_kernels import AVAILABLE_ISAS
from tests.models.driver import Answer, ShuffledBlocks, drive, request

if TYPE_CHECKING:
    from rung.models.loader import OpenModel
    from rung.runner.protocol import Runner

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/smollm2_q4_1.json").read_text(encoding="utf-8"))
PROMPTS: dict[str, list[int]] = {prompt["name"]: prompt["prompt_ids"] for prompt in GOLDEN["prompts"]}
NAMES = ["single_token", "python", "chinese", "emoji", "chat_turns", "speech", "access_codes"]
# For what is slow: plain Rust, and float activations.
FEW = ["single_token", "chinese", "emoji"]
MAX_TOKENS = 10
KV_DTYPES = ("f32", "bf16", "int8")

Bits = list[tuple[list[int], bytes]]


def make_runner(model: OpenModel, **options: Any) -> NativeRunner:
    """A runner with room for all prompts at once, whose freed blocks hold NaN."""
    return NativeRunner(
        model.metadata.config, model.weights, num_blocks=512, block_size=16, poison_freed=True, **options
    )


def bits(answers: Sequence[Answer]) -> Bits:
    """Ids and the exact bits of all logprobs."""
    result = []
    for answer in answers:
        assert answer.error is None
        rows = [
            np.float32(row.chosen).tobytes() + row.top_ids.tobytes() + row.top_logprobs.tobytes()
            for row in answer.logprobs
        ]
        assert len(rows) == len(answer.token_ids)
        result.append((answer.token_ids, b"".join(rows)))
    return result


def run(runner: Runner, names: Sequence[str] = NAMES, **schedule: int) -> Bits:
    """The named prompts together."""
    requests = [
        request(index, PROMPTS[name], max_tokens=MAX_TOKENS, top_logprobs=3)
        for index, name in enumerate(names)
    ]
    return bits(drive(runner, requests, **schedule).answers)


@pytest.fixture(scope="module", params=KV_DTYPES)
def runner(smollm2: OpenModel, request: pytest.FixtureRequest) -> Iterator[NativeRunner]:
    """One per KV format, on the best instruction set."""
    runner = make_runner(smollm2, kv_dtype=request.param)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def together(runner: NativeRunner) -> Bits:
    """What the prompts get in one batch."""
    return run(runner)


def test_alone(runner: NativeRunner, together: Bits) -> None:
    for name, expected in zip(NAMES, together, strict=True):
        assert run(runner, [name]) == [expected], name


@pytest.mark.parametrize("max_num_batched_tokens", [7, 64, 100])
def test_prompts_in_chunks(runner: NativeRunner, together: Bits, max_num_batched_tokens: int) -> None:
    assert run(runner, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=7) == together


def test_two_at_a_time(runner: NativeRunner, together: Bits) -> None:
    assert run(runner, max_num_seqs=2) == together


def test_preempted_rows(runner: NativeRunner) -> None:
    names = ["thai", "hindi", "greek", "emoji", "korean", "russian", "japanese"]
    requests = [
        request(index, PROMPTS[name], max_tokens=32, top_logprobs=3) for index, name in enumerate(names)
    ]
    outcome = drive(runner, requests, num_blocks=27)
    assert outcome.num_preemptions > 0
    fresh = [request(index, PROMPTS[name], max_tokens=32, top_logprobs=3) for index, name in enumerate(names)]
    assert bits(outcome.answers) == bits(drive(runner, fresh).answers)


def test_where_the_blocks_lie(runner: NativeRunner, together: Bits) -> None:
    assert run(ShuffledBlocks(runner, seed=7)) == together


def test_a_prompt_twice_in_one_batch(runner: NativeRunner, together: Bits) -> None:
    assert run(runner, [*NAMES, "speech", "speech"])[-2:] == [together[NAMES.index("speech")]] * 2


def test_32_rows_of_one_prompt(runner: NativeRunner, together: Bits) -> None:
    expected = together[NAMES.index("chinese")]
    assert run(runner, ["chinese"] * 32) == [expected] * 32


def test_drawn_tokens(runner: NativeRunner) -> None:
    def drawn(seeds: Sequence[int], **schedule: int) -> Bits:
        requests = [
            request(
                index, PROMPTS["emoji"], max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, top_logprobs=2
            )
            for index, seed in enumerate(seeds)
        ]
        return bits(drive(runner, requests, **schedule).answers)

    several = drawn([1, 2, 3])
    assert several[0] != several[1]
    for seed, expected in zip([1, 2, 3], several, strict=True):
        assert drawn([seed], max_num_batched_tokens=5, max_num_seqs=1) == [expected]


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_number_of_threads(smollm2: OpenModel, activations: str, num_threads: int) -> None:
    names = NAMES if activations == "int8" else FEW
    expected = run(make_runner(smollm2, activations=activations), names)
    assert run(make_runner(smollm2, activations=activations, num_threads=num_threads), names) == expected


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", AVAILABLE_ISAS)
def test_every_instruction_set(smollm2: OpenModel, isa: str, kv_dtype: str) -> None:
    expected = run(make_runner(smollm2, kv_dtype=kv_dtype), FEW)
    assert run(make_runner(smollm2, kv_dtype=kv_dtype, isa=isa), FEW) == expected
