"""Random llamas in any stored format, opened by no loader, and their logits in plain float64 numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from rung.models.config import ModelConfig
from rung.models.llama import weight_shapes
from rung.models.weights import StoredTensor
from rung.runner.native import NativeRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=83,
    hidden_size=256,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
# Where the half-precision scales and minima of a K block are.
K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


class RandomWeights:
    """A `WeightSource` of seeded weights; matrices in one format, vectors in F32."""

    def __init__(self, config: ModelConfig, weight_format: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._tensors: dict[str, StoredTensor] = {}
        for part, shape in weight_shapes(config).items():
            if part == "lm_head" and config.tie_word_embeddings:
                continue
            for layer in range(config.num_layers if "{i}" in part else 1):
                name = part.format(i=layer)
                self._tensors[name] = _tensor(rng, name, shape, weight_format)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.data.nbytes for tensor in self._tensors.values())

    def names(self) -> tuple[str, ...]:
        """Canonical names."""
        return tuple(self._tensors)

    def get(self, name: str) -> StoredTensor:
        """The tensor of that name."""
        return self._tensors[name]

    def replace(self, name: str, tensor: StoredTensor) -> None:
        """Another tensor under that name."""
        self._tensors[name] = tensor

    def replace_row(self, name: str, row: int, value: float) -> None:
        """Fill a row of an F32 matrix."""
        self._tensors[name].data[row] = np.full(self._tensors[name].shape[1], value, np.float32).view(
            np.uint8
        )

    def release_pages(self) -> None:
        """Nothing is mapped."""


def _tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], weight_format: str) -> StoredTensor:
    if len(shape) == 1:
        vector = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return StoredTensor(name, shape, "F32", vector.view(np.uint8)[None])
    quant_type = gguf.GGMLQuantizationType[weight_format]
    if weight_format in K_SCALES:
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        data = rng.integers(0, 256, (shape[0], shape[1] // block_len, block_bytes), dtype=np.uint8)
        for place in K_SCALES[weight_format]:
            scales = rng.uniform(3e-5, 1e-4, data.shape[:2]).astype(np.float16)
            data[..., place : place + 2] = scales[..., None].view(np.uint8)
        return StoredTensor(name, shape, weight_format, data.reshape(shape[0], -1))
    values = (rng.standard_normal(shape) * 2.0 / np.sqrt(shape[1])).astype(np.float32)
    data = np.ascontiguousarray(gguf.quantize(values, quant_type)).view(np.uint8).reshape(shape[0], -1)
    return StoredTensor(name, shape, weight_format, data)


def make_runner(
    weight_format: str = "Q4_1", config: ModelConfig = CONFIG, *, num_blocks: int = 128, **options: Any
) -> NativeRunner:
    """A runner of a random model that poisons freed blocks."""
    weights = RandomWeights(config, weight_format)
    return NativeRunner(config, weights, num_blocks=num_blocks, block_size=16, poison_freed=True, **options)


def shaped(**changes: Any) -> ModelConfig:
    """`CONFIG` with other sizes."""
    return replace(CONFIG, **changes)


def expected_logprobs(
    config: ModelConfig, weights: RandomWeights, token_ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Log-softmax after each token of one sequence, [len, vocab_size], from the definition."""
    weight = {name: weights.get(name).to_float32().astype(np.float64) for name in weights.names()}
    x = weight["embed_tokens"][list(token_ids)]
    for layer in range(config.num_layers):
        part = {
            name.split(".")[2]: value for name, value in weight.items() if name.startswith(f"layers.{layer}.")
        }
        h = _norm(x, part["attn_norm"], config)
        q, k, v = (h @ part[name].T for name in ("q_proj", "k_proj", "v_proj"))
        x = x + _attention(q, k, v, config) @ part["o_proj"].T
        h = _norm(x, part["mlp_norm"], config)
        gate = h @ part["gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ part["up_proj"].T)) @ part["down_proj"].T
    head = weight["embed_tokens" if config.tie_word_embeddings else "lm_head"]
    return _log_softmax(_norm(x, weight["norm"], config) @ head.T)


def _norm(
    x: npt.NDArray[np.float64], w: npt.NDArray[np.float64], config: ModelConfig
) -> npt.NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * w


def _log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _attention(
    q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], v: npt.NDArray[np.float64], config: ModelConfig
) -> npt.NDArray[np.float64]:
    length, dim = len(q), config.head_dim
    q, k = (_rotated(x.reshape(length, -1, dim), config) for x in (q, k))
    group = config.num_heads // config.num_kv_heads
    keys = np.repeat(k, group, axis=1)
    values = np.repeat(v.reshape(length, -1, dim), group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(dim)
    scores[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
    return np.einsum("hqk,khd->qhd", np.exp(_log_softmax(scores)), values).reshape(length, -1)


def _rotated(x: npt.NDArray[np.float64], config: ModelConfig) -> npt.NDArray[np.float64]:
    half = config.head_dim // 2
    angles = np.outer(np.arange(len(x)), config.rope_theta ** (-np.arange(half) / half))[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)),
        -1,
    )
