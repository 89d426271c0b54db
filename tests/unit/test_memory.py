"""The KV plan and what memory this process may use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rung.errors import ConfigError, ModelError
from rung.server.memory import (
    BLOCK_SIZE,
    human_bytes,
    plan_kv,
    plan_memory,
    workspace_bytes,
)
from rung.server.process_memory import anonymous_bytes, available_bytes
from tests.unit.engine_fixture import make_model

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


def settings_in(message: str) -> list[tuple[int | None, int | None]]:
    """KV bytes and context of each setting that a refusal offers."""
    found = re.findall(
        r"--kv-cache-memory (auto|\d+)(?: --max-model-len (\d+))?", message.partition("These would fit:")[2]
    )
    return [(None if kv == "auto" else int(kv), int(length) if length else None) for kv, length in found]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"max_model_len": 9000}, "made for 8192"),
        ({"max_model_len": 400, "kv_cache_bytes": 10_000}, "needs 24.4 KiB of KV memory for one sequence"),
        ({"max_model_len": 400, "kv_cache_bytes": 10_000}, "--kv-cache-memory 10000 --max-model-len 160"),
        ({"max_model_len": 400, "kv_cache_bytes": 10_000}, "--kv-cache-memory 25000 --max-model-len 400"),
        ({"kv_cache_bytes": 999}, "not one block"),
        ({"kv_cache_bytes": 2 * GIB}, "only 1.0 GiB are free"),
    ],
)
def test_wishes_that_do_not_fit_are_refused_with_three_settings_that_do(
    wishes: dict[str, int], said: str
) -> None:
    arguments: dict[str, int | None] = {"max_model_len": None, "kv_cache_bytes": None, **wishes}
    model = {"model_context": 8192, "max_num_seqs": 4, "bytes_per_block": 1000, "free_bytes": GIB}
    with pytest.raises(ConfigError) as raised:
        plan_kv(**model, **arguments)  # type: ignore[arg-type]
    assert said in str(raised.value)
    offered = settings_in(str(raised.value))
    assert len(offered) == 3
    for kv_bytes, length in offered:
        plan_kv(**model, kv_cache_bytes=kv_bytes, max_model_len=length)


def test_when_nothing_fits_no_setting_is_offered() -> None:
    with pytest.raises(
        ConfigError, match="Nothing would fit: a block of 16 tokens takes 1000 B and 999 B are"
    ):
        plan_kv(
            model_context=8192, max_num_seqs=4, bytes_per_block=1000, free_bytes=999, kv_cache_bytes=None,
            max_model_len=None,
        )  # fmt: skip


def test_the_equation_adds_up_and_leaves_the_rest_to_kv() -> None:
    plan = plan_memory(3 * GIB, GIB // 2, 8 * GIB)
    assert plan.weights + plan.free_for_kv + plan.workspace + plan.reserve == plan.budget
    assert plan.describe(GIB) == (
        "3.0 GiB weights + 1.0 GiB KV cache + 512 MiB workspace + 256 MiB reserve = 4.8 GiB "
        "of 8.0 GiB that are free"
    )


def test_a_small_budget_keeps_a_small_reserve() -> None:
    assert plan_memory(0, 0, GIB).reserve == GIB // 8


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match=r"weights take 4\.0 GiB .* may use only 4\.0 GiB more"):
        plan_memory(4 * GIB, 0, 4 * GIB)


def test_workspace_grows_with_the_step_and_the_rows() -> None:
    config = make_model().config
    one = workspace_bytes(config, 1, 1)
    # Per token 4 hidden, queries, keys, values and output, and 3 of the gated layer; per row 2 logits.
    assert one == 4 * (4 * 64 + (2 * 4 + 2 * 2) * 16 + 3 * 128 + 2 * 1000)
    assert workspace_bytes(config, 512, 64) == 512 * (one - 8000) + 64 * 8000


def test_memory_without_a_file_behind_it_is_counted(tmp_path: Path) -> None:
    assert anonymous_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmRSS:\t 99 kB\nRssAnon:\t  7 kB\n")
    assert anonymous_bytes(tmp_path) == 7 * 1024


@given(
    st.integers(2, 1 << 20), st.none() | st.integers(2, 1 << 20), st.integers(1, 512),
    st.none() | st.integers(1, 1 << 40), st.integers(1, 1 << 24), st.integers(0, 1 << 42),
)  # fmt: skip
def test_one_sequence_always_fits(
    context: int, length: int | None, seqs: int, kv_bytes: int | None, block_bytes: int, free: int
) -> None:
    refusal = ""
    try:
        plan = plan_kv(
            model_context=context, max_model_len=length, max_num_seqs=seqs, kv_cache_bytes=kv_bytes,
            bytes_per_block=block_bytes, free_bytes=free,
        )  # fmt: skip
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        assert ("These would fit" in refusal) != ("Nothing would fit" in refusal)
        for kv, tokens in settings_in(refusal):
            plan_kv(
                model_context=context, max_model_len=tokens, max_num_seqs=seqs, kv_cache_bytes=kv,
                bytes_per_block=block_bytes, free_bytes=free,
            )  # fmt: skip
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
