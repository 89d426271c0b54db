"""The reference runner: weights, KV memory and one forward pass per step. It chooses no tokens itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rung.models.registry import find_architecture
from rung.runner.protocol import RunnerInfo
from rung.runner.reference.kv import PagedKV, kv_bytes_per_block
from rung.runner.reference.ops import ReferenceOps
from rung.runner.reference.threads import available_cpus
from rung.sampling.logprobs import TILE_ROWS, by_row, joined, score_targets
from rung.sampling.sampler import sample
from rung.scheduler.batch import StepOutput, StepPlan

if TYPE_CHECKING:
    from rung.errors import RequestError
    from rung.models.config import ModelConfig
    from rung.models.weights import WeightSource
    from rung.scheduler.batch import PromptLogprobs


class ReferenceRunner:
    """Runs every step's rows in one batched float32 forward pass.

    Its matrix products depend on the batch's shape, so answers agree across batches up to
    rounding, not bitwise.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        num_blocks: int,
        block_size: int,
        num_threads: int | None = None,
    ) -> None:
        torch.set_num_threads(num_threads or available_cpus())
        tensors = {name: torch.from_numpy(weights.get(name).to_float32()) for name in weights.names()}
        self._config = config
        self._decoder = find_architecture(config.architecture).decoder
        self._kv = PagedKV(config, num_blocks, block_size)
        max_len = min(config.max_position_embeddings, num_blocks * block_size)
        self._ops = ReferenceOps(config, tensors, self._kv, max_len)
        self._info = RunnerInfo(
            name="reference",
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes_per_block=kv_bytes_per_block(config, block_size),
            weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            batch_invariant=False,
        )

    @property
    def info(self) -> RunnerInfo:
        """Constant after construction."""
        return self._info

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Compute the plan's tokens and store their KV; blocks freed since the last plan become NaN."""
        self._kv.poison(torch.from_numpy(plan.freed_blocks.astype(np.int64)))
        self._kv.copy(torch.from_numpy(plan.block_copies.astype(np.int64)))
        self._ops.bind(plan)
        self._decoder(self._ops, self._config)

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> StepOutput:
        """Choose one token for each of the plan's sampling rows."""
        sampled = sample(self._ops.take_logits().numpy(), plan.sampling)
        failed = {int(plan.sample_rows[index]): error for index, error in sampled.failed.items()}
        prompts, prompt_failures = self._score_prompts(plan)
        return StepOutput(sampled.token_ids, sampled.logprobs, failed | prompt_failures, prompts)

    def _score_prompts(self, plan: StepPlan) -> tuple[dict[int, PromptLogprobs], dict[int, RequestError]]:
        if plan.prompts is None:
            return {}, {}
        target_ids = plan.prompts.target_ids
        num_top = np.repeat(plan.prompts.num_top, plan.prompts.counts)
        tiles = []
        for first in range(0, len(target_ids), TILE_ROWS):
            end = min(first + TILE_ROWS, len(target_ids))
            logits = self._ops.scored_logits(first, end).numpy()
            tiles.append(score_targets(logits, target_ids[first:end], num_top[first:end]))
        return by_row(plan.prompts, joined(tiles), self._config.vocab_size)

    def close(self) -> None:
        """Nothing to release: torch owns its threads, and memory goes with the object."""
