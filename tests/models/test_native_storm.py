"""A storm on the default model: requests come and are aborted at random among forty others, prompts are
cut, prefixes are found, samples fork, blocks run out, and each answer is bit for bit that of the request
alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rung.models.loader import OpenModel
from rung.request import Request, SamplingParams, StoppingParams
from rung.runner.native import NativeRunner
from rung.scheduler import Scheduler, SchedulerConfig
from rung.scheduler.policies import PolicyConfig

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/smollm2_q4_1.json").read_text(encoding="utf-8"))
PROMPTS: dict[str, list[int]] = {prompt["name"]: prompt["prompt_ids"] for prompt in GOLDEN["prompts"]}
NAMES = ["single_token", "python", "chinese", "emoji", "speech"]
NUM_OTHERS = 40
MAX_TOKENS = 20
NUM_BLOCKS = 28

Row = tuple[int, bytes]


def make_request(request_id: int, prompt: list[int], *, seed: int | None, group: int = -1) -> Request:
    sampling = SamplingParams(
        temperature=0.0 if seed is None else 1.0, seed=seed or 0, top_logprobs=2, sample_index=request_id % 3
    )
    ids = np.array(prompt, dtype=np.int32)
    return Request(request_id, ids, sampling, StoppingParams(MAX_TOKENS), group_id=group)


class Play:
    """One scheduler, and what each request got."""

    def __init__(self, runner: NativeRunner, budget: int) -> None:
        self.runner = runner
        self.answers: dict[int, list[Row]] = {}
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=NUM_BLOCKS,
                max_num_seqs=12,
                max_num_batched_tokens=budget,
                max_waiting=64,
                max_model_len=NUM_BLOCKS * 16,
                policies=PolicyConfig(admission="first-chunk"),
            )
        )

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            return
        self.runner.forward(plan)
        events = self.scheduler.commit(plan, self.runner.sample(plan), elapsed_s=0.01)
        for index, (request_id, token) in enumerate(
            zip(events.request_ids.tolist(), events.token_ids.tolist(), strict=True)
        ):
            row = events.logprobs[index]
            bits = np.float32(row.chosen).tobytes() + row.top_ids.tobytes() + row.top_logprobs.tobytes()
            self.answers.setdefault(request_id, []).append((token, bits))

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check_integrity()


def test_answers_in_a_storm_are_those_alone(smollm2: OpenModel) -> None:
    runner = NativeRunner(
        smollm2.metadata.config, smollm2.weights, num_blocks=NUM_BLOCKS, block_size=16, poison_freed=True
    )
    seeds = {name: index if index % 2 else None for index, name in enumerate(NAMES)}
    alone = {}
    for index, name in enumerate(NAMES):
        play = Play(runner, budget=512)
        play.scheduler.add(make_request(index, PROMPTS[name], seed=seeds[name]))
        play.finish()
        alone[name] = play.answers[index]
    rng = np.random.default_rng(7)
    play = Play(runner, budget=48)
    names = sorted(PROMPTS)
    due = list(enumerate(NAMES))
    rng.shuffle(due)
    for other in range(NUM_OTHERS):
        # Others that begin like the ones that are watched, and samples of one prompt.
        prompt = PROMPTS[names[rng.integers(len(names))] if rng.random() < 0.6 else NAMES[rng.integers(5)]]
        cut = prompt[: int(rng.integers(1, min(len(prompt), 120) + 1))]
        ids = [100 + 3 * other + sample for sample in range(3 if rng.random() < 0.3 else 1)]
        play.scheduler.add(*(make_request(id_, cut, seed=other, group=ids[0]) for id_ in ids))
        if due and other % 6 == 1:
            index, name = due.pop()
            play.scheduler.add(make_request(index, PROMPTS[name], seed=seeds[name]))
        for _ in range(int(rng.integers(0, 4))):
            play.step()
        if rng.random() < 0.4:
            play.scheduler.abort(int(rng.integers(100, 103 + 3 * other)))
    play.finish()
    stats = play.scheduler.stats()
    assert not due
    assert stats.preemptions_total > 0
    assert stats.cached_tokens_total > 0
    for index, name in enumerate(NAMES):
        assert play.answers[index] == alone[name], name
