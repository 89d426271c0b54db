"""Names of blocks: what makes two of them the same, and what must not."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rung.kv.hashing import BlockHasher

TOKENS = np.arange(12, dtype=np.int32)


def names(tokens=TOKENS, *, key=b"k", salt=b"", adapter=b""):
    hasher = BlockHasher(key, 4)
    return hasher.extend(hasher.root(salt, adapter), tokens)


def test_a_chain_may_be_named_in_one_go_or_block_by_block():
    hasher = BlockHasher(b"k", 4)
    parent, one_by_one = hasher.root(b""), []
    for start in range(0, 12, 4):
        one_by_one += hasher.extend(parent, TOKENS[start : start + 4])
        parent = one_by_one[-1]
    assert one_by_one == names()
    assert len(set(one_by_one)) == 3


def test_names_are_what_blake2b_makes_of_typed_and_measured_parts():
    def part(kind, content):
        return kind + len(content).to_bytes(8, "little") + content

    root = blake2b(b"R" + part(b"S", b"salt") + part(b"A", b"lora"), digest_size=16, key=b"k").digest()
    first = blake2b(root + part(b"B", TOKENS[:4].tobytes()), digest_size=16, key=b"k").digest()
    assert names(salt=b"salt", adapter=b"lora")[0] == first


def test_b79_a_salt_is_never_an_adapter():
    assert names(salt=b"lora-a") != names(adapter=b"lora-a")
    assert names(salt=b"a", adapter=b"b") != names(salt=b"ab") != names(salt=b"", adapter=b"ab")


def test_another_key_gives_other_names():
    assert not set(names(key=b"one")) & set(names(key=b"two"))


@given(st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=20))
def test_roots_agree_only_when_both_parts_do(salt, adapter, other_salt, other_adapter):
    hasher = BlockHasher(b"", 4)
    same = (salt, adapter) == (other_salt, other_adapter)
    assert (hasher.root(salt, adapter) == hasher.root(other_salt, other_adapter)) == same


@given(
    st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8)
)
def test_a_name_covers_everything_before_it(one, other):
    first, second = (names(np.array(tokens, dtype=np.int32)) for tokens in (one, other))
    assert (first[0] == second[0]) == (one[:4] == other[:4])
    assert (first[1] == second[1]) == (one == other)
