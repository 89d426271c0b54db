"""A Hugging Face model folder: `config.json`, tokenizer files and safetensors, single or sharded.

Runs no code from the folder, opens no pickle, and fetches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rung.errors import ModelError
from rung.formats.hf_config import model_config
from rung.formats.json_file import JsonFile, read_bounded
from rung.formats.mapping import quoted
from rung.formats.safetensors import open_safetensors
from rung.models.config import DefaultSampling, ModelConfig, TokenizerBundle

if TYPE_CHECKING:
    from rung.models.weights import StoredTensor

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True, eq=False)
class HfFolder:
    """What the folder holds. Tensors are views on mapped files, by their names there."""

    config: ModelConfig
    tokenizer: TokenizerBundle
    default_sampling: DefaultSampling
    tensors: dict[str, StoredTensor]


def open_hf_folder(path: Path) -> HfFolder:
    """Read the folder's small files and map its weights."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model folder: it has no config.json")
    config_file = JsonFile(path / "config.json")
    config = model_config(config_file)
    generation = path / "generation_config.json"
    generation_file = JsonFile(generation) if generation.is_file() else None
    return HfFolder(
        config=config,
        tokenizer=_tokenizer(path, config_file, generation_file),
        default_sampling=_default_sampling(generation_file),
        tensors=_open_weights(path),
    )


def _open_weights(path: Path) -> dict[str, StoredTensor]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _open_shards(path, JsonFile(index))
    if (path / "model.safetensors").is_file():
        return open_safetensors(path / "model.safetensors")
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{path} has its weights in pickle files ({pickles[0]}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise ModelError(f"{path} has no weights: neither model.safetensors nor model.safetensors.index.json")


def _open_shards(path: Path, index: JsonFile) -> dict[str, StoredTensor]:
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.error("weight_map must be an object of tensor names to file names")
    for shard in weight_map.values():
        # A shard lies beside its index, whatever the index says.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise index.error(
                f"{quoted(str(shard))} is not the name of a safetensors file in the same folder"
            )
    shards = {shard: open_safetensors(path / shard) for shard in sorted(set(weight_map.values()))}
    tensors = {}
    for shard, contents in shards.items():
        for name, tensor in contents.items():
            if weight_map.get(name) != shard:
                raise index.error(f"tensor {quoted(name)} is in {shard}, which the index does not say")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise index.error(f"tensor {quoted(name)} is not in {shard}")
    return tensors


def _tokenizer(path: Path, config: JsonFile, generation: JsonFile | None) -> TokenizerBundle:
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json, the one tokenizer format that is supported")
    tokenizer = JsonFile(path / "tokenizer.json")
    if not isinstance(tokenizer.values.get("model"), dict):
        raise tokenizer.error("model must be an object")
    files = {"tokenizer.json": tokenizer.raw}
    template = _chat_template(path)
    if template is not None:
        files["chat_template.jinja"] = template
    eos = (_ids(generation, "eos_token_id") if generation else ()) or _ids(config, "eos_token_id")
    bos = (_ids(generation, "bos_token_id") if generation else ()) or _ids(config, "bos_token_id")
    return TokenizerBundle(files, bos[0] if bos else None, eos)


def _chat_template(path: Path) -> bytes | None:
    """The template's own file, else the one named "default" inside `tokenizer_config.json`."""
    if (path / "chat_template.jinja").is_file():
        return read_bounded(path / "chat_template.jinja")
    if not (path / "tokenizer_config.json").is_file():
        return None
    file = JsonFile(path / "tokenizer_config.json")
    template = file.values.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is None:
        return None
    if not isinstance(template, str):
        raise file.error("chat_template must be a string or a list of named templates")
    try:
        return template.encode()
    except UnicodeEncodeError:
        raise file.error("chat_template holds half of a surrogate pair") from None


def _ids(file: JsonFile, key: str) -> tuple[int, ...]:
    """One id or a list of ids; absent is empty."""
    value = file.values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise file.error(f"{key} must be an integer or a list of integers, not {value!r:.80}")
    return tuple(dict.fromkeys(ids))


def _default_sampling(generation: JsonFile | None) -> DefaultSampling:
    # Without sampling the other fields mean nothing; some files carry the library's defaults.
    if generation is None or generation.values.get("do_sample") is False:
        return DefaultSampling()
    return DefaultSampling(
        temperature=generation.optional_real("temperature"),
        top_k=generation.optional_integer("top_k"),
        top_p=generation.optional_real("top_p"),
        min_p=generation.optional_real("min_p"),
        typical_p=generation.optional_real("typical_p"),
        repetition_penalty=generation.optional_real("repetition_penalty"),
    )
