"""The KV plan and what memory this process may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import ConfigError
from rung.server.memory import BLOCK_SIZE, available_bytes, human_bytes, plan_kv

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def test_a_small_model_gets_what_all_its_sequences_need() -> None:
    plan = plan_kv(
        model_context=100, max_model_len=None, max_num_seqs=4, kv_cache_bytes=None, bytes_per_block=1000,
        free_bytes=8 * GIB,
    )  # fmt: skip
    assert (plan.num_blocks, plan.max_model_len, plan.reduced_from) == (4 * 7, 100, None)
    assert (plan.kv_bytes, plan.num_tokens) == (28_000, 28 * BLOCK_SIZE)


@pytest.mark.parametrize(("free_bytes", "kv_bytes"), [(64 * GIB, 2 * GIB), (4 * GIB, GIB)])
def test_the_automatic_size_is_bounded(free_bytes: int, kv_bytes: int) -> None:
    plan = plan_kv(
        model_context=8192, max_model_len=None, max_num_seqs=64, kv_cache_bytes=None, bytes_per_block=1 << 20,
        free_bytes=free_bytes,
    )  # fmt: skip
    assert plan.kv_bytes == kv_bytes


def test_a_context_that_does_not_fit_is_reduced_and_said() -> None:
    plan = plan_kv(
        model_context=8192, max_model_len=None, max_num_seqs=1, kv_cache_bytes=10_000, bytes_per_block=1000,
        free_bytes=GIB,
    )  # fmt: skip
    assert (plan.max_model_len, plan.reduced_from) == (160, 8192)


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"max_model_len": 9000}, "made for 8192"),
        ({"max_model_len": 400, "kv_cache_bytes": 10_000}, "--max-model-len 160 or less"),
        ({"max_model_len": 400, "kv_cache_bytes": 10_000}, "--kv-cache-memory 25000 or more"),
        ({"kv_cache_bytes": 999}, "not one block"),
        ({"kv_cache_bytes": 2 * GIB}, "give less"),
    ],
)
def test_wishes_that_do_not_fit_say_what_would(wishes: dict[str, int], said: str) -> None:
    arguments: dict[str, int | None] = {"max_model_len": None, "kv_cache_bytes": None, **wishes}
    with pytest.raises(ConfigError) as raised:
        plan_kv(
            model_context=8192, max_num_seqs=4, bytes_per_block=1000, free_bytes=GIB, **arguments  # type: ignore[arg-type]
        )  # fmt: skip
    assert said in str(raised.value)


@given(
    st.integers(2, 1 << 20), st.none() | st.integers(2, 1 << 20), st.integers(1, 512),
    st.none() | st.integers(1, 1 << 40), st.integers(1, 1 << 24), st.integers(0, 1 << 42),
)  # fmt: skip
def test_one_sequence_always_fits(
    context: int, length: int | None, seqs: int, kv_bytes: int | None, block_bytes: int, free: int
) -> None:
    try:
        plan = plan_kv(
            model_context=context, max_model_len=length, max_num_seqs=seqs, kv_cache_bytes=kv_bytes,
            bytes_per_block=block_bytes, free_bytes=free,
        )  # fmt: skip
    except ConfigError:
        return
    assert 2 <= plan.max_model_len <= min(context, plan.num_tokens)
    assert plan.kv_bytes <= free
    assert length is None or plan.max_model_len == length
    if kv_bytes is not None:
        assert plan.kv_bytes <= kv_bytes


def machine(root: Path, available_kib: int, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def group(folder: Path, names: tuple[str, str], limit: str, usage: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    machine(tmp_path, 5, "0::/\n")
    assert available_bytes(tmp_path) == 5 * 1024


def test_the_tightest_group_above_us_decides(tmp_path: Path) -> None:
    machine(tmp_path, 1 << 20, "0::/pod/container\n")
    base = tmp_path / "sys/fs/cgroup"
    group(base / "pod/container", V2, "max", 10)
    group(base / "pod", V2, "10000", 9000, inactive=500)
    assert available_bytes(tmp_path) == 1500


def test_version_1_groups_count_too(tmp_path: Path) -> None:
    machine(tmp_path, 1 << 20, "3:cpu:/x\n4:hugetlb,memory:/x\n")
    group(tmp_path / "sys/fs/cgroup/memory/x", V1, "7000", 3000)
    assert available_bytes(tmp_path) == 4000


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, 1 << 20, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", V2, "100", 200)
    assert available_bytes(tmp_path) == 0


def test_sizes_read_well() -> None:
    assert [human_bytes(n) for n in (0, 999, 1010, 45 << 10, 538 << 20, 2 << 30)] == [
        "0 B", "999 B", "1010 B", "45 KiB", "538 MiB", "2.0 GiB",
    ]  # fmt: skip
