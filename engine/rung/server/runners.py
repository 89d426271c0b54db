"""Which runners there are and how each is built. Nothing of a runner is imported before it is chosen."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.errors import ConfigError
from rung.server.memory import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rung.config import ModelOptions
    from rung.models.loader import OpenModel
    from rung.runner.protocol import Runner


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """What a runner will need, known before its weights are read, and how to build it.

    weight_bytes: as the runner will hold them.
    build:        takes the number of KV blocks.
    """

    weight_bytes: int
    kv_bytes_per_block: int
    build: Callable[[int], Runner]


def plan_runner(model: OpenModel, options: ModelOptions) -> RunnerPlan:
    """The runner that the options name. `ConfigError` when a package for it is missing."""
    return _RUNNERS[options.runner](model, options)


def _reference(model: OpenModel, options: ModelOptions) -> RunnerPlan:
    try:
        # By name: no static import may lead from here to torch.
        module = importlib.import_module("rung.runner.reference")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError(
            "The reference runner needs torch, which is not installed; install rung[torch] "
            "(in a clone: make setup-torch)."
        ) from error
    config = model.metadata.config

    def build(num_blocks: int) -> Runner:
        runner: Runner = module.ReferenceRunner(
            config, model.weights, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=options.threads
        )
        return runner

    return RunnerPlan(
        weight_bytes=4 * model.metadata.num_parameters,
        kv_bytes_per_block=module.kv_bytes_per_block(config, BLOCK_SIZE),
        build=build,
    )


def _native(model: OpenModel, options: ModelOptions) -> RunnerPlan:
    from rung.runner.native import NativeRunner, kv_bytes_per_block

    config = model.metadata.config

    def build(num_blocks: int) -> Runner:
        return NativeRunner(
            config,
            model.weights,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_threads=options.threads,
            kv_dtype=options.kv_cache_dtype,
            activations=options.activations,
        )

    return RunnerPlan(
        weight_bytes=model.weights.total_bytes,
        kv_bytes_per_block=kv_bytes_per_block(config, options.kv_cache_dtype),
        build=build,
    )


def _fake(model: OpenModel, options: ModelOptions) -> RunnerPlan:
    from rung.runner.fake import FakeRunner

    vocab_size = model.metadata.config.vocab_size
    return RunnerPlan(
        weight_bytes=0,
        kv_bytes_per_block=8 * BLOCK_SIZE,
        build=lambda num_blocks: FakeRunner(num_blocks, BLOCK_SIZE, vocab_size, options.fake_step_ms / 1e3),
    )


_RUNNERS: dict[str, Callable[[OpenModel, ModelOptions], RunnerPlan]] = {
    "native": _native,
    "reference": _reference,
    "fake": _fake,
}
