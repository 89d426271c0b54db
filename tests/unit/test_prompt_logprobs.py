"""Logprobs of prompts through scheduler and outbox: each id once, in order, before the first token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.request import FinishReason, Request
from rung.runner.fake import expected_prompt_logprobs
from rung.sampling.logprobs import by_row, joined, score_targets
from rung.scheduler.batch import PromptColumns, PromptLogprobs, StepEvents
from rung.scheduler.table import StateTable
from rung.server import convert
from rung.server.gen import step_pb2
from rung.server.outbox import NO_STEP, Outbox, Publisher, request_id
from rung.server.prompts import MAX_BATCH_VALUES, batches
from tests.scheduling import (
    CARELESS,
    VOCAB_SIZE,
    Answers,
    alone,
    make_request,
    make_runner,
    make_scheduler,
    step,
)


def asking(request: Request, top: int = 2) -> Request:
    return Request(
        request.request_id,
        request.prompt_ids,
        replace(request.sampling, prompt_top_logprobs=top),
        request.stopping,
    )


def run(requests: list[Request], **limits: int) -> tuple[dict[int, list[tuple[float, int]]], Answers, int]:
    """Everything that the requests are told, checked for order; and the number of preemptions."""
    scheduler = make_scheduler(policies=CARELESS, **limits)
    runner = make_runner(scheduler)
    scheduler.add(*requests)
    told: dict[int, list[tuple[float, int]]] = {}
    answers = Answers()
    while scheduler.has_work:
        _, events = step(scheduler, runner)
        for request, part in events.prompts:
            assert request not in answers.tokens, "prompts come before the first token"
            told.setdefault(request, []).extend(zip(part.chosen.tolist(), part.ranks.tolist(), strict=True))
            assert part.top_ids.shape == part.top_logprobs.shape == (len(part.chosen), 2)
        answers.take(events)
    return told, answers, scheduler.stats().preemptions_total


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 17, 31])
@pytest.mark.parametrize("budget", [8, 9, 64])
def test_a_prompt_is_told_whole_whatever_its_chunks(length: int, budget: int) -> None:
    request = asking(make_request(0, length))
    told, answers, _ = run([request], max_num_batched_tokens=budget)
    assert told.get(0, []) == expected_prompt_logprobs(request.prompt_ids.tolist(), VOCAB_SIZE)
    assert answers.tokens[0] == alone(request)


def test_preempted_prompts_are_told_once_and_others_nothing() -> None:
    requests = [
        asking(request) if request.request_id % 2 else request
        for request in (make_request(index, 4 + index, max_tokens=20) for index in range(10))
    ]
    told, answers, preemptions = run(requests, num_blocks=20, max_num_batched_tokens=8)
    assert preemptions > 0
    assert sorted(told) == [1, 3, 5, 7, 9]
    for request in requests:
        index = request.request_id
        if index % 2:
            assert told[index] == expected_prompt_logprobs(request.prompt_ids.tolist(), VOCAB_SIZE)
        assert answers.tokens[index] == alone(request)


def test_a_prompt_that_is_computed_again_is_told_on_from_where_it_was() -> None:
    table = StateTable(max_num_seqs=2, max_model_len=32, num_blocks=8, block_size=4)
    request = asking(make_request(1, range(10, 20)), top=3)
    request.num_scored = 4
    table.enter(1, request, num_stored=0, num_named=0)
    rows = np.array([1], dtype=np.int32)

    def told(num_computed: int, length: int) -> tuple[list[int], list[int]]:
        table.num_computed[1] = num_computed
        lens = np.array([length], dtype=np.int32)
        columns = table.prompt_columns(rows, lens, np.array([0, length], dtype=np.int32))
        if columns is None:
            return [], []
        assert (columns.rows.tolist(), columns.num_top.tolist()) == ([0], [3])
        assert columns.counts.tolist() == [len(columns.tokens)]
        return columns.tokens.tolist(), columns.target_ids.tolist()

    assert told(0, 4) == ([], []), "ids 1 to 4 are known"
    assert told(0, 6) == ([4, 5], [15, 16])
    assert told(4, 3) == ([0, 1, 2], [15, 16, 17])
    assert told(6, 4) == ([0, 1, 2], [17, 18, 19]), "nothing follows the last id"
    assert table.add_scored(1, 5) == 9
    assert told(0, 10) == ([], [])


def test_the_prompt_of_an_aborted_or_failed_request_is_not_told() -> None:
    scheduler = make_scheduler()
    runner = make_runner(scheduler)
    scheduler.add(asking(make_request(0, 6)), asking(make_request(1, 6)))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort(0)
    runner.forward(plan)
    events = scheduler.commit(plan, runner.sample(plan), 1.0)
    assert [request for request, _ in events.prompts] == [1]
    assert [end.reason for end in events.finished] == [FinishReason.CANCELLED]


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 4), st.integers(0, 2**32))
def test_scores_are_those_of_a_full_sort(rows: int, vocab_size: int, top: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.integers(-3, 3, (rows, vocab_size)).astype(np.float32)
    targets = generator.integers(0, vocab_size, rows).astype(np.int32)
    num_top = np.full(rows, top, dtype=np.int32)
    cut = rows // 2
    parts = [score_targets(logits[i], targets[i], num_top[i]) for i in (slice(cut), slice(cut, None))]
    scored = joined(parts)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    columns = PromptColumns(
        np.array([4], np.int32),
        np.array([rows], np.int32),
        num_top[:1],
        np.arange(rows, dtype=np.int32),
        targets,
    )
    (found,), failed = by_row(columns, scored, vocab_size)[0].values(), by_row(columns, scored, vocab_size)[1]
    assert failed == {}
    for index in range(rows):
        order = sorted(range(vocab_size), key=lambda token: (-logits[index, token], token))
        assert found.ranks[index] == order.index(targets[index]) + 1
        assert found.chosen[index] == pytest.approx(exact[index, targets[index]], abs=1e-6)
        assert found.top_ids[index].tolist() == order[:top]
        assert found.top_logprobs[index] == pytest.approx(exact[index, order[:top]], abs=1e-6)


def test_a_prompt_that_is_not_finite_fails_alone() -> None:
    logits = np.zeros((5, 7), dtype=np.float32)
    logits[1, 3] = np.nan
    targets = np.array([1, 2, 3, 4, 5], dtype=np.int32)
    columns = PromptColumns(
        rows=np.array([2, 6], dtype=np.int32),
        counts=np.array([3, 2], dtype=np.int32),
        num_top=np.array([20, 1], dtype=np.int32),
        tokens=np.arange(5, dtype=np.int32),
        target_ids=targets,
    )
    scored = score_targets(logits, targets, np.repeat(columns.num_top, columns.counts))
    found, failed = by_row(columns, scored, 7)
    assert list(failed) == [2]
    assert found[6].top_ids.tolist() == [[0], [0]]
    assert found[6].ranks.tolist() == [5, 6]


def part(*values: float, top: int = 1) -> PromptLogprobs:
    column = np.array(values, dtype=np.float32)
    ids = np.repeat(column[:, None].astype(np.int32), top, axis=1)
    return PromptLogprobs(-column, column.astype(np.int32), ids, -ids.astype(np.float32))


def test_parts_of_one_row_are_joined_and_sessions_kept_apart() -> None:
    publisher = Publisher()
    boxes = {session: Outbox(lambda: None) for session in (1, 2)}
    for session, box in boxes.items():
        publisher.add(session, box)
    none = np.empty(0, dtype=np.int64)
    for parts in (
        ((request_id(1, 7), part(1, 2)), (request_id(2, 7), part(9, top=0))),
        ((request_id(1, 8), part(5)), (request_id(1, 7), part(3))),
    ):
        publisher.publish(StepEvents(none, none.astype(np.int32), {}, (), (), parts), NO_STEP)
    (batch,) = boxes[1].take().prompts
    step = step_pb2.Step()
    convert.prompt_columns(batch, step)
    columns = step.prompt_logprobs
    assert np.frombuffer(columns.handles, "<u4").tolist() == [7, 8]
    assert np.frombuffer(columns.counts, "<u4").tolist() == [3, 1]
    assert np.frombuffer(columns.chosen, "<f4").tolist() == [-1, -2, -3, -5]
    assert np.frombuffer(columns.ranks, "<u4").tolist() == [1, 2, 3, 5]
    assert np.frombuffer(columns.top_counts, "<u4").tolist() == [1, 1, 1, 1]
    assert np.frombuffer(columns.top_ids, "<u4").tolist() == [1, 2, 3, 5]
    assert np.frombuffer(columns.top_logprobs, "<f4").tolist() == [-1, -2, -3, -5]
    (other,) = boxes[2].take().prompts
    assert (other.handles.tolist(), other.top_counts.tolist(), len(other.top_ids)) == ([7], [0], 0)
    assert boxes[1].take().prompts == ()


def test_long_prompts_are_cut_into_batches_in_order() -> None:
    size = MAX_BATCH_VALUES // 10
    parts = [(handle, part(*range(size // 5))) for handle in (1, 2, 1, 1, 2, 2, 1, 1, 2, 2, 1, 3)] * 2
    made = batches(parts)
    assert len(made) > 1
    assert all(3 * len(b.chosen) + 2 * len(b.top_ids) <= MAX_BATCH_VALUES for b in made)
    told = {handle: sum(int(b.counts[b.handles == handle].sum()) for b in made) for handle in (1, 2, 3)}
    assert told == {1: 12 * (size // 5), 2: 10 * (size // 5), 3: 2 * (size // 5)}
    assert batches([]) == ()
