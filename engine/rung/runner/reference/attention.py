"""Causal attention over paged keys and values, rows of one shape together. No storing of KV here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from rung.runner.reference.kv import PagedKV
    from rung.scheduler.batch import I32, StepPlan


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """N rows with Q query tokens each, padded to the longest context L among them.

    tokens: [N * Q] int64        the rows' places among the step's packed tokens
    slots:  [N, L] int64         where each context position is stored; the pad slot past the end
    mask:   [N, 1, Q, L] float32 0 where a query may look, -inf where it may not
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def attention_groups(plan: StepPlan, block_size: int, pad_slot: int) -> list[AttentionGroup]:
    """Group the plan's rows by query length and, within a factor of two, by context length.

    All decode rows of like context share one group; the factor bounds what padding can cost.
    """
    members: dict[tuple[int, int], list[int]] = {}
    lens = zip(plan.query_lens.tolist(), plan.num_computed.tolist(), strict=True)
    for row, (query_len, computed) in enumerate(lens):
        members.setdefault((query_len, (computed + query_len).bit_length()), []).append(row)
    return [
        _group(plan, np.array(rows, dtype=np.int32), query_len, block_size, pad_slot)
        for (query_len, _), rows in members.items()
    ]


def _group(plan: StepPlan, rows: I32, query_len: int, block_size: int, pad_slot: int) -> AttentionGroup:
    computed = plan.num_computed[rows].astype(np.int64)
    context_lens = computed + query_len
    tokens = plan.query_start[rows, None].astype(np.int64) + np.arange(query_len)
    positions = np.arange(context_lens.max())
    blocks = plan.block_tables[rows][:, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    slots[positions >= context_lens[:, None]] = pad_slot
    # [N, Q, 1] query positions against [L] key positions.
    visible = positions <= (computed[:, None] + np.arange(query_len))[:, :, None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf))
    return AttentionGroup(
        tokens=torch.from_numpy(tokens.reshape(-1)),
        slots=torch.from_numpy(slots),
        mask=torch.from_numpy(mask[:, None]),
    )


def paged_attention(
    q: torch.Tensor, layer: int, scale: float, *, kv: PagedKV, groups: list[AttentionGroup]
) -> torch.Tensor:
    """Attend every query token over its row's stored context.

    q: [num_tokens, num_heads, head_dim] float32. Returns the same shape; softmax in float32.
    Query head h reads KV head h // (num_heads / num_kv_heads). Source: Kwon et al. 2023,
    arXiv:2309.06180.
    """
    num_heads, head_dim = q.shape[1:]
    attended = torch.empty_like(q)
    for group in groups:
        num_rows = len(group.slots)
        keys, values = kv.gather(layer, group.slots)
        queries = q.index_select(0, group.tokens).view(num_rows, -1, num_heads, head_dim)
        # All as [N, heads, length, head_dim].
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=True,
        )
        attended.index_copy_(0, group.tokens, out.transpose(1, 2).reshape(-1, num_heads, head_dim))
    return attended
