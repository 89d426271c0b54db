"""Filters and penalties against the logits processors of transformers, on rows as long as a vocabulary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from rung.sampling.edits import edited_logits
from rung.sampling.filters import nucleus, ranked_head, scaled_weights, typical
from rung.scheduler.batch import RuledRow
from tests.sampling_oracle import PlainRules
from tests.unit.test_sampling_rules import columns

VOCAB_SIZE = 5000


def row(seed: int) -> np.ndarray:
    """Logits that differ all, as ties are cut differently."""
    spread = np.linspace(-3.5, 2.5, VOCAB_SIZE) ** 3
    return np.random.default_rng(seed).permutation(spread).astype(np.float32)


def kept_by(processor: hf.LogitsProcessor, logits: np.ndarray) -> set[int]:
    scores = processor(torch.zeros((1, 1), dtype=torch.long), torch.from_numpy(logits)[None].clone())
    return set(np.flatnonzero(torch.isfinite(scores[0]).numpy()).tolist())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.99])
def test_filters_keep_what_the_warpers_keep(seed: int, share: float) -> None:
    logits = row(seed)
    weights = scaled_weights(logits, 1.0, float(logits.max()))
    most_typical = typical(logits, weights, 1.0, share)
    assert set(most_typical.tolist()) == kept_by(hf.TypicalLogitsWarper(share), logits)
    assert set(nucleus(logits, weights, share).tolist()) == kept_by(hf.TopPLogitsWarper(share), logits)
    assert set(np.flatnonzero(weights >= share).tolist()) == kept_by(hf.MinPLogitsWarper(share), logits)
    top_k = int(1000 * share)
    assert set(ranked_head(logits, top_k).tolist()) == kept_by(hf.TopKLogitsWarper(top_k), logits)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_penalty_is_that_of_the_processor(penalty: float) -> None:
    logits = row(9)
    prompt, answer = [5, 7, 5, 4999], [7, 8, 0]
    rules = PlainRules(repetition_penalty=penalty).built()
    ruled = RuledRow(0, rules, np.unique(np.array(prompt, np.int32)), np.array(answer, np.int32))
    got = edited_logits(logits[None], replace(columns(1), ruled=(ruled,)))[1][0]
    processor = hf.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + answer]), torch.from_numpy(logits)[None].clone())[0].numpy()
    assert np.array_equal(got, expected)


def test_bad_words_are_those_of_the_processor() -> None:
    logits = row(10)
    words = ((11,), (3, 12), (7, 3, 13), (8, 3, 14))
    rules = PlainRules(bad_words=words).built()
    answer = [9, 7, 3]
    ruled = RuledRow(0, rules, np.empty(0, np.int32), np.array(answer, np.int32))
    got = edited_logits(logits[None], replace(columns(1), ruled=(ruled,)))[1][0]
    processor = hf.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    expected = processor(torch.tensor([answer]), torch.from_numpy(logits)[None].clone())[0].numpy()
    assert np.array_equal(got, expected)


def test_bias_is_that_of_the_processor() -> None:
    logits = row(11)
    bias = {3: 2.5, 17: -100.0, 4999: 0.125}
    ruled = RuledRow(0, PlainRules(bias=bias).built(), np.empty(0, np.int32), np.empty(0, np.int32))
    got = edited_logits(logits[None], replace(columns(1), ruled=(ruled,)))[1][0]
    processor = hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = processor(torch.tensor([[1]]), torch.from_numpy(logits)[None].clone())[0].numpy()
    assert np.array_equal(got, expected)
