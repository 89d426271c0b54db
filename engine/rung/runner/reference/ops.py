"""The op interface in plain float32 torch. A step's batch is bound before the model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from rung.runner.reference.attention import AttentionGroup, attention_groups, paged_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rung.models.config import ModelConfig
    from rung.runner.reference.kv import PagedKV
    from rung.scheduler.batch import StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan as tensors.

    token_ids, slots: [T] int64      slots: where each token's KV goes
    cos, sin:         [T, 1, head_dim] float32
    last_tokens:      [S] int64      the sampling rows' last query tokens
    scored_tokens:    [Q] int64      tokens that get logits besides
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    last_tokens: torch.Tensor
    scored_tokens: torch.Tensor
    groups: list[AttentionGroup]


class ReferenceOps:
    """`Ops[torch.Tensor]` over float32 weights [out, in] and a paged float32 KV cache."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, torch.Tensor], kv: PagedKV, max_len: int
    ) -> None:
        self._weights = weights
        self._kv = kv
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._cos, self._sin = _rotary_tables(config, max_len)
        self._step: StepInputs | None = None
        self._logits: torch.Tensor | None = None
        self._scored: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, plan: StepPlan) -> None:
        """Make `plan` the batch that the next run of the model works on."""
        query_lens = plan.query_lens
        row_of_token = np.repeat(np.arange(plan.num_rows), query_lens)
        # Position = the row's first query position + distance from its first query token.
        offset = plan.num_computed - plan.query_start[:-1]
        positions = np.arange(plan.num_tokens) + offset[row_of_token]
        block_size = self._kv.block_size
        blocks = plan.block_tables[row_of_token, positions // block_size].astype(np.int64)
        where = torch.from_numpy(positions)
        self._logits = None
        self._step = StepInputs(
            token_ids=torch.from_numpy(plan.token_ids.astype(np.int64)),
            slots=torch.from_numpy(blocks * block_size + positions % block_size),
            cos=self._cos[where].unsqueeze(1),
            sin=self._sin[where].unsqueeze(1),
            last_tokens=torch.from_numpy(plan.query_start[plan.sample_rows + 1].astype(np.int64) - 1),
            scored_tokens=torch.from_numpy(
                np.empty(0, np.int64) if plan.prompts is None else plan.prompts.tokens.astype(np.int64)
            ),
            groups=attention_groups(plan, block_size, self._kv.pad_slot),
        )

    def take_logits(self) -> torch.Tensor:
        """Logits of the bound plan's sampling rows, [S, vocab_size] float32; once per run."""
        assert self._logits is not None, "the model has not run on the bound plan"
        logits, self._logits = self._logits, None
        return logits

    def scored_logits(self, first: int, end: int) -> torch.Tensor:
        """Logits of some of the bound plan's scored tokens, [end - first, vocab_size] float32."""
        assert self._scored is not None, "the model has not run on the bound plan"
        rows, weight = self._scored
        return F.linear(rows[first:end], weight)

    def embed(self, weight: str) -> torch.Tensor:
        """See `Ops.embed`."""
        return F.embedding(self._bound.token_ids, self._weights[weight])

    def rms_norm(self, x: torch.Tensor, weight: str, eps: float) -> torch.Tensor:
        """See `Ops.rms_norm`."""
        return F.rms_norm(x, x.shape[-1:], self._weights[weight], eps)

    def linear(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        """See `Ops.linear`."""
        return F.linear(x, self._weights[weight])

    def rope_and_store_kv(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """See `Ops.rope_and_store_kv`."""
        step = self._bound
        keys = self._rotate(k.view(-1, self._num_kv_heads, self._head_dim), step)
        values = v.view(-1, self._num_kv_heads, self._head_dim)
        self._kv.store(layer, step.slots, keys, values)
        return self._rotate(q.view(-1, self._num_heads, self._head_dim), step).flatten(1)

    def paged_attention(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """See `Ops.paged_attention`."""
        heads = q.view(-1, self._num_heads, self._head_dim)
        return paged_attention(heads, layer, scale, kv=self._kv, groups=self._bound.groups).flatten(1)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """See `Ops.silu_mul`."""
        return F.silu(gate).mul_(up)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See `Ops.add`."""
        return a + b

    def logits(self, x: torch.Tensor, weight: str) -> None:
        """See `Ops.logits`."""
        self._logits = F.linear(x.index_select(0, self._bound.last_tokens), self._weights[weight])
        self._scored = (x.index_select(0, self._bound.scored_tokens), self._weights[weight])

    @property
    def _bound(self) -> StepInputs:
        assert self._step is not None, "bind a plan before running the model"
        return self._step

    def _rotate(self, x: torch.Tensor, step: StepInputs) -> torch.Tensor:
        # x [T, heads, head_dim]: rolling by half a head swaps the members of each pair
        # (i, i + head_dim/2); the sine table carries the sign.
        return torch.addcmul(x * step.cos, x.roll(self._head_dim // 2, -1), step.sin)


def _rotary_tables(config: ModelConfig, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [max_len, head_dim] float32 by absolute position, computed in float64.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), config.rope_theta**-exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()
