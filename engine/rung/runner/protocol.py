"""What the engine loop needs from a device. A runner owns weights, KV memory and streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rung.scheduler.batch import StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts that `Describe`, the start-up table and the scheduler need.

    kv_bytes_per_block: bytes of one block over all layers, keys and values.
    batch_invariant:    a row's answer is bitwise the same in any batch.
    details:            how it computes, for the start-up table.
    depth:              steps that may be under way at once. With 2, `forward` and `sample` only launch,
                        the device runs what is launched in order, and the ids that a step chooses stay
                        on it, by state row, for the next one.
    """

    name: str
    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    weight_bytes: int
    batch_invariant: bool
    details: str = ""
    depth: int = 1


class PendingOutput(Protocol):
    """What a step will have chosen. A `StepOutput` is one that is there already."""

    def wait(self) -> StepOutput:
        """The output, once the device has got that far."""
        ...


class Runner(Protocol):
    """Two phases, so that whatever must be ready for sampling alone (masks, the tokens of the
    step before) may be computed while the forward pass runs."""

    @property
    def info(self) -> RunnerInfo:
        """Constant after construction."""
        ...

    def forward(self, plan: StepPlan) -> None:
        """Compute the plan's tokens and store their KV.

        Before that the plan's `freed_blocks` may be wiped, and then its `block_copies` are made.
        """
        ...

    def sample(self, plan: StepPlan) -> PendingOutput:
        """Choose one token for each of the plan's sampling rows, after `forward` of the same plan.

        The plan's sampling columns may be newer than those that `forward` saw: they know the tokens
        of the step before.
        """
        ...

    def close(self) -> None:
        """Release threads and memory. Idempotent."""
        ...
