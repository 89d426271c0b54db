"""Rules on single ids through chunked prefill and preemption: the answer is that of the request alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rung.request import Request
from rung.runner.fake import expected_tokens
from tests.sampling_oracle import PlainRules, edit
from tests.scheduling import CARELESS, VOCAB_SIZE, make_request, make_runner, make_scheduler, run_all

NUM_TOKENS = 24
RULES = [
    None,
    PlainRules(repetition_penalty=2.0),
    PlainRules(frequency_penalty=1.5, presence_penalty=0.5),
    PlainRules(bias={3: 9.0, 40: 8.5}),
    PlainRules(allowed_ids=(1, 5, 9, 13), presence_penalty=1.0),
    PlainRules(allowed_ids=(1, 5), bad_words=((1, 1), (5, 5, 1))),
]


def best_from(token: int, rules: PlainRules, prompt: list[int], answer: list[int]) -> int:
    """The fake runner's choice by the oracle: logits fall from `token` on, ties go to who comes first."""
    logits = [8.0 - 0.25 * ((other - token) % VOCAB_SIZE) for other in range(VOCAB_SIZE)]
    edited = edit(logits, rules, prompt, answer)
    return max(range(VOCAB_SIZE), key=lambda other: (edited[other], -((other - token) % VOCAB_SIZE)))


def with_rules(request: Request, rules: PlainRules | None) -> Request:
    built = None if rules is None else rules.built()
    return Request(
        request.request_id, request.prompt_ids, replace(request.sampling, rules=built), request.stopping
    )


def test_a_storm_of_rules_gives_each_request_its_own_answer() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=9, policies=CARELESS)
    requests = [
        with_rules(make_request(index, 5 + index, max_tokens=NUM_TOKENS), RULES[index % len(RULES)])
        for index in range(12)
    ]
    scheduler.add(*requests)
    answers = run_all(scheduler, make_runner(scheduler))
    assert scheduler.stats().preemptions_total > 0
    mattered = set()
    for index, request in enumerate(requests):
        rules, prompt = RULES[index % len(RULES)], request.prompt_ids.tolist()

        def choose(
            token: int, answer: list[int], rules: PlainRules | None = rules, prompt: list[int] = prompt
        ) -> int:
            return token if rules is None else best_from(token, rules, prompt, answer)

        alone = expected_tokens(prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE, choose=choose)
        assert answers.tokens[index] == alone
        if alone != expected_tokens(prompt, NUM_TOKENS, vocab_size=VOCAB_SIZE):
            mattered.add(index % len(RULES))
    assert mattered == {1, 2, 3, 4, 5}, "each kind of rule changed some answer"


def test_a_plan_says_what_the_rules_of_its_rows_need_and_no_more() -> None:
    scheduler = make_scheduler()
    scheduler.add(*(with_rules(make_request(index, [4, 2, 4]), rules) for index, rules in enumerate(RULES)))
    runner = make_runner(scheduler)
    run = []
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        runner.forward(plan)
        run.append(runner.sample(plan).token_ids)
        scheduler.commit(plan, runner.sample(plan), 0.0)
    ruled = {row.index: row for row in plan.sampling.ruled}
    assert sorted(ruled) == [1, 2, 3, 4, 5]
    assert ruled[1].prompt_ids.tolist() == [2, 4]
    assert ruled[1].answer_ids.tolist() == [run[0][1]]
    assert ruled[2].prompt_ids.tolist() == []
    assert ruled[2].answer_ids.tolist() == [run[0][2]]
    assert ruled[3].answer_ids.tolist() == []
    assert np.array_equal(plan.sampling.edited_rows(), [1, 2, 3, 4, 5])
