"""Records a model's forward pass once, as a flat list of ops over registers. Computes nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction of a program. A register holds one packed tensor, [num_tokens, width].

    kind:    what is done; `fuse` lists what the kernels know beside the op interface.
    inputs:  registers read.
    weights: names of weights.
    outputs: registers written; one that is also an input is updated in place.
    layer:   for the ops that touch KV, else -1.
    value:   eps of a norm or scale of an attention, else 0.
    """

    kind: str
    inputs: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    outputs: tuple[int, ...] = ()
    layer: int = -1
    value: float = 0.0


class Recorder:
    """`Ops[int]`: each call appends an `Op` and returns the register that holds its result."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._num_registers = 0

    def embed(self, weight: str) -> int:
        """See `Ops.embed`."""
        return self._append("embed", weights=(weight,))

    def rms_norm(self, x: int, weight: str, eps: float) -> int:
        """See `Ops.rms_norm`."""
        return self._append("rms_norm", (x,), (weight,), value=eps)

    def linear(self, x: int, weight: str) -> int:
        """See `Ops.linear`."""
        return self._append("linear", (x,), (weight,))

    def rope_and_store_kv(self, q: int, k: int, v: int, layer: int) -> int:
        """See `Ops.rope_and_store_kv`; rotates q in place."""
        self.ops.append(Op("rope_store", (q, k, v), outputs=(q,), layer=layer))
        return q

    def paged_attention(self, q: int, layer: int, scale: float) -> int:
        """See `Ops.paged_attention`."""
        return self._append("attention", (q,), layer=layer, value=scale)

    def silu_mul(self, gate: int, up: int) -> int:
        """See `Ops.silu_mul`."""
        return self._append("silu_mul", (gate, up))

    def add(self, a: int, b: int) -> int:
        """See `Ops.add`."""
        return self._append("add", (a, b))

    def logits(self, x: int, weight: str) -> None:
        """See `Ops.logits`."""
        self.ops.append(Op("logits", (x,), (weight,)))

    def _append(
        self,
        kind: str,
        inputs: tuple[int, ...] = (),
        weights: tuple[str, ...] = (),
        layer: int = -1,
        value: float = 0.0,
    ) -> int:
        output = self._num_registers
        self._num_registers += 1
        self.ops.append(Op(kind, inputs, weights, (output,), layer, value))
        return output
