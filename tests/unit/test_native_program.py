"""The recorded program: what is fused, what is not, and that every register is written first."""

from __future__ import annotations

import pytest

from rung.models.config import ModelConfig
from rung.models.llama import decoder
from rung.runner.native.fuse import fuse
from rung.runner.native.recorder import Op, Recorder

LAYERS = 3
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)

FLOAT_LAYER = [
    "rms_norm", "linear", "rope_store", "attention", "add_linear",
    "rms_norm", "gated_linear", "add_linear",
]  # fmt: skip
INT8_LAYER = [
    "rms_norm_quantize", "linear", "rope_store", "attention", "quantize", "add_linear",
    "rms_norm_quantize", "gated_linear_quantize", "add_linear",
]  # fmt: skip


def llama(activations: str) -> list[Op]:
    recorder = Recorder()
    decoder(recorder, CONFIG)
    return fuse(recorder.ops, lambda _: activations == "int8")


@pytest.mark.parametrize(("activations", "layer"), [("float", FLOAT_LAYER), ("int8", INT8_LAYER)])
def test_a_llama_layer_is_a_few_large_ops(activations: str, layer: list[str]) -> None:
    assert [op.kind for op in llama(activations)] == ["embed", *layer * LAYERS, "norm_logits"]


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_registers_are_written_before_they_are_read(activations: str) -> None:
    written: set[int] = set()
    for op in llama(activations):
        in_place = {"add_linear", "rope_store"} & {op.kind}
        assert written.issuperset(op.inputs), op
        assert bool(written.intersection(op.outputs)) == bool(in_place), op
        written.update(op.outputs)


def test_the_hidden_state_stays_in_one_register() -> None:
    ops = llama("float")
    assert {op.outputs[0] for op in ops if op.kind == "add_linear"} == {ops[0].outputs[0]}


def test_a_sum_whose_input_is_read_again_is_not_done_in_place() -> None:
    recorder = Recorder()
    x = recorder.embed("e")
    total = recorder.add(x, recorder.linear(x, "w"))
    recorder.logits(recorder.add(x, total), "e")
    kinds = [op.kind for op in fuse(recorder.ops, lambda _: False)]
    assert kinds == ["embed", "linear", "add", "add", "logits"]


def test_a_product_that_is_read_twice_is_not_fused_away() -> None:
    recorder = Recorder()
    x = recorder.embed("e")
    gate, up = recorder.linear(x, "g"), recorder.linear(x, "u")
    gated = recorder.silu_mul(gate, up)
    recorder.logits(recorder.add(gated, gate), "e")
    kinds = [op.kind for op in fuse(recorder.ops, lambda _: False)]
    assert kinds == ["embed", "linear", "silu_mul", "add", "logits"]


def test_layers_that_want_different_inputs_are_not_joined() -> None:
    recorder = Recorder()
    x = recorder.rms_norm(recorder.embed("e"), "n", 1e-5)
    a, b = recorder.linear(x, "int"), recorder.linear(x, "float")
    recorder.logits(recorder.silu_mul(a, b), "e")
    ops = fuse(recorder.ops, lambda name: name == "int")
    # The norm is read both ways, so it stays a float register with an int8 copy beside it.
    assert [op.kind for op in ops] == [
        "embed",
        "rms_norm",
        "quantize",
        "linear",
        "linear",
        "silu_mul",
        "logits",
    ]
    assert ops[3].inputs == ops[2].outputs
    assert ops[4].inputs == ops[1].outputs


def test_a_product_made_before_its_input_changed_is_not_moved_behind_it() -> None:
    recorder = Recorder()
    x = recorder.embed("e")
    early = recorder.linear(x, "a")
    x = recorder.add(x, recorder.linear(x, "b"))
    recorder.logits(recorder.add(x, early), "e")
    kinds = [op.kind for op in fuse(recorder.ops, lambda _: False)]
    assert kinds == ["embed", "linear", "add_linear", "add", "logits"]


def test_a_register_that_changed_is_quantized_again() -> None:
    recorder = Recorder()
    x = recorder.embed("e")
    x = recorder.add(x, recorder.linear(x, "a"))
    x = recorder.add(x, recorder.linear(x, "b"))
    recorder.logits(x, "e")
    kinds = [op.kind for op in fuse(recorder.ops, lambda _: True)]
    assert kinds == ["embed", "quantize", "add_linear", "quantize", "add_linear", "logits"]
