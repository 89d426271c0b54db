"""The real scheduler on the fake runner under any order of requests, aborts, failures and steps.

Prompts begin alike, so that prefixes are found, and samples of one prompt share it. Two schedulers
get the same calls, so that their plans can be compared. The requests are those of two frontends.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rung.errors import ErrorCode, RequestError
from rung.request import Finished, FinishReason, Request
from rung.scheduler.batch import StepEvents, StepOutput, StepPlan
from rung.scheduler.policies import ADMISSIONS, CHUNKS, LANES, VICTIMS, PolicyConfig
from tests.scheduling import (
    VOCAB_SIZE,
    Answers,
    alone,
    assert_same,
    make_request,
    make_runner,
    make_scheduler,
)

if TYPE_CHECKING:
    from rung.runner.protocol import PendingOutput

STEP_FAILED = RequestError(ErrorCode.INTERNAL, "The step failed.")
ROW_FAILED = RequestError(ErrorCode.NON_FINITE, "The row failed.")

SESSIONS = (1 << 32, 2 << 32)

token_ids = st.integers(0, VOCAB_SIZE - 1)


def prompt(length: int, family: int, tail: list[int]) -> list[int]:
    """Prompts of one family begin alike."""
    return [(family + 5 * position) % VOCAB_SIZE for position in range(length)] + tail


requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            prompt,
            st.integers(1, 8) | st.integers(16, 22),
            st.integers(0, 1),
            st.lists(token_ids, max_size=2),
        ),
        "max_tokens": st.integers(1, 4) | st.integers(16, 24),
        "min_tokens": st.integers(0, 8) | st.just(24),
        "stop": st.just(()) | st.sets(token_ids, max_size=12),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 3),
        "top_logprobs": st.sampled_from([None, 0, 2]),
        "salt": st.sampled_from([b"", b"", b"tenant"]),
        "deadline_s": st.none() | st.integers(0, 20),
        "priority": st.sampled_from([0, 0, 0, 7]),
    }
)


# More often than not such that rows which grow have to displace others.
policies = st.builds(
    PolicyConfig,
    chunks=st.sampled_from(CHUNKS),
    lanes=st.sampled_from(LANES),
    admission=st.sampled_from(["first-chunk", *ADMISSIONS]),
    victims=st.sampled_from(VICTIMS),
    itl_target_s=st.sampled_from([0.5, 2.0]),
    fixed_step_tokens=st.integers(6, 40),
    over_commit=st.sampled_from([1.0, 4.0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Pools in which the longest request just fits alone: rows that grow have to displace others."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.order: list[int] = []
        self.sampled: set[int] = set()
        self.launched: deque[tuple[StepPlan, StepPlan, PendingOutput]] = deque()
        self.answers = Answers()
        self.next_id = 0

    @initialize(
        num_blocks=st.integers(12, 16),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        max_waiting=st.integers(3, 12),
        prefix_cache=st.sampled_from([True, True, False]),
        policies=policies,
        depth=st.integers(1, 2),
    )
    def make(
        self,
        num_blocks: int,
        max_num_seqs: int,
        spare_budget: int,
        max_waiting: int,
        prefix_cache: bool,
        policies: PolicyConfig,
        depth: int,
    ) -> None:
        limits = {
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + spare_budget,
            "max_waiting": max_waiting,
            "max_model_len": 48,
            "prefix_cache": prefix_cache,
            "policies": policies,
            "depth": depth,
        }
        self.depth = depth
        self.scheduler, self.twin = make_scheduler(**limits), make_scheduler(**limits)
        self.runner = make_runner(self.scheduler)

    @rule(given=st.lists(requests, min_size=1, max_size=3), session=st.sampled_from(SESSIONS))
    def add(self, given: list[dict[str, object]], session: int) -> None:
        self.add_all(given, session)

    @rule(given=requests, count=st.integers(2, 4), session=st.sampled_from(SESSIONS))
    def add_samples(self, given: dict[str, object], count: int, session: int) -> None:
        """Samples of one prompt, which differ in their index alone."""
        group = session + self.next_id
        self.add_all([{**given, "sample_index": index, "group": group} for index in range(count)], session)

    def add_all(self, given: list[dict[str, object]], session: int) -> None:
        ids = [session + self.next_id + index for index in range(len(given))]
        self.next_id += len(given)
        made, copies = (
            [make_request(request_id, **kwargs) for request_id, kwargs in zip(ids, given, strict=True)]
            for _ in range(2)
        )
        waiting = self.scheduler.stats().num_waiting
        try:
            self.scheduler.add(*made)
        except RequestError:
            assert waiting + len(made) > self.scheduler.config.max_waiting
            assert self.scheduler.stats().num_waiting == waiting
            return
        self.twin.add(*copies)
        self.accepted.update(zip(ids, made, strict=True))
        self.order += ids

    @rule(count=st.integers(1, 20))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.order)
    @rule(data=st.data(), count=st.integers(1, 3), when=st.sampled_from(["between steps", "within a step"]))
    def abort_some(self, data: st.DataObject, count: int, when: str) -> None:
        plan, twin_plan = self.plan() if when == "within a step" else (None, None)
        if plan is not None:
            self.runner.forward(plan)
        for _ in range(count):
            self.abort(data)
        if plan is not None:
            self.finish_turn(plan, twin_plan)
        else:
            self.deliver(self.scheduler.take_events(), self.twin.take_events())

    @rule(data=st.data(), what=st.sampled_from(["the step", "one row"]))
    def run_a_step_that_fails(self, data: st.DataObject, what: str) -> None:
        if not self.launched:
            self.launch()
        if not self.launched:
            return
        plan, twin_plan, pending = self.launched.popleft()
        if what == "one row":
            row = data.draw(st.integers(0, plan.num_rows - 1))
            self.land(plan, twin_plan, pending.wait(), failed={row: ROW_FAILED})
            return
        # Whatever the device did, nobody is to believe it.
        pending.wait()
        running = {id_ for id_ in plan.request_ids.tolist() if self.accepted[id_].row >= 0}
        live = self.accepted.keys() - self.answers.finished.keys()
        self.deliver(self.scheduler.fail(plan, STEP_FAILED, 1.0), self.twin.fail(twin_plan, STEP_FAILED, 1.0))
        ended = live & self.answers.finished.keys()
        assert {id_ for id_ in ended if id_ not in self.aborted and not self.is_overdue(id_)} <= running
        assert running <= ended

    def is_overdue(self, request_id: int) -> bool:
        error = self.answers.finished[request_id].error
        return error is not None and error.code is ErrorCode.DEADLINE

    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.order))
        self.scheduler.abort(request_id)
        self.twin.abort(request_id)
        if request_id in self.accepted and request_id not in self.answers.finished:
            self.aborted.add(request_id)

    def step(self) -> None:
        """What the engine loop does in a turn."""
        plan, twin_plan = self.plan()
        if plan is not None:
            self.runner.forward(plan)
            self.finish_turn(plan, twin_plan)
        elif self.launched:
            self.land_first()
        else:
            self.deliver(self.scheduler.take_events(), self.twin.take_events())

    def finish_turn(self, plan: StepPlan, twin_plan: StepPlan) -> None:
        while len(self.launched) > max(self.depth - 2, 0):
            self.land_first()
            plan, twin_plan = self.scheduler.refresh(plan), self.twin.refresh(twin_plan)
            assert_same(plan, twin_plan)
        self.launched.append((plan, twin_plan, self.runner.sample(plan)))
        while len(self.launched) >= self.depth:
            self.land_first()

    def launch(self) -> None:
        """Launch a step and leave it there."""
        plan, twin_plan = self.plan()
        if plan is None:
            self.deliver(self.scheduler.take_events(), self.twin.take_events())
            return
        self.runner.forward(plan)
        self.launched.append((plan, twin_plan, self.runner.sample(plan)))

    def land_first(self) -> None:
        plan, twin_plan, pending = self.launched.popleft()
        self.land(plan, twin_plan, pending.wait())

    def plan(self) -> tuple[StepPlan | None, StepPlan | None]:
        preemptions = self.scheduler.stats().preemptions_total
        waiting_before = {
            request_id
            for request_id, request in self.accepted.items()
            if request.row == -1 and request_id not in self.answers.finished
        }
        plan, twin_plan = self.scheduler.schedule(), self.twin.schedule()
        assert plan is not None or self.launched or not self.scheduler.has_work
        assert_same(plan, twin_plan)
        if plan is not None:
            self.check_plan(plan)
            if self.scheduler.stats().preemptions_total > preemptions:
                assert not waiting_before & set(plan.request_ids.tolist())
        return plan, twin_plan

    def check_plan(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert plan.num_rows <= self.scheduler.config.max_num_seqs
        assert (plan.query_lens >= 1).all()
        assert len(set(plan.rows.tolist())) == plan.num_rows
        # A row that has got a token gets its next one at once, whatever else waits, unless it waits for
        # blocks that a step in flight still uses.
        planned = set(plan.request_ids.tolist())
        if not self.launched:
            assert {id_ for id_ in self.sampled if self.accepted[id_].row >= 0} <= planned
        self.sampled = set(plan.request_ids[plan.sample_rows].tolist())

    def land(
        self,
        plan: StepPlan,
        twin_plan: StepPlan,
        output: StepOutput,
        failed: dict[int, RequestError] | None = None,
    ) -> None:
        output = StepOutput(output.token_ids, output.logprobs, {**output.failed, **(failed or {})})
        self.deliver(self.scheduler.commit(plan, output, 1.0), self.twin.commit(twin_plan, output, 1.0))

    def deliver(self, events: StepEvents, twin_events: StepEvents) -> None:
        assert_same(events, twin_events)
        self.answers.take(events)
        for index, request_id in enumerate(events.request_ids.tolist()):
            asked = self.accepted[request_id].sampling.top_logprobs
            assert (index in events.logprobs) == (asked is not None)
        for finished in events.finished:
            self.check_finished(finished)

    def check_finished(self, finished: Finished) -> None:
        request = self.accepted[finished.request_id]
        expected = alone(request)
        got = self.answers.tokens.get(finished.request_id, [])
        assert finished.num_output_tokens == len(got)
        assert finished.num_prompt_tokens == len(request.prompt_ids)
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == expected
            stopped = expected[-1] in request.stopping.stop_token_ids
            assert (finished.reason is FinishReason.STOP) == stopped
            assert finished.stop_token_id == (expected[-1] if stopped else None)
        else:
            assert got == expected[: len(got)]
            assert (finished.reason is FinishReason.CANCELLED) == (finished.error is None)
            assert finished.reason is FinishReason.ERROR or finished.request_id in self.aborted
            if self.is_overdue(finished.request_id):
                assert request.deadline_s is not None
                assert not got

    @invariant()
    def books_are_in_order(self) -> None:
        if self.accepted:
            self.scheduler.check_integrity()
            stats = self.scheduler.stats()
            live = len(self.accepted) - len(self.answers.finished)
            assert stats.num_running + stats.num_waiting <= live

    def teardown(self) -> None:
        """Whatever was accepted ends, in as many steps as its tokens at most."""
        if not self.accepted:
            return
        live = [request for id_, request in self.accepted.items() if id_ not in self.answers.finished]
        for _ in range(2 * sum(request.max_total_tokens for request in live) + 3):
            self.step()
            if not self.scheduler.has_work:
                break
            self.scheduler.check_integrity()
        assert self.answers.finished.keys() == self.accepted.keys()
        assert self.scheduler.stats().num_blocks_used == 0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
