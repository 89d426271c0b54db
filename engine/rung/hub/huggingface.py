"""Fetch models from the Hugging Face hub into that library's own cache. Takes weights and small
files of known names only: never pickles, never code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rung.errors import ModelError

_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]


class Hub(Protocol):
    """The two calls of the hub's library that are used."""

    def snapshot(self, repo: str, patterns: list[str]) -> Path:
        """A local folder with the repository's files that match."""
        ...

    def list_files(self, repo: str) -> list[str]:
        """Names of the repository's files."""
        ...


class HuggingFaceHub:
    """`Hub` over `huggingface_hub`, which is imported when first needed."""

    def snapshot(self, repo: str, patterns: list[str]) -> Path:
        """A local folder with the repository's files that match."""
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, allow_patterns=patterns))

    def list_files(self, repo: str) -> list[str]:
        """Names of the repository's files."""
        from huggingface_hub import HfApi

        return HfApi().list_repo_files(repo)


def fetch(repo: str, file_name: str | None, hub: Hub) -> Path:
    """The folder of a repository, or the GGUF file `file_name` (None: its only one)."""
    try:
        return _locate(repo, file_name, hub)
    except ModelError:
        raise
    # The library lets the exceptions of its HTTP client through, whichever client that is.
    except Exception as error:
        raise _as_model_error(repo, error) from error


def _locate(repo: str, file_name: str | None, hub: Hub) -> Path:
    if file_name is None:
        folder = hub.snapshot(repo, _FILES)
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
        file_name = _only_gguf(repo, hub.list_files(repo))
    path = hub.snapshot(repo, [file_name]) / file_name
    if not path.is_file():
        raise ModelError(f"{repo} on the Hugging Face hub has no file {file_name}")
    return path


def _only_gguf(repo: str, files: list[str]) -> str:
    names = sorted(name for name in files if name.endswith(".gguf"))
    if not names:
        raise ModelError(f"{repo} on the Hugging Face hub has neither safetensors nor a GGUF file")
    if len(names) > 1:
        raise ModelError(
            f"{repo} on the Hugging Face hub has several GGUF files ({', '.join(names)}); "
            f"choose one, such as {repo}:{names[0]}"
        )
    return names[0]


def _as_model_error(repo: str, error: Exception) -> ModelError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repo} is open only to those who accept its terms on the Hugging Face hub; "
            "do so, then run `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"the Hugging Face hub has no model {repo}, or it is private and needs `hf auth login`"
        )
    reason = str(error).strip().partition("\n")[0]
    return ModelError(
        f"the Hugging Face hub cannot be reached, and {repo} is not in its cache on this machine "
        f"({type(error).__name__}: {reason}); give the path of a local model instead"
    )
