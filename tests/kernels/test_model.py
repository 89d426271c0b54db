"""`rung_kernels.Model`: what makes no sense is refused in words, and the model goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rung_kernels

SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "vocab_size": 11,
    "rope_theta": 10000.0,
    "max_len": 64,
    "num_blocks": 4,
    "block_size": 16,
    "kv_dtype": "bf16",
    "activations": "int8",
    "num_threads": 2,
}
PROGRAM = [
    ("embed", (), ("table",), (0,), -1, 0.0),
    ("linear", (0,), ("q", "k", "v"), (1, 2, 3), -1, 0.0),
    ("rope_store", (1, 2, 3), (), (1,), 0, 0.0),
    ("attention", (1,), (), (4,), 0, 0.5),
    ("add_linear", (0, 4), ("o",), (0,), -1, 0.0),
    ("norm_logits", (0,), ("norm", "table"), (), -1, 1e-5),
]


def i32(*values: Any) -> Any:
    return np.array(values, dtype=np.int32)


def make_model(**changes: Any) -> rung_kernels.Model:
    model = rung_kernels.Model(**SHAPE | changes)
    rng = np.random.default_rng(0)
    for name, shape in {"table": (11, 16), "q": (16, 16), "k": (8, 16), "v": (8, 16), "o": (16, 16)}.items():
        values = rng.standard_normal(shape).astype(np.float32)
        assert model.add_matrix(name, "F32", values.view(np.uint8), shape[1]) is False
    model.add_vector("norm", "F32", np.ones((1, 16), dtype=np.float32).view(np.uint8), 16)
    model.load_program(PROGRAM)
    return model


def columns(
    num_rows: int, *, num_top: int = -1, temperature: float = 0.0, top_p: float = 1.0, number: float = 0.5
) -> tuple[Any, ...]:
    """What `sample` takes, the same for all rows."""
    return (
        np.full(num_rows, num_top, dtype=np.int32),
        np.zeros(num_rows, dtype=np.bool_),
        np.full(num_rows, temperature, dtype=np.float32),
        np.zeros(num_rows, dtype=np.int32),
        np.full(num_rows, top_p, dtype=np.float32),
        np.full(num_rows, number),
    )


def step(model: rung_kernels.Model, **changes: Any) -> tuple[int, float]:
    """One row of two tokens: the best id after them and its logprob."""
    batch = {
        "token_ids": i32(3, 5),
        "query_start": i32(0, 2),
        "num_computed": i32(0),
        "block_tables": i32([2]),
        "sample_rows": i32(0),
    }
    model.forward(**batch | changes)
    ids, finite, logprobs, tops, logits = model.sample(*columns(1, num_top=2))
    assert finite.all()
    assert logits.shape == (0, 11)
    assert tops[0][0][0] == ids[0]
    assert tops[0][1][0] == logprobs[0]
    return int(ids[0]), float(logprobs[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": i32(3, 11)}, "token id 11 is outside the vocabulary of 11"),
        ({"block_tables": i32([4])}, "does not cover"),
        ({"block_tables": i32([-1])}, "does not cover"),
        ({"num_computed": i32(15)}, "does not cover its 17 tokens"),
        (
            {"num_computed": i32(63), "block_tables": i32([0, 1, 2, 3])},
            "ends at position 65; the limit is 64",
        ),
        ({"query_start": i32(0, 1)}, "do not cut 2 tokens into rows"),
        ({"sample_rows": i32(1)}, "sampling row 1 is not among the 1 rows"),
        (
            {"query_start": i32(0, 1, 2), "num_computed": i32(0, 1), "block_tables": i32([2], [2])},
            "two rows write to the same block",
        ),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_and_the_next_one_works(
    changes: dict[str, Any], said: str
) -> None:
    model = make_model()
    expected = step(model)
    with pytest.raises(ValueError, match=said):
        step(model, **changes)
    assert step(model) == expected


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("num_kv_heads", 3, "cannot share 3 KV heads"),
        ("head_dim", 7, "even number"),
        ("block_size", 32, "blocks of 16 tokens"),
        ("kv_dtype", "fp8", "choose f32, bf16 or int8"),
        ("activations", "int4", "choose int8 or float"),
        ("isa", "mmx", "known: portable, avx2, avx512"),
        ("num_threads", 0, "between 1 and 1024"),
        ("num_blocks", 0, "at least 1"),
        ("num_blocks", 1 << 40, "must fit 32 bits"),
        ("num_blocks", (1 << 31) - 1, "do not fit into memory"),
        ("window", 0, "own position"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, value: Any, said: str) -> None:
    # Enough layers that the largest number of blocks is more than any machine has.
    with pytest.raises(ValueError, match=said):
        rung_kernels.Model(**SHAPE | {"num_layers": 1 << 20} | {setting: value})


def test_a_program_without_its_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r'op 0 .*there is no weight "table"'):
        rung_kernels.Model(**SHAPE).load_program(PROGRAM)


def test_a_weight_is_added_once_and_in_full() -> None:
    model = make_model()
    data = np.zeros((8, 64), dtype=np.uint8)
    with pytest.raises(ValueError, match="was added before"):
        model.add_matrix("k", "F32", data, 16)
    with pytest.raises(ValueError, match='weight "new": '):
        model.add_matrix("new", "F32", data, 17)


def test_sampling_rows_must_be_those_of_the_step() -> None:
    model = make_model()
    step(model)
    with pytest.raises(ValueError, match="2 rows to sample and 1 in the last step"):
        model.sample(*columns(2))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": np.inf}, {"top_p": 0.0}, {"number": 1.0}, {"number": np.nan}],
)
def test_draws_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    model = make_model()
    step(model)
    with pytest.raises(ValueError, match="row 0 cannot be drawn"):
        model.sample(*columns(1, **{"temperature": 1.0} | wrong))
    with pytest.raises(ValueError, match="differ in length"):
        model.sample(*columns(1)[:-1], np.zeros(2))


def test_poison_is_seen_only_where_it_is_read() -> None:
    model = make_model()
    expected = step(model)
    model.poison(i32(0, 1, 3))
    assert step(model) == expected
    model.poison(i32(2))
    # Both positions are written anew before they are read.
    assert step(model) == expected
    model.poison(i32(2))
    model.forward(i32(5), i32(0, 1), i32(1), i32([2]), i32(0))
    assert not model.sample(*columns(1))[1].any()
    with pytest.raises(ValueError, match="there is no block 4"):
        model.poison(i32(4))


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_copied_block_is_as_good_as_the_first(kv_dtype: str) -> None:
    model = make_model(kv_dtype=kv_dtype)
    model.forward(i32(3, 5), i32(0, 2), i32(0), i32([2]), i32(0))
    after = {"token_ids": i32(7), "query_start": i32(0, 1), "num_computed": i32(2)}
    expected = step(model, **after)
    model.poison(i32(0, 1, 3))
    model.copy_blocks(i32(2), i32(1))
    model.poison(i32(2))
    assert step(model, **after, block_tables=i32([1])) == expected
    with pytest.raises(ValueError, match="there is no block -1"):
        model.copy_blocks(i32(0), i32(-1))
    with pytest.raises(ValueError, match="differ in length"):
        model.copy_blocks(i32(0, 1), i32(2))


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_bytes_of_a_block(kv_dtype: str) -> None:
    model = rung_kernels.Model(**SHAPE | {"kv_dtype": kv_dtype})
    assert model.kv_bytes_per_block == rung_kernels.kv_bytes_per_block(1, 1, 8, kv_dtype)
    # Heads are padded to 32 numbers; int8 has a scale per token for keys and for values.
    per_number, scales = {"f32": (4, 0), "bf16": (2, 0), "int8": (1, 2 * 16 * 4)}[kv_dtype]
    assert model.kv_bytes_per_block == 2 * 16 * 32 * per_number + scales
