"""How much memory this process may take, and how many KV blocks come of it. Allocates nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rung.errors import ConfigError, ModelError

BLOCK_SIZE = 16
# Without a wish, KV takes no more than this and no more than this share of what is free.
AUTO_KV_BYTES = 2 << 30
AUTO_KV_SHARE = 4


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The KV memory of an engine.

    max_model_len: tokens of one request, prompt and answer; fits the blocks.
    reduced_from:  the context that the model was made for, when the blocks hold less.
    """

    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    reduced_from: int | None

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * BLOCK_SIZE


def plan_kv(
    *,
    model_context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    bytes_per_block: int,
    free_bytes: int,
) -> KvPlan:
    """Blocks and context for a model made for `model_context` tokens.

    max_model_len, kv_cache_bytes: what the user asks for; None leaves it to us. `ConfigError` says
    what would fit when it does not.
    """
    context = model_context if max_model_len is None else max_model_len
    if context > model_context:
        raise ConfigError(
            f"--max-model-len is {context}, but this model was made for {model_context} tokens; "
            "give at most that."
        )
    if kv_cache_bytes is not None and kv_cache_bytes > free_bytes:
        raise ConfigError(
            f"--kv-cache-memory is {human_bytes(kv_cache_bytes)}, but beside the weights only "
            f"{human_bytes(free_bytes)} are free; give less."
        )
    bytes_per_row = -(-context // BLOCK_SIZE) * bytes_per_block
    automatic = min(max_num_seqs * bytes_per_row, AUTO_KV_BYTES, free_bytes // AUTO_KV_SHARE)
    num_blocks = (automatic if kv_cache_bytes is None else kv_cache_bytes) // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"The memory for keys and values holds not one block of {BLOCK_SIZE} tokens, which takes "
            f"{human_bytes(bytes_per_block)}; give --kv-cache-memory at least that."
        )
    fits = num_blocks * BLOCK_SIZE
    if context <= fits:
        return KvPlan(num_blocks, bytes_per_block, context, None)
    if max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {max_model_len} needs {human_bytes(bytes_per_row)} of KV memory for one "
            f"sequence, but there are {human_bytes(num_blocks * bytes_per_block)}; give --max-model-len "
            f"{fits} or less, or --kv-cache-memory {bytes_per_row} or more."
        )
    return KvPlan(num_blocks, bytes_per_block, fits, context)


def free_beside_weights(weight_bytes: int) -> int:
    """Bytes left for KV after the weights; `ModelError` when not even those fit."""
    available = available_bytes()
    if weight_bytes >= available:
        raise ModelError(
            f"The weights take {human_bytes(weight_bytes)}, but this process may use only "
            f"{human_bytes(available)} more; stop other programs or take a smaller model."
        )
    return available - weight_bytes


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take without swapping: the machine's, or its control group's if less.

    root: where /proc and /sys are; tests have their own.
    """
    limits = [*_machine_bytes(root), *_cgroup_bytes(root)]
    if limits:
        return max(0, min(limits))
    # Not Linux: everything there is, as far as POSIX can say.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _machine_bytes(root: Path) -> list[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _cgroup_bytes(root: Path) -> list[int]:
    """What each control group from ours to the top leaves; version 2 files, else those of version 1."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may name the host's tree: then only the mount's root is there.
        for group in (folder, *folder.parents):
            if group.is_relative_to(base):
                limits += _group_bytes(group, limit, usage)
    return limits


def _group_bytes(group: Path, limit: str, usage: str) -> list[int]:
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    if most == "max":
        return []
    # Clean file pages count as used but are dropped on demand.
    return [int(most) - used + int(stat.get("inactive_file", 0))]


def human_bytes(count: float) -> str:
    """A size for people: three significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
