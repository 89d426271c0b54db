"""What choosing a token costs per row on the host: `python -m tests.bench.sampling`.

Rows of made-up logits, as peaked as those of a language model, under each parameter that the host has to
see to; and masks of a JSON schema over the default model's vocabulary. Times are those that this process
had the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rung.config import cache_dir
from rung.grammar.compiler import GrammarCompiler
from rung.grammar.states import GrammarStates
from rung.hub import resolve
from rung.models.loader import open_model
from rung.request import Request, SamplingParams, StoppingParams
from rung.sampling.rules import BadWords, TokenRules
from rung.sampling.sampler import sample
from rung.scheduler.batch import RuledRow, SamplingColumns
from tests.bench.host import cpu_name, load_average

ROWS = (1, 16, 64)
REPEATS = 7
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ANSWER = '{"name": "Ada Lovelace, Countess", "age": 36, "tags": ["mathematics", "poetry", "engines"]}'


def columns(num_rows: int, **changes: float) -> SamplingColumns:
    """Rows that draw at temperature 0.8, and what else is named."""
    values = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0} | changes
    return SamplingColumns(
        temperature=np.full(num_rows, values["temperature"], dtype=np.float32),
        top_k=np.full(num_rows, values["top_k"], dtype=np.int32),
        top_p=np.full(num_rows, values["top_p"], dtype=np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
        sample_index=np.zeros(num_rows, dtype=np.int32),
        position=np.arange(num_rows),
        top_logprobs=np.full(num_rows, -1, dtype=np.int32),
        min_p=np.full(num_rows, values["min_p"], dtype=np.float32),
        typical_p=np.full(num_rows, values["typical_p"], dtype=np.float32),
    )


def median_us(action: Callable[[], object]) -> float:
    """Processor time of all threads, in us."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time_ns()
        action()
        times.append((time.process_time_ns() - start) / 1e3)
    return float(np.median(times))


def kinds(num_rows: int, vocab_size: int) -> dict[str, SamplingColumns]:
    """What rows may ask for, each alone."""
    rng = np.random.default_rng(0)
    penalties = TokenRules(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2)
    words = BadWords([rng.integers(0, vocab_size, 3).astype(np.int32) for _ in range(64)])

    def ruled(rules: TokenRules) -> tuple[RuledRow, ...]:
        prompt = np.unique(rng.integers(0, vocab_size, 2000).astype(np.int32))
        answer = rng.integers(0, vocab_size, 500).astype(np.int32)
        return tuple(RuledRow(index, rules, prompt, answer) for index in range(num_rows))

    greedy = columns(num_rows, temperature=0.0)
    return {
        "greedy": greedy,
        "temperature": columns(num_rows),
        "top_k 50, top_p 0.95": columns(num_rows, top_k=50, top_p=0.95),
        "top_p 0.95": columns(num_rows, top_p=0.95),
        "min_p 0.05": columns(num_rows, min_p=0.05),
        "typical_p 0.9": columns(num_rows, typical_p=0.9),
        "greedy, penalties": replace(greedy, ruled=ruled(penalties)),
        "greedy, 64 bad words": replace(greedy, ruled=ruled(TokenRules(bad_words=words))),
    }


def mask_us(compiler: GrammarCompiler, answer_ids: list[int], num_rows: int) -> tuple[float, float]:
    """Median and largest processor time of a row's mask on the way through an answer."""
    states = GrammarStates(compiler.vocab_size)
    grammar = compiler.compile(json.dumps({"grammars": [{"json_schema": PERSON}]}))
    prompt = np.ones(1, dtype=np.int32)
    states.add(
        (Request(row, prompt, SamplingParams(), StoppingParams(64)) for row in range(num_rows)), grammar
    )
    # All of a plan that states look at.
    plan: Any = SimpleNamespace(sample_rows=np.arange(num_rows), request_ids=np.arange(num_rows))
    times = []
    for place, token in enumerate(answer_ids):
        plan.sampling = replace(columns(num_rows), position=np.full(num_rows, 1 + place))
        start = time.process_time_ns()
        assert not states.masks(plan).failed
        times.append((time.process_time_ns() - start) / 1e3 / num_rows)
        states.take_tokens(plan, [token] * num_rows)
    return float(np.median(times)), max(times)


def main() -> None:
    """Prints both tables."""
    model = open_model(resolve("smollm2", cache_dir())).metadata
    vocab_size = model.config.vocab_size
    print(
        f"{cpu_name()}, load {load_average():.1f}; vocabulary of {vocab_size}; us of processor time per row"
    )
    print(f"{'':28}" + "".join(f"{rows:>8} rows" for rows in ROWS))
    tables = {rows: kinds(rows, vocab_size) for rows in ROWS}
    rng = np.random.default_rng(1)
    # About as peaked as a model's: a long tail below a few likely ids.
    logits = {rows: (8 - 4 * rng.gumbel(size=(rows, vocab_size))).astype(np.float32) for rows in ROWS}
    for name in tables[ROWS[0]]:
        costs = [median_us(partial(sample, logits[rows], tables[rows][name])) / rows for rows in ROWS]
        print(f"{name:28}" + "".join(f"{cost:>13.0f}" for cost in costs))
    tokenizer_json = model.tokenizer.files["tokenizer.json"].decode()
    compiler = GrammarCompiler(tokenizer_json, vocab_size, model.tokenizer.eos_token_ids)
    answer_ids = Tokenizer.from_str(tokenizer_json).encode(ANSWER).ids
    masks = [mask_us(compiler, answer_ids, rows) for rows in ROWS]
    print(f"{'mask of a schema, median':28}" + "".join(f"{median:>13.0f}" for median, _ in masks))
    print(f"{'mask of a schema, largest':28}" + "".join(f"{largest:>13.0f}" for _, largest in masks))


if __name__ == "__main__":
    main()
