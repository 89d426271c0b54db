"""The native CPU runner: packs the weights once, then a step is two calls into `rung_kernels`.

It chooses tokens in the kernels; rows with rules on single ids or with rarer filters get theirs from
`rung.sampling` on host logits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

import rung_kernels
from rung.errors import ConfigError, ModelError, non_finite
from rung.models.registry import find_architecture
from rung.runner.native.fuse import fuse
from rung.runner.native.recorder import Recorder
from rung.runner.protocol import RunnerInfo
from rung.sampling.logprobs import ScoredTargets, by_row
from rung.sampling.random import uniform
from rung.sampling.sampler import sample
from rung.scheduler.batch import LogprobRow, StepOutput

if TYPE_CHECKING:
    import numpy.typing as npt

    from rung.errors import RequestError
    from rung.models.config import ModelConfig
    from rung.models.weights import WeightSource
    from rung.scheduler.batch import PromptLogprobs, SamplingColumns, StepPlan


class NativeRunner:
    """Runs every step's rows in one pass whose answers do not depend on the batch.

    num_threads:   None: what quota and affinity leave to this process.
    kv_dtype:      f32, bf16, or int8 with a scale per token and head.
    activations:   int8 (in groups of 32, for quantized weights) or float.
    isa:           one of `rung_kernels.AVAILABLE_ISAS`; None: the best.
    poison_freed:  fill freed blocks with NaN, so that reading one before it is rewritten shows.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        num_blocks: int,
        block_size: int,
        num_threads: int | None = None,
        kv_dtype: str = "bf16",
        activations: str = "int8",
        isa: str | None = None,
        poison_freed: bool = False,
    ) -> None:
        try:
            model = rung_kernels.Model(
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                vocab_size=config.vocab_size,
                rope_theta=config.rope_theta,
                max_len=min(config.max_position_embeddings, num_blocks * block_size),
                num_blocks=num_blocks,
                block_size=block_size,
                kv_dtype=kv_dtype,
                activations=activations,
                num_threads=num_threads,
                isa=isa,
            )
        except ValueError as error:
            raise ConfigError(f"The native runner cannot be set up: {error}.") from error
        self._open_model: rung_kernels.Model | None = model
        self._poison_freed = poison_freed
        self._vocab_size = config.vocab_size
        start_s = time.monotonic()
        int8_inputs = _load_weights(model, weights)
        pack_s = time.monotonic() - start_s
        recorder = Recorder()
        find_architecture(config.architecture).decoder(recorder, config)
        if activations != "int8":
            int8_inputs = set()
        program = fuse(recorder.ops, int8_inputs.__contains__)
        try:
            model.load_program(
                [(op.kind, op.inputs, op.weights, op.outputs, op.layer, op.value) for op in program]
            )
        except ValueError as error:
            raise ModelError(f"The native runner cannot run this model: {error}.") from error
        self._info = RunnerInfo(
            name="native",
            num_blocks=num_blocks,
            block_size=block_size,
            kv_bytes_per_block=self._model.kv_bytes_per_block,
            weight_bytes=self._model.weight_bytes[0],
            batch_invariant=True,
            details=(
                f"{self.isa}, {self.num_threads} threads, {activations} activations, "
                f"{kv_dtype} KV, {self.bytes_per_weight:.2f} bytes per weight packed in {pack_s:.1f} s"
            ),
        )

    @property
    def info(self) -> RunnerInfo:
        """Constant after construction."""
        return self._info

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._model.isa

    @property
    def num_threads(self) -> int:
        """Threads, the caller's included."""
        return self._model.num_threads

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that a number of the matrices takes on average, as packed."""
        num_bytes, num_values = self._model.weight_bytes
        return num_bytes / num_values

    def forward(self, plan: StepPlan) -> None:
        """Compute the plan's tokens and store their KV."""
        if self._poison_freed and len(plan.freed_blocks):
            self._model.poison(plan.freed_blocks)
        if len(plan.block_copies):
            self._model.copy_blocks(*np.ascontiguousarray(plan.block_copies.T))
        self._model.forward(
            plan.token_ids,
            plan.query_start,
            plan.num_computed,
            np.ascontiguousarray(plan.block_tables),
            plan.sample_rows,
            None if plan.prompts is None else plan.prompts.tokens,
        )

    def sample(self, plan: StepPlan) -> StepOutput:
        """Choose one token for each of the plan's sampling rows."""
        sampling = plan.sampling
        on_host = sampling.special_rows()
        token_ids, finite, chosen, tops, logits = self._model.sample(
            num_top=sampling.top_logprobs,
            on_host=on_host,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            number=_random_numbers(sampling),
        )
        failed = {int(index): non_finite() for index in np.flatnonzero(~finite)}
        logprobs = {
            index: LogprobRow(float(chosen[index]), top_ids, top_logprobs)
            for index, (top_ids, top_logprobs) in tops.items()
            if index not in failed
        }
        host_rows = np.flatnonzero(on_host)
        if len(host_rows):
            sampled = sample(logits, sampling.take(host_rows))
            token_ids[host_rows] = sampled.token_ids
            logprobs |= {int(host_rows[index]): row for index, row in sampled.logprobs.items()}
            failed |= {int(host_rows[index]): error for index, error in sampled.failed.items()}
        failed = {int(plan.sample_rows[index]): error for index, error in failed.items()}
        prompts, prompt_failures = self._score_prompts(plan)
        return StepOutput(token_ids, logprobs, failed | prompt_failures, prompts)

    def _score_prompts(self, plan: StepPlan) -> tuple[dict[int, PromptLogprobs], dict[int, RequestError]]:
        if plan.prompts is None:
            return {}, {}
        num_top = np.repeat(plan.prompts.num_top, plan.prompts.counts)
        scored = ScoredTargets(*self._model.score(plan.prompts.target_ids, num_top))
        return by_row(plan.prompts, scored, self._vocab_size)

    def take_times(self) -> dict[str, int]:
        """Nanoseconds in the kernels by phase since the last call."""
        return self._model.take_times()

    def close(self) -> None:
        """Release threads and memory. Idempotent."""
        self._open_model = None

    @property
    def _model(self) -> rung_kernels.Model:
        assert self._open_model is not None, "the runner is closed"
        return self._open_model


def _load_weights(model: rung_kernels.Model, weights: WeightSource) -> set[str]:
    """Pack all weights; returns the names of those whose input shall be int8."""
    int8_inputs = set()
    for name in weights.names():
        tensor = weights.get(name)
        try:
            if len(tensor.shape) == 1:
                model.add_vector(name, tensor.format, tensor.data, tensor.shape[0])
            elif model.add_matrix(name, tensor.format, tensor.data, tensor.shape[1]):
                int8_inputs.add(name)
        except ValueError as error:
            raise ModelError(f"The native runner cannot use the model's weights: {error}.") from error
    weights.release_pages()
    return int8_inputs


def kv_bytes_per_block(config: ModelConfig, kv_dtype: str) -> int:
    """Bytes of one block over all layers, keys and values, without making a runner."""
    return rung_kernels.kv_bytes_per_block(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype)


def _random_numbers(sampling: SamplingColumns) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row that draws: [S]."""
    numbers = np.zeros(len(sampling.seed))
    drawn = np.flatnonzero(sampling.temperature > 0)
    if len(drawn):
        numbers[drawn] = uniform(sampling.seed[drawn], sampling.sample_index[drawn], sampling.position[drawn])
    return numbers
