"""Match the tensors of a file with the weights that an architecture needs. Decodes nothing."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.errors import ModelError
from rung.formats.mapping import quoted, release_pages
from rung.models.weights import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rung.models.config import ModelConfig
    from rung.models.registry import Architecture


@dataclass(frozen=True, slots=True)
class _Binding:
    """head_dim: of rows to be brought from interleaved to half-split order; 0 leaves them."""

    tensor: StoredTensor
    head_dim: int


class BoundWeights:
    """A `WeightSource` over the tensors of one model."""

    def __init__(self, bindings: Mapping[str, _Binding]) -> None:
        self._bindings = bindings

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(binding.tensor.data.nbytes for binding in self._bindings.values())

    def names(self) -> tuple[str, ...]:
        """Canonical names in the order of the file."""
        return tuple(self._bindings)

    def stored(self) -> Iterable[StoredTensor]:
        """The tensors as the file has them: its names, its order of rows."""
        return (binding.tensor for binding in self._bindings.values())

    def get(self, name: str) -> StoredTensor:
        """The tensor under its canonical name, rows in canonical order."""
        binding = self._bindings[name]
        stored = binding.tensor
        data = stored.data
        if binding.head_dim:
            # [heads, pairs, 2, row_bytes] -> [heads, 2, pairs, row_bytes]; whole rows move.
            pairs = data.reshape(-1, binding.head_dim // 2, 2, data.shape[1])
            data = pairs.swapaxes(1, 2).reshape(data.shape)
        return StoredTensor(name, stored.shape, stored.format, data)

    def release_pages(self) -> None:
        """Give back the memory that reading took; reading works on."""
        release_pages(binding.tensor.data for binding in self._bindings.values())


def bind_weights(
    tensors: Mapping[str, StoredTensor],
    architecture: Architecture,
    source_names: Mapping[str, str],
    config: ModelConfig,
    *,
    source: Path,
    interleaved_heads: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> BoundWeights:
    """Every weight of the architecture, or a `ModelError`: missing, misshapen or surplus tensors.

    ignored: patterns of source names that may be present and do not change the answers.
    """
    if config.num_layers > len(tensors):
        raise ModelError(f"{source}: {config.num_layers} layers cannot be made of {len(tensors)} tensors")
    bound: dict[str, tuple[str, _Binding]] = {}
    for part, shape in architecture.weight_shapes(config).items():
        if part == "lm_head" and config.tie_word_embeddings:
            continue
        head_dim = config.head_dim if part in interleaved_heads else 0
        for layer in range(config.num_layers if "{i}" in part else 1):
            source_name = source_names[part].format(i=layer)
            tensor = _find(tensors, source_name, shape, source)
            bound[source_name] = (part.format(i=layer), _Binding(tensor, head_dim))
    _refuse_surplus(tensors, bound, ignored, source)
    return BoundWeights(dict(bound[name] for name in tensors if name in bound))


def _find(
    tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], source: Path
) -> StoredTensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelError(f"{source}: tensor {name} is missing")
    if tensor.shape != shape:
        raise ModelError(
            f"{source}: tensor {name} has the shape {list(tensor.shape)}; "
            f"the configuration asks for {list(shape)}"
        )
    return tensor


def _refuse_surplus(
    tensors: Iterable[str], bound: Mapping[str, object], ignored: Sequence[str], source: Path
) -> None:
    """A tensor that nothing reads, such as a bias, would change the answers if it were read."""
    for name in tensors:
        if name not in bound and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored):
            raise ModelError(f"{source}: tensor {quoted(name)} has no place in this architecture")
