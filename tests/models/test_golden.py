"""The default model against golden values that `transformers` made from the same file in float32.

Whatever the schedule does (batch, chunks, preemption, where blocks lie), ids are those of the
golden values and logprobs agree within TOLERANCE. Only where the golden margin between the first
and the second id is below NEAR_TIE may another id come, and then that prompt's comparison ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.models.driver import Answer, Run, ShuffledBlocks, drive, request

if TYPE_CHECKING:
    from rung.models.loader import OpenModel
    from rung.runner.protocol import Runner
    from rung.runner.reference import ReferenceRunner

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/smollm2_q4_1.json").read_text(encoding="utf-8"))
PROMPTS: dict[str, dict[str, Any]] = {prompt["name"]: prompt for prompt in GOLDEN["prompts"]}
# Short and long, several scripts: for the schedules that are slow to run.
SOME = ["single_token", "python", "chinese", "emoji", "chat_turns", "speech"]

TOLERANCE = 3e-4
NEAR_TIE = 1e-3


def run(runner: Runner, names: list[str], **schedule: int) -> Run:
    """The named prompts together, each asking for as many tokens as the golden values have."""
    eos_token_id = GOLDEN["provenance"]["eos_token_id"]
    requests = [
        request(
            index,
            PROMPTS[name]["prompt_ids"],
            max_tokens=len(PROMPTS[name]["output_ids"]),
            stop_token_ids=[eos_token_id],
        )
        for index, name in enumerate(names)
    ]
    return drive(runner, requests, **schedule)


def check(names: list[str], answers: list[Answer]) -> None:
    """Each answer is the golden one, up to near-ties."""
    for name, answer in zip(names, answers, strict=True):
        golden = PROMPTS[name]
        assert answer.error is None, name
        for step, (token_id, row) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            where = f"{name}, step {step}"
            # Sorted values, so that two alternatives that tie may change places.
            np.testing.assert_allclose(
                row.top_logprobs, golden["top_logprobs"][step], atol=TOLERANCE, rtol=0, err_msg=where
            )
            if token_id != golden["output_ids"][step]:
                assert golden["margins"][step] < NEAR_TIE, where
                break
            assert row.chosen == pytest.approx(golden["logprobs"][step], abs=TOLERANCE), where
        else:
            assert len(answer.token_ids) == len(golden["output_ids"]), name


@pytest.mark.parametrize("name", [name for name in PROMPTS if "messages" in PROMPTS[name]])
def test_chat_template_gives_the_golden_text(smollm2: OpenModel, name: str) -> None:
    bundle = smollm2.metadata.tokenizer
    renderer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_buffer(bundle.files["tokenizer.json"]),
        chat_template=bundle.files["chat_template.jinja"].decode(),
    )
    messages = PROMPTS[name]["messages"]
    text = renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == PROMPTS[name]["text"]


def test_all_prompts_together(smollm2_runner: ReferenceRunner) -> None:
    names = list(PROMPTS)
    check(names, run(smollm2_runner, names).answers)


@pytest.mark.parametrize("name", SOME)
def test_a_prompt_alone(smollm2_runner: ReferenceRunner, name: str) -> None:
    check([name], run(smollm2_runner, [name]).answers)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 64])
def test_prompts_in_chunks(smollm2_runner: ReferenceRunner, max_num_batched_tokens: int) -> None:
    answers = run(smollm2_runner, SOME, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=8).answers
    check(SOME, answers)


def test_preempted_rows_go_on_as_if_nothing_had_happened(smollm2_runner: ReferenceRunner) -> None:
    # Prompts of up to 55 tokens, 32 more each: together they outgrow the blocks.
    names = ["thai", "hindi", "greek", "emoji", "korean", "russian", "japanese"]
    outcome = run(smollm2_runner, names, num_blocks=27)
    assert outcome.num_preemptions > 0
    check(names, outcome.answers)


def test_where_the_blocks_lie_does_not_matter(smollm2_runner: ReferenceRunner) -> None:
    check(SOME, run(ShuffledBlocks(smollm2_runner, seed=7), SOME, max_num_batched_tokens=100).answers)
