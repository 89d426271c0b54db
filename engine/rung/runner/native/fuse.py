"""Rewrites a recorded program into the fewer, larger ops that the kernels run. Changes no result.

Beside the op interface the kernels know:

linear        with several weights and as many outputs: linear layers that share their input
add_linear    inputs (x, y), one weight, x updated in place: x + y @ weight^T
gated_linear  one input, weights (gate, up): silu(x @ gate^T) * (x @ up^T)
norm_logits   weights (norm, head): the norm of the sampling rows alone, then their logits
quantize      the input as int8 groups of 32
rms_norm_quantize, gated_linear_quantize  whose result only int8 layers read
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from rung.runner.native.recorder import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Which input of an op meets its weights.
_WEIGHTED_INPUT = {"linear": 0, "gated_linear": 0, "add_linear": 1}

# Ops that can write their result as int8 groups.
_QUANTIZING = {"rms_norm": "rms_norm_quantize", "gated_linear": "gated_linear_quantize"}


def fuse(ops: Sequence[Op], takes_int8: Callable[[str], bool]) -> list[Op]:
    """The program as the kernels run it.

    takes_int8: whether the layer of that weight reads its input as int8 groups.
    """
    fused = _fuse_gates(ops, takes_int8)
    fused = _fuse_residuals(fused)
    fused = _fuse_shared_inputs(fused, takes_int8)
    fused = _fuse_head(fused)
    return _quantize_inputs(fused, takes_int8)


def _num_reads(ops: Sequence[Op]) -> Counter[int]:
    return Counter(register for op in ops for register in op.inputs)


def _fuse_gates(ops: Sequence[Op], takes_int8: Callable[[str], bool]) -> list[Op]:
    """linear(x, gate), linear(x, up), silu_mul(gate, up) become gated_linear(x, gate, up)."""
    reads = _num_reads(ops)
    fused: list[Op] = []
    for op in ops:
        fused.append(op)
        if len(fused) < 3 or op.kind != "silu_mul" or any(reads[register] > 1 for register in op.inputs):
            continue
        gate, up, _ = fused[-3:]
        if (
            gate.kind == up.kind == "linear"
            and gate.outputs + up.outputs == op.inputs
            and gate.inputs == up.inputs
            and _reads_int8(gate, takes_int8) == _reads_int8(up, takes_int8)
        ):
            fused[-3:] = [Op("gated_linear", gate.inputs, gate.weights + up.weights, op.outputs)]
    return fused


def _fuse_residuals(ops: Sequence[Op]) -> list[Op]:
    """linear(y, w), add(x, product), x read for the last time, become add_linear in x's place."""
    reads = _num_reads(ops)
    last_read = {register: index for index, op in enumerate(ops) for register in op.inputs}
    renamed: dict[int, int] = {}
    fused: list[Op] = []
    for index, op in enumerate(ops):
        linear = fused[-1] if fused else None
        is_last_read = op.kind == "add" and last_read[op.inputs[0]] == index
        op = replace(op, inputs=tuple(renamed.get(register, register) for register in op.inputs))
        if is_last_read and linear is not None and linear.kind == "linear":
            x, product = op.inputs
            if linear.outputs == (product,) and reads[product] == 1 and x != product:
                renamed[op.outputs[0]] = x
                fused[-1] = Op("add_linear", (x, *linear.inputs), linear.weights, (x,))
                continue
        fused.append(op)
    return fused


def _fuse_shared_inputs(ops: Sequence[Op], takes_int8: Callable[[str], bool]) -> list[Op]:
    """Neighbouring linears of one input become one with several weights and outputs."""
    fused: list[Op] = []
    for op in ops:
        before = fused[-1] if fused else None
        if (
            before is not None
            and op.kind == before.kind == "linear"
            and op.inputs == before.inputs
            and _reads_int8(op, takes_int8) == _reads_int8(before, takes_int8)
        ):
            fused[-1] = replace(
                before, weights=before.weights + op.weights, outputs=before.outputs + op.outputs
            )
        else:
            fused.append(op)
    return fused


def _fuse_head(ops: Sequence[Op]) -> list[Op]:
    """rms_norm(x, norm), logits(normed, head) become norm_logits(x, norm, head)."""
    reads = _num_reads(ops)
    fused: list[Op] = []
    for op in ops:
        norm = fused[-1] if fused else None
        if (
            norm is not None
            and (norm.kind, op.kind) == ("rms_norm", "logits")
            and norm.outputs == op.inputs
            and reads[op.inputs[0]] == 1
        ):
            fused[-1] = replace(norm, kind="norm_logits", weights=norm.weights + op.weights, outputs=())
        else:
            fused.append(op)
    return fused


def _quantize_inputs(ops: Sequence[Op], takes_int8: Callable[[str], bool]) -> list[Op]:
    """Give every layer that reads int8 groups a register that holds them."""
    only_int8 = _read_only_as_int8(ops, takes_int8)
    next_register = 1 + max((register for op in ops for register in op.outputs), default=-1)
    # Register to the one that holds its present value as int8 groups.
    int8: dict[int, int] = {}
    result: list[Op] = []
    for op in ops:
        if _reads_int8(op, takes_int8):
            index = _WEIGHTED_INPUT[op.kind]
            source = op.inputs[index]
            if source not in int8:
                int8[source] = next_register
                result.append(Op("quantize", (source,), outputs=(next_register,)))
                next_register += 1
            op = replace(op, inputs=(*op.inputs[:index], int8[source], *op.inputs[index + 1 :]))
        for register in op.outputs:
            int8.pop(register, None)
        if op.kind in _QUANTIZING and op.outputs[0] in only_int8:
            op = replace(op, kind=_QUANTIZING[op.kind])
            int8[op.outputs[0]] = op.outputs[0]
        result.append(op)
    return result


def _read_only_as_int8(ops: Sequence[Op], takes_int8: Callable[[str], bool]) -> set[int]:
    as_int8: set[int] = set()
    as_float: set[int] = set()
    for op in ops:
        for index, register in enumerate(op.inputs):
            is_int8 = index == _WEIGHTED_INPUT.get(op.kind) and _reads_int8(op, takes_int8)
            (as_int8 if is_int8 else as_float).add(register)
    return as_int8 - as_float


def _reads_int8(op: Op, takes_int8: Callable[[str], bool]) -> bool:
    return op.kind in _WEIGHTED_INPUT and takes_int8(op.weights[0])
