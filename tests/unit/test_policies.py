"""Each policy of the scheduler on its own: predictions, chunks, lanes, admission and victims."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rung.errors import ConfigError
from rung.scheduler.admission import FirstChunkAdmission, ForecastAdmission, ReserveAllAdmission
from rung.scheduler.chunks import MAX_GROWTH, FixedChunks, LatencyChunks
from rung.scheduler.lanes import OneLane, TwoLanes
from rung.scheduler.policies import PolicyConfig
from rung.scheduler.predictor import StepShape, StepTimePredictor
from rung.scheduler.victims import Candidates, CheapestFirst, YoungestFirst
from tests.scheduling import CARELESS, make_request, make_runner, make_scheduler, step

TARGET_S = 0.05


def duration(shape: StepShape, factor: float = 1.0) -> float:
    """A machine that the model describes exactly: 10 ms, 50 us a token, 2 ns a key position."""
    return factor * (0.010 + 50e-6 * shape.num_tokens + 2e-9 * (shape.decode_context + shape.prefill_work))


# Predictor


def test_nothing_is_known_at_first():
    assert StepTimePredictor().predict(StepShape(100, 100, 1000)) == 0.0


def test_what_a_step_takes_is_learnt():
    rng = np.random.default_rng(0)
    predictor = StepTimePredictor()
    for _ in range(200):
        rows, chunk = int(rng.integers(1, 64)), int(rng.integers(0, 512))
        shape = StepShape(rows + chunk, rows, rows * int(rng.integers(10, 2000)), chunk * 700.0)
        predictor.observe(shape, duration(shape))
    for shape in (StepShape(1, 1, 50), StepShape(300, 1, 5000, 200_000.0), StepShape(64, 64, 64_000)):
        assert predictor.predict(shape) == pytest.approx(duration(shape), rel=0.1)


def test_no_coefficient_is_negative_whatever_is_observed():
    rng = np.random.default_rng(1)
    predictor = StepTimePredictor()
    for _ in range(300):
        shape = StepShape(*(int(value) for value in rng.integers(0, 1000, 3)), float(rng.integers(0, 10**6)))
        predictor.observe(shape, float(rng.exponential()))
        assert predictor.predict(StepShape()) >= 0
        assert min(predictor._coefficients) >= 0


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_not_learnt(elapsed_s):
    predictor = StepTimePredictor()
    predictor.observe(StepShape(1, 1, 1), elapsed_s)
    assert predictor.num_observed == 0


def test_most_tokens_inverts_the_prediction():
    predictor = StepTimePredictor()
    rng = np.random.default_rng(2)
    for _ in range(100):
        shape = StepShape(
            int(rng.integers(1, 500)), 1, int(rng.integers(1, 9000)), float(rng.integers(0, 10**6))
        )
        predictor.observe(shape, duration(shape))
    base = StepShape(8, 8, 4000)
    most = predictor.most_tokens(base, 1000, TARGET_S)
    inside = StepShape(8 + most, 8, 4000, most * (1000 + most / 2))
    beyond = StepShape(16 + most, 8, 4000, (most + 8) * (1000 + (most + 8) / 2))
    assert predictor.predict(inside) <= TARGET_S < predictor.predict(beyond)
    assert predictor.most_tokens(base, 1000, 0.001) == 0


# Chunks


class Machine:
    """Runs a long prompt beside ten rows that decode, and learns."""

    def __init__(self) -> None:
        self.predictor = StepTimePredictor()
        self.chunks = LatencyChunks(self.predictor, target_s=TARGET_S, block_size=16, step_tokens=1024)
        self.rng = np.random.default_rng(3)

    def run(self, steps: int, *, factor: float = 1.0, noise: float = 0.0) -> tuple[list[int], list[float]]:
        """Chunks and durations of so many steps."""
        limits, durations = [], []
        for _ in range(steps):
            limits.append(self.chunks.limit(StepShape(10, 10, 5000), 2000, 1014))
            shape = StepShape(10 + limits[-1], 10, 5000, limits[-1] * (2000 + limits[-1] / 2))
            durations.append(duration(shape, factor) * float(np.exp(noise * self.rng.standard_normal())))
            self.predictor.observe(shape, durations[-1])
        return limits, durations


def test_chunk_grows_slowly_to_what_the_target_allows():
    limits, durations = Machine().run(60)
    for before, after in pairwise(limits):
        assert after <= max(MAX_GROWTH * before, before + 16)
        assert after % 16 == 0
    assert max(durations) <= 1.001 * TARGET_S
    assert durations[-1] > 0.9 * TARGET_S


def test_machine_that_turns_three_times_slower_costs_one_long_step():
    machine = Machine()
    machine.run(60)
    limits, durations = machine.run(60, factor=3.0)
    assert limits[1] <= limits[0] / 3
    assert max(durations[1:]) <= 1.1 * TARGET_S
    limits, durations = machine.run(200)
    assert max(durations) <= 1.1 * TARGET_S
    assert durations[-1] > 0.8 * TARGET_S


def test_noise_does_not_lead_beyond_the_target_by_more_than_itself():
    machine = Machine()
    machine.run(30, noise=0.15)
    _, durations = machine.run(400, noise=0.15)
    late = np.array(durations)
    assert np.quantile(late, 0.99) <= np.exp(0.15 * 2.33) * TARGET_S
    assert np.median(late) > 0.5 * TARGET_S


def test_prompts_keep_their_floor_when_even_the_others_are_too_slow():
    machine = Machine()
    machine.run(20, factor=20.0)
    assert machine.chunks.limit(StepShape(10, 10, 5000), 2000, 1014) == 32
    assert machine.chunks.limit(StepShape(10, 10, 5000), 2000, 20) == 20


def test_with_nobody_to_keep_waiting_the_step_is_full():
    assert Machine().chunks.limit(StepShape(), 0, 1024) == 1024


def test_fixed_chunks_count_the_others():
    assert FixedChunks(100).limit(StepShape(num_tokens=30), 0, 1000) == 70
    assert FixedChunks(100).limit(StepShape(num_tokens=30), 0, 20) == 20
    assert FixedChunks(10).limit(StepShape(num_tokens=30), 0, 20) == 0


# Lanes


def served(plan):
    return dict(zip(plan.request_ids.tolist(), plan.query_lens.tolist(), strict=True))


def test_b44_short_prompts_do_not_wait_for_a_long_one():
    scheduler = make_scheduler(num_blocks=64, max_model_len=256, max_num_batched_tokens=32)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 200, max_tokens=2))
    assert served(step(scheduler, runner)[0]) == {1: 32}
    scheduler.add(make_request(2, 20, max_tokens=2))
    plan, events = step(scheduler, runner, elapsed_s=0.01)
    assert [started.request_id for started in events.started] == [2]
    assert served(plan) == {1: 12, 2: 20}


def test_long_prompt_keeps_a_share_that_grows_while_short_ones_keep_coming():
    scheduler = make_scheduler(
        num_blocks=256, max_model_len=512, max_num_batched_tokens=40, max_num_seqs=40, max_waiting=500,
        policies=PolicyConfig(chunks="fixed"),
    )  # fmt: skip
    runner = make_runner(scheduler)
    scheduler.add(make_request(0, 300, max_tokens=2))
    shares = []
    for index in range(1, 300):
        if 0 not in served(scheduler_step := step(scheduler, runner, elapsed_s=4.0)[0]):
            break
        if scheduler_step.num_computed[0] == 298:
            break
        shares.append(served(scheduler_step)[0])
        for sample in range(4):
            scheduler.add(make_request(4 * index + sample, 20, max_tokens=1))
    assert shares[0] == 40
    assert min(shares[1:-1]) >= 8
    assert shares[-3] > shares[1]


def test_first_come_first_served_lets_nobody_pass():
    lanes = OneLane()
    assert not lanes.is_long(10**6)
    assert lanes.long_share(100, 0.0) == 100
    assert not lanes.may_overtake(0.0)


def test_share_of_long_prompts():
    lanes = TwoLanes(long_tokens=100)
    assert (lanes.is_long(100), lanes.is_long(101)) == (False, True)
    assert [lanes.long_share(100, age_s) for age_s in (0.0, 30.0, 60.0, 1000.0)] == [25, 50, 75, 75]
    assert (lanes.may_overtake(0.0), lanes.may_overtake(100.0)) == (True, False)


# Admission


def test_room_that_each_admission_plans():
    request = make_request(1, 100, max_tokens=50)
    assert FirstChunkAdmission().planned_tokens(request, 32) == 32
    assert ReserveAllAdmission().planned_tokens(request, 32) == 150
    forecast = ForecastAdmission(quantile=0.5, over_commit=1.0, block_size=16)
    assert forecast.planned_tokens(request, 32) == 150
    for length in [4] * 100 + [40] * 40:
        forecast.observe(length)
    assert forecast.planned_tokens(request, 32) == 116
    request.token_ids = np.zeros(130, dtype=np.int32)
    assert forecast.planned_tokens(request, 32) == 146
    request.token_ids = np.zeros(140, dtype=np.int32)
    assert forecast.planned_tokens(request, 32) == 150


def test_forecast_lets_in_what_likely_fits_and_reserving_what_surely_does():
    def running(admission, over_commit=1.0):
        scheduler = make_scheduler(
            num_blocks=20,
            policies=PolicyConfig(admission=admission, over_commit=over_commit, forecast_quantile=0.5),
        )
        for _ in range(200):
            scheduler._policies.admission.observe(4)
        scheduler.add(*(make_request(request_id, 4, max_tokens=60) for request_id in range(8)))
        scheduler.schedule()
        return scheduler.stats().num_running

    assert running("reserve") == 1
    # A block of prompt, one of answer, and nothing for longer answers.
    assert running("forecast") == 4
    assert running("first-chunk") == 4
    assert running("forecast", over_commit=1.5) == 4


# Victims


def candidates(*rows):
    priority, exclusive, recompute, remaining = (np.array(column) for column in zip(*rows, strict=True))
    return Candidates(priority, exclusive, recompute, remaining)


def test_youngest_of_the_lowest_priority_goes():
    rows = candidates((1, 1, 1, 99), (0, 1, 1, 99), (0, 1, 1, 99), (2, 1, 1, 99))
    assert YoungestFirst().choose(rows, 1) == 2


def test_least_recompute_per_useful_block_goes():
    # 160 tokens for 10 blocks, 16 for 1, 48 for 3.
    rows = candidates((0, 10, 160, 99), (0, 1, 16, 99), (0, 3, 48, 99))
    assert CheapestFirst().choose(rows, 1) == 1
    rows = candidates((0, 10, 160, 99), (0, 1, 40, 99), (0, 3, 90, 99))
    assert CheapestFirst().choose(rows, 10) == 0


def test_rows_that_free_nothing_or_are_about_to_end_go_last():
    assert CheapestFirst().choose(candidates((0, 0, 0, 99), (0, 5, 80, 99)), 1) == 1
    assert CheapestFirst().choose(candidates((0, 5, 10, 3), (0, 5, 80, 99)), 1) == 1
    assert CheapestFirst().choose(candidates((0, 5, 10, 3), (1, 5, 80, 99)), 1) == 0


def test_first_request_of_the_highest_priority_is_never_displaced():
    scheduler = make_scheduler(num_blocks=8, policies=CARELESS, max_num_seqs=3)
    runner = make_runner(scheduler)
    scheduler.add(make_request(1, 4, max_tokens=28), make_request(2, 4, max_tokens=28, priority=1))
    rows = []
    while scheduler.has_work:
        rows.append(served(step(scheduler, runner)[0]).keys())
    assert scheduler.stats().preemptions_total >= 1
    assert all(2 in ids for ids in rows[:28])


# Configuration


@pytest.mark.parametrize(
    "wrong",
    [{"chunks": "big"}, {"lanes": "three"}, {"admission": "all"}, {"victims": "oldest"},
     {"itl_target_s": 0.0}, {"over_commit": 0.5}, {"forecast_quantile": float("nan")}],
)  # fmt: skip
def test_policies_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ConfigError):
        PolicyConfig(**wrong)
