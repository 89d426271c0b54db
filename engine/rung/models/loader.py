"""Open a model: a GGUF file or a Hugging Face folder becomes metadata and weights.

Checks that every weight is there with the right shape before anything is computed; decodes
nothing. Does not look models up by name: `rung.hub` does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rung.errors import ModelError
from rung.formats.gguf import open_gguf
from rung.formats.gguf.config import default_sampling, model_config
from rung.formats.gguf.tokenizer import tokenizer_bundle
from rung.formats.hf_folder import open_hf_folder
from rung.models.binding import BoundWeights, bind_weights
from rung.models.check import check_config, check_sampling
from rung.models.config import DefaultSampling, ModelConfig, ModelMetadata, TokenizerBundle
from rung.models.registry import find_architecture

if TYPE_CHECKING:
    import os

    from rung.models.weights import WeightSource


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """A model whose files are mapped and checked, none of its weights read."""

    metadata: ModelMetadata
    weights: WeightSource


def open_model(path: str | os.PathLike[str]) -> OpenModel:
    """Open the GGUF file or the Hugging Face folder at `path`.

    `metadata.name` is the file's name without suffix, or the folder's. `ModelError` says in a
    sentence what is missing, damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _open_hf_folder(path)
    return _open_gguf(path)


def _open_gguf(path: Path) -> OpenModel:
    file = open_gguf(path)
    architecture = find_architecture(file.metadata.text("general.architecture"))
    config = model_config(file.metadata, file.tensors.keys())
    check_config(config, path)
    weights = bind_weights(
        file.tensors,
        architecture,
        architecture.gguf_names,
        config,
        source=path,
        interleaved_heads=architecture.gguf_interleaved_heads,
    )
    tokenizer = tokenizer_bundle(file.metadata, config.vocab_size)
    return _model(path.stem, path, config, tokenizer, default_sampling(file.metadata), weights)


def _open_hf_folder(path: Path) -> OpenModel:
    folder = open_hf_folder(path)
    architecture = find_architecture(folder.config.architecture)
    check_config(folder.config, path)
    weights = bind_weights(
        folder.tensors,
        architecture,
        architecture.hf_names,
        folder.config,
        source=path,
        ignored=architecture.hf_ignored,
    )
    return _model(
        path.resolve().name, path, folder.config, folder.tokenizer, folder.default_sampling, weights
    )


def _model(
    name: str,
    path: Path,
    config: ModelConfig,
    tokenizer: TokenizerBundle,
    sampling: DefaultSampling,
    weights: BoundWeights,
) -> OpenModel:
    check_sampling(sampling, path)
    for token_id in (tokenizer.bos_token_id, *tokenizer.eos_token_ids):
        if token_id is not None and not 0 <= token_id < config.vocab_size:
            raise ModelError(
                f"{path}: special token id {token_id} is outside the vocabulary of {config.vocab_size}"
            )
    values_by_format = Counter[str]()
    for tensor in weights.stored():
        values_by_format[tensor.format] += tensor.num_values
    metadata = ModelMetadata(
        name=name,
        config=config,
        tokenizer=tokenizer,
        weight_format=values_by_format.most_common(1)[0][0],
        num_parameters=values_by_format.total(),
        default_sampling=sampling,
    )
    return OpenModel(metadata, weights)
