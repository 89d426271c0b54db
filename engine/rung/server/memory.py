"""The byte equation of an engine and the KV blocks that come of it. Allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from rung.models.config import ModelConfig

BLOCK_SIZE = 16
# Without a wish, KV takes no more than this and no more than this share of what is free.
AUTO_KV_BYTES = 2 << 30
AUTO_KV_SHARE = 4
# Kept for what the equation does not count, but no more than this share of a small budget.
RESERVE_BYTES = 256 << 20
RESERVE_SHARE = 8
# A prompt and an answer of one token each.
MIN_CONTEXT = 2
MAX_SUGGESTIONS = 3


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


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The equation: weights + KV + workspace + reserve = budget, in bytes, before anything is allocated.

    budget:    what this process may take: the machine's free memory, or its control group's if less.
    weights:   as the runner will hold them.
    workspace: activations and logits of the largest step.
    reserve:   kept for what is not counted: the interpreter, libraries, requests and messages.
    """

    budget: int
    weights: int
    workspace: int
    reserve: int

    @property
    def free_for_kv(self) -> int:
        """What is left for keys and values."""
        return max(0, self.budget - self.weights - self.workspace - self.reserve)

    def describe(self, kv_bytes: int) -> str:
        """One line for the start-up table."""
        parts = (self.weights, kv_bytes, self.workspace, self.reserve)
        names = ("weights", "KV cache", "workspace", "reserve")
        terms = " + ".join(f"{human_bytes(part)} {name}" for part, name in zip(parts, names, strict=True))
        return f"{terms} = {human_bytes(sum(parts))} of {human_bytes(self.budget)} that are free"


def plan_memory(weight_bytes: int, workspace: int, budget: int) -> MemoryPlan:
    """The equation without KV; `ModelError` when not even the rest fits."""
    reserve = min(RESERVE_BYTES, budget // RESERVE_SHARE)
    needed = weight_bytes + workspace + reserve
    if needed >= budget:
        raise ModelError(
            f"The weights take {human_bytes(weight_bytes)} and a step {human_bytes(workspace)}, and "
            f"{human_bytes(reserve)} are kept in reserve, but this process may use only "
            f"{human_bytes(budget)} more; stop other programs, give a smaller --max-num-batched-tokens or "
            "take a smaller model."
        )
    return MemoryPlan(budget, weight_bytes, workspace, reserve)


def workspace_bytes(config: ModelConfig, step_tokens: int, max_num_seqs: int) -> int:
    """Bytes for the activations of a step and the logits of its rows, float32, an upper estimate.

    Per token: the hidden state and its norm, queries, keys, values and the attention's output, and
    both halves of the gated layer; per row that samples, two rows of logits.
    """
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 4 * config.hidden_size + heads + 3 * config.intermediate_size
    return 4 * (step_tokens * per_token + 2 * max_num_seqs * config.vocab_size)


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

    max_model_len, kv_cache_bytes: what the user asks for; None leaves it to us. `ConfigError` names
    three settings that fit when these do not, if there are as many.
    """

    def attempt(kv_bytes: int | None, length: int | None) -> KvPlan | str:
        return _plan(model_context, length, max_num_seqs, kv_bytes, bytes_per_block, free_bytes)

    plan = attempt(kv_cache_bytes, max_model_len)
    if isinstance(plan, KvPlan):
        return plan
    length = min(max_model_len or model_context, model_context)
    one_row = -(-length // BLOCK_SIZE) * bytes_per_block
    held = (kv_cache_bytes or 0) // bytes_per_block * BLOCK_SIZE
    wishes: list[tuple[int | None, int | None]] = [
        (one_row, max_model_len and length),
        (kv_cache_bytes, min(held, model_context)),
        (None, max_model_len and length),
        (free_bytes // bytes_per_block * bytes_per_block, None),
        (None, None),
        (free_bytes // 2 // bytes_per_block * bytes_per_block, None),
        (bytes_per_block, None),
    ]
    fitting = [_setting(*wish) for wish in wishes if isinstance(attempt(*wish), KvPlan)]
    options = list(dict.fromkeys(fitting))[:MAX_SUGGESTIONS]
    if not options:
        raise ConfigError(
            f"{plan} Nothing would fit: a block of {BLOCK_SIZE} tokens takes {human_bytes(bytes_per_block)} "
            f"and {human_bytes(free_bytes)} are free."
        )
    raise ConfigError(f"{plan} These would fit: {'; or '.join(options)}.")


def _plan(
    model_context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    bytes_per_block: int,
    free_bytes: int,
) -> KvPlan | str:
    """A plan, or a sentence on why there is none."""
    context = model_context if max_model_len is None else max_model_len
    if context > model_context:
        return f"--max-model-len is {context}, but this model was made for {model_context} tokens."
    if context < MIN_CONTEXT:
        return f"--max-model-len is {context}; a prompt and an answer need {MIN_CONTEXT} tokens at least."
    if kv_cache_bytes is not None and kv_cache_bytes > free_bytes:
        return (
            f"--kv-cache-memory is {human_bytes(kv_cache_bytes)}, but beside weights, workspace and reserve "
            f"only {human_bytes(free_bytes)} are free."
        )
    bytes_per_row = -(-context // BLOCK_SIZE) * bytes_per_block
    automatic = min(max_num_seqs * bytes_per_row, AUTO_KV_BYTES, free_bytes // AUTO_KV_SHARE)
    num_blocks = (automatic if kv_cache_bytes is None else kv_cache_bytes) // bytes_per_block
    if num_blocks < 1:
        return (
            f"The memory for keys and values holds not one block of {BLOCK_SIZE} tokens, which takes "
            f"{human_bytes(bytes_per_block)}."
        )
    fits = num_blocks * BLOCK_SIZE
    if context <= fits:
        return KvPlan(num_blocks, bytes_per_block, context, None)
    if max_model_len is not None:
        return (
            f"--max-model-len {max_model_len} needs {human_bytes(bytes_per_row)} of KV memory for one "
            f"sequence, but there are {human_bytes(num_blocks * bytes_per_block)}."
        )
    return KvPlan(num_blocks, bytes_per_block, fits, context)


def _setting(kv_bytes: int | None, max_model_len: int | None) -> str:
    kv = "auto" if kv_bytes is None else str(kv_bytes)
    length = "" if max_model_len is None else f" --max-model-len {max_model_len}"
    return f"--kv-cache-memory {kv}{length}"


def human_bytes(count: float) -> str:
    """A size for people: three significant digits and a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
