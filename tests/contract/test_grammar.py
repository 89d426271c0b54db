"""Frontend and engine agree on grammars: one version of the library, one set of limits, and the same
answers and masks on a corpus that both compile."""

from __future__ import annotations

import importlib.metadata
import json
import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from rung.grammar import compiler as limits
from tests.grammar_files import EOS, VOCAB_SIZE, byte_compiler

ROOT = Path(__file__).parents[2]
CORPUS = json.loads((Path(__file__).parent / "grammar_corpus.json").read_text(encoding="utf-8"))
USABLE = [case for case in CORPUS if "error" not in case]
SNAPSHOT = ROOT / "frontend/tests/snapshots/grammar__grammar_corpus.snap"
COMPILED = {
    case["name"]: case
    for case in json.loads(SNAPSHOT.read_text(encoding="utf-8").split("\n---\n", maxsplit=1)[1])
}


def test_both_sides_have_one_version_of_the_library() -> None:
    locked = re.search(
        r'name = "llguidance"\nversion = "([^"]+)"', (ROOT / "Cargo.lock").read_text(encoding="utf-8")
    )
    assert locked is not None
    assert importlib.metadata.version("llguidance") == locked[1]


def test_both_sides_have_the_same_limits() -> None:
    source = (ROOT / "frontend/src/grammar/limits.rs").read_text(encoding="utf-8")
    frontend = {
        name: int(value.replace("_", ""))
        for name, value in re.findall(r"const (\w+): \w+ = ([\d_]+);", source)
    }
    assert len(frontend) == 6
    assert frontend == {name: getattr(limits, name) for name in frontend}


def test_the_snapshot_is_of_this_corpus() -> None:
    assert set(COMPILED) == {case["name"] for case in USABLE}


def follow(grammar: str, text: str) -> tuple[bool, str]:
    """Whether the grammar takes the whole text, and the hash of all masks on the way to its end."""
    matcher = byte_compiler().compile(grammar).start()
    masks = sha256()
    mask = allocate_token_bitmask(1, VOCAB_SIZE)
    for byte in text.encode():
        fill_next_token_bitmask(matcher, mask)
        masks.update(mask.astype("<i4").tobytes())
        if not matcher.consume_token(byte):
            return False, ""
    return matcher.is_accepting(), masks.hexdigest()


@pytest.mark.parametrize(
    "case", [case for case in CORPUS if "error" not in case], ids=lambda case: case["name"]
)
def test_what_the_frontend_compiled_accepts_and_masks_the_same_here(case: dict[str, object]) -> None:
    compiled = COMPILED[case["name"]]
    accepts, rejects = case["accepts"], case["rejects"]
    assert isinstance(accepts, list)
    assert isinstance(rejects, list)
    for text, masks in zip(accepts, compiled["masks"], strict=True):
        assert follow(compiled["grammar"], text) == (True, masks), text
    for text in rejects:
        assert not follow(compiled["grammar"], text)[0], text


def test_an_answer_may_end_exactly_where_its_grammar_may() -> None:
    matcher = byte_compiler().compile(COMPILED["choice"]["grammar"]).start()
    mask = allocate_token_bitmask(1, VOCAB_SIZE)
    ends = []
    for byte in b"yes, but":
        fill_next_token_bitmask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        ends.append(bool(bits[EOS]))
        assert matcher.consume_token(byte)
    assert ends == [False, False, False, True, False, False, False, False]
    fill_next_token_bitmask(matcher, mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [EOS]
