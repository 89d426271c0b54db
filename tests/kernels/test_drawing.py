"""Ids drawn by the kernels against the sampler on the host, from the same logits and numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import rung_kernels
from rung.sampling.random import uniform
from rung.sampling.sampler import sample
from rung.scheduler.batch import SamplingColumns
from rung_kernels import AVAILABLE_ISAS
from tests.kernels.test_model import SHAPE, i32

VOCAB_SIZE, WIDTH, NUM_ROWS = 3001, 32, 48
CHOICES = [
    {},
    {"temperature": 0.3},
    {"temperature": 7.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 2000},
    {"top_k": 5000},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
    {"temperature": 5.0, "top_p": 0.95},
]


def make_model(isa: str) -> rung_kernels.Model:
    """Logits of a row are those of its token: the table's row times the head."""
    rng = np.random.default_rng(1)
    model = rung_kernels.Model(**SHAPE | {"vocab_size": VOCAB_SIZE, "num_blocks": NUM_ROWS, "isa": isa})
    for name in ("table", "head"):
        values = rng.standard_normal((VOCAB_SIZE, WIDTH)).astype(np.float32)
        if name == "head":
            # Ties, at the top too.
            values[1::2] = values[::2][: VOCAB_SIZE // 2]
        model.add_matrix(name, "F32", values.view(np.uint8), WIDTH)
    model.load_program([("embed", (), ("table",), (0,), -1, 0.0), ("logits", (0,), ("head",), (), -1, 0.0)])
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    model.forward(rows * 7, np.arange(NUM_ROWS + 1, dtype=np.int32), rows * 0, rows[:, None].copy(), rows)
    return model


def column(value: float, dtype: type) -> npt.NDArray[np.generic]:
    return np.full(NUM_ROWS, value, dtype=dtype)


@pytest.mark.parametrize("isa", AVAILABLE_ISAS)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_kernels_draw_what_the_host_draws(choice: dict[str, float], isa: str) -> None:
    model = make_model(isa)
    host = np.ones(NUM_ROWS, dtype=np.bool_)
    sampling = SamplingColumns(
        temperature=column(choice.get("temperature", 1.0), np.float32),
        top_k=column(choice.get("top_k", 0), np.int32),
        top_p=column(choice.get("top_p", 1.0), np.float32),
        seed=np.arange(NUM_ROWS, dtype=np.uint64),
        sample_index=column(0, np.int32),
        position=column(0, np.int64),
        top_logprobs=column(3, np.int32),
        min_p=column(0, np.float32),
        typical_p=column(1, np.float32),
    )
    numbers = uniform(sampling.seed, sampling.sample_index, sampling.position)
    parameters = (sampling.temperature, sampling.top_k, sampling.top_p, numbers)
    logits = model.sample(i32(*[-1] * NUM_ROWS), host, *parameters)[4]
    assert logits.shape == (NUM_ROWS, VOCAB_SIZE)
    ids, finite, logprobs, tops, _ = model.sample(sampling.top_logprobs, ~host, *parameters)
    assert finite.all()
    expected = sample(logits, sampling)
    assert ids.tolist() == expected.token_ids.tolist()
    for row in range(NUM_ROWS):
        assert logprobs[row] == pytest.approx(expected.logprobs[row].chosen, abs=1e-5)
        np.testing.assert_array_equal(tops[row][0], expected.logprobs[row].top_ids)
        np.testing.assert_allclose(tops[row][1], expected.logprobs[row].top_logprobs, atol=1e-5)


def test_numbers_at_the_ends_draw_the_first_and_the_last_id_with_weight() -> None:
    model = make_model(AVAILABLE_ISAS[-1])
    ones, zeros = column(1.0, np.float32), column(0, np.int32)
    for top_k, count in ((0, VOCAB_SIZE), (3, 3)):
        for number in (0.0, np.nextafter(1.0, 0.0)):
            ids, *_ = model.sample(
                zeros - 1, column(0, np.bool_), ones, zeros + top_k, ones, column(number, np.float64)
            )
            assert ((ids >= 0) & (ids < VOCAB_SIZE)).all()
            if count == VOCAB_SIZE and number == 0.0:
                assert (ids == 0).all()
