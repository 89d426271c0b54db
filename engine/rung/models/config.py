"""One description of a decoder for every source format. No file reading here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only model, named as in `transformers` configurations.

    rope_theta: base of the rotary frequencies; rotary pairs are (i, i + head_dim/2).
    max_position_embeddings: context length the model was made for, in tokens.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """What a frontend needs to turn text into ids and back: file name to content.

    files: `tokenizer.json` always; `chat_template.jinja` where the model has a template.
    """

    files: dict[str, bytes]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Everything known of a model before its weights are read."""

    name: str
    config: ModelConfig
    tokenizer: TokenizerBundle
    weight_format: str
    num_parameters: int
    default_sampling: DefaultSampling = field(default_factory=lambda: DefaultSampling())


@dataclass(frozen=True, slots=True)
class DefaultSampling:
    """The model's recommendation for requests that are silent; None: it has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
