"""Small random llamas, made by `transformers` and opened as Hugging Face folders: the whole
distribution of the next token agrees, and a row that breaks breaks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from rung.errors import ErrorCode
from rung.models.loader import open_model
from rung.request import FinishReason
from rung.runner.reference import ReferenceRunner, kv_bytes_per_block
from tests.models.driver import drive, request

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 97
BROKEN_ID = 13
PROMPT = [5, 90, 3, 3, 41, 17, 96, 0, 22]

SHAPES = {
    "one_head_per_kv_head": {},
    "grouped_queries": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
    "one_kv_head": {"num_key_value_heads": 1},
    "untied_head": {"tie_word_embeddings": False},
    "own_head_dim": {"head_dim": 12, "num_key_value_heads": 2},
    "other_constants": {
        "rms_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    },
}


def make_model(**shape: object) -> LlamaForCausalLM:
    """Random weights, large enough that the distribution is far from flat."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "attn_implementation": "eager",
    }
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**settings | shape)).eval()


def open_runner(model: LlamaForCausalLM, folder: Path) -> ReferenceRunner:
    """The model saved to a folder and opened from there."""
    model.save_pretrained(folder)
    vocabulary = {f"t{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    opened = open_model(folder)
    return ReferenceRunner(opened.metadata.config, opened.weights, num_blocks=24, block_size=4, num_threads=1)


@torch.inference_mode()
def expected_logprobs(model: LlamaForCausalLM, token_ids: list[int]) -> np.ndarray:
    """Log-softmax after the last token: [vocab_size]."""
    logits = model(torch.tensor([token_ids])).logits[0, -1]
    return torch.log_softmax(logits.double(), -1).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_logprob_of_each_step_agrees(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    runner = open_runner(make_model(**SHAPES[shape]).to(dtype), tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    short, long = PROMPT[:4], PROMPT * 4
    requests = [
        request(index, prompt, max_tokens=6, top_logprobs=VOCAB_SIZE)
        for index, prompt in enumerate((short, long))
    ]
    answers = drive(runner, requests, max_num_batched_tokens=10, max_num_seqs=4).answers
    for prompt, answer in zip((short, long), answers, strict=True):
        token_ids = list(prompt)
        for token_id, row in zip(answer.token_ids, answer.logprobs, strict=True):
            expected = expected_logprobs(model, token_ids)
            np.testing.assert_allclose(row.top_logprobs, expected[row.top_ids], atol=1e-4, rtol=0)
            assert row.chosen == pytest.approx(expected[token_id], abs=1e-4)
            token_ids.append(token_id)


def test_a_row_that_is_not_finite_fails_alone_and_leaves_no_trace(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN_ID] = torch.nan
    runner = open_runner(model, tmp_path)

    def answers(middle: list[int]) -> list[tuple[list[int], FinishReason | None]]:
        prompts = [PROMPT, middle, PROMPT[::-1]]
        run = drive(runner, [request(index, prompt, max_tokens=8) for index, prompt in enumerate(prompts)])
        return [(answer.token_ids, answer.reason) for answer in run.answers]

    healthy = answers([1, 2, 3])
    broken = answers([1, BROKEN_ID, 3])
    assert broken[1] == ([], FinishReason.ERROR)
    assert [broken[0], broken[2]] == [healthy[0], healthy[2]]
    # Its blocks, full of NaN, serve the next requests.
    assert answers([1, 2, 3]) == healthy


def test_the_error_of_a_row_that_is_not_finite_says_so(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN_ID] = torch.inf
    answer = drive(open_runner(model, tmp_path), [request(0, [BROKEN_ID], max_tokens=8)]).answers[0]
    assert answer.error is not None
    assert answer.error.code is ErrorCode.NON_FINITE


def test_sampled_answers_repeat_with_their_seed(tmp_path: Path) -> None:
    runner = open_runner(make_model(), tmp_path)

    def sampled(seeds: list[int]) -> list[list[int]]:
        requests = [
            request(index, PROMPT, max_tokens=20, temperature=1.5, seed=seed)
            for index, seed in enumerate(seeds)
        ]
        return [answer.token_ids for answer in drive(runner, requests).answers]

    first, second, third = sampled([1, 2, 1])
    assert first == third
    assert first != second
    assert sampled([2])[0] == second


def test_info_states_what_a_block_costs(tmp_path: Path) -> None:
    runner = open_runner(make_model(num_key_value_heads=2), tmp_path)
    config = open_model(tmp_path).metadata.config
    # Keys and values x layers x KV heads x head_dim x tokens x bytes.
    assert runner.info.kv_bytes_per_block == kv_bytes_per_block(config, 4) == 2 * 3 * 2 * 8 * 4 * 4
    assert not runner.info.batch_invariant
