"""The policies of a scheduler by name. Each is a small object; none knows another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rung.errors import ConfigError
from rung.scheduler.admission import FirstChunkAdmission, ForecastAdmission, ReserveAllAdmission
from rung.scheduler.chunks import FixedChunks, LatencyChunks
from rung.scheduler.lanes import OneLane, TwoLanes
from rung.scheduler.victims import CheapestFirst, YoungestFirst

if TYPE_CHECKING:
    from rung.scheduler.admission import AdmissionPolicy
    from rung.scheduler.chunks import ChunkPolicy
    from rung.scheduler.lanes import LanePolicy
    from rung.scheduler.predictor import StepTimePredictor
    from rung.scheduler.victims import VictimPolicy

CHUNKS = ("latency", "fixed")
LANES = ("two", "one")
ADMISSIONS = ("forecast", "first-chunk", "reserve")
VICTIMS = ("cheapest", "youngest")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Which policies, and their settings.

    chunks:             "latency": prompts get what keeps a step within `itl_target_s`; "fixed": steps
                        of `fixed_step_tokens`.
    lanes:              "two": short prompts do not wait for long ones; "one": first come, first served.
    admission:          "forecast": room for the prompt and a likely answer; "first-chunk": for what is
                        computed first; "reserve": for the longest answer allowed.
    victims:            "cheapest": what costs least to compute again; "youngest": who came last.
    itl_target_s:       time between two tokens of a row that prompts may cause.
    fixed_step_tokens:  see `chunks`.
    forecast_quantile:  of the lengths of answers that have ended.
    over_commit:        the forecasts of all running requests may together exceed the KV memory by this.
    """

    chunks: str = CHUNKS[0]
    lanes: str = LANES[0]
    admission: str = ADMISSIONS[0]
    victims: str = VICTIMS[0]
    itl_target_s: float = 0.1
    fixed_step_tokens: int = 2048
    forecast_quantile: float = 0.5
    over_commit: float = 1.1

    def __post_init__(self) -> None:
        for name, values in (
            ("chunks", CHUNKS),
            ("lanes", LANES),
            ("admission", ADMISSIONS),
            ("victims", VICTIMS),
        ):
            if getattr(self, name) not in values:
                raise ConfigError(f"{name} must be one of {', '.join(values)}, not {getattr(self, name)!r}.")
        if not (self.itl_target_s > 0 and self.over_commit >= 1 and 0 < self.forecast_quantile <= 1):
            raise ConfigError(
                f"itl_target_s is {self.itl_target_s}, over_commit {self.over_commit} and forecast_quantile "
                f"{self.forecast_quantile}; give a time above 0, a factor of at least 1 and a part up to 1."
            )


@dataclass(frozen=True, slots=True)
class Policies:
    """One of each kind."""

    chunks: ChunkPolicy
    lanes: LanePolicy
    admission: AdmissionPolicy
    victims: VictimPolicy


def build_policies(
    config: PolicyConfig, predictor: StepTimePredictor, *, block_size: int, step_tokens: int
) -> Policies:
    """The policies that the configuration names. `step_tokens`: the most that one step holds."""
    chunks: ChunkPolicy
    if config.chunks == "latency":
        chunks = LatencyChunks(
            predictor, target_s=config.itl_target_s, block_size=block_size, step_tokens=step_tokens
        )
    else:
        chunks = FixedChunks(config.fixed_step_tokens)
    admission: AdmissionPolicy
    if config.admission == "forecast":
        admission = ForecastAdmission(
            quantile=config.forecast_quantile, over_commit=config.over_commit, block_size=block_size
        )
    else:
        admission = FirstChunkAdmission() if config.admission == "first-chunk" else ReserveAllAdmission()
    return Policies(
        chunks=chunks,
        lanes=TwoLanes(step_tokens) if config.lanes == "two" else OneLane(),
        admission=admission,
        victims=CheapestFirst() if config.victims == "cheapest" else YoungestFirst(),
    )
