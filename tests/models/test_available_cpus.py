"""The thread count follows affinity and the quota of a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rung.runner.reference.threads import available_cpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight cores whose process runs in the group pod/container."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:memory:/other\n0::/pod/container\n")
    (tmp_path / "sys/fs/cgroup/pod/container").mkdir(parents=True)
    return tmp_path


def limit(root: Path, group: str, content: str) -> None:
    (root / "sys/fs/cgroup" / group / "cpu.max").write_text(content)


def test_without_a_quota_affinity_decides(root: Path) -> None:
    assert available_cpus(root) == 8
    limit(root, "pod/container", "max 100000\n")
    assert available_cpus(root) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("250000 100000", 3), ("1000 100000", 1), ("9900000 100000", 8)],
)
def test_a_quota_counts_in_whole_cores(root: Path, quota: str, cores: int) -> None:
    limit(root, "pod/container", quota)
    assert available_cpus(root) == cores


def test_the_tightest_of_the_nested_quotas_counts(root: Path) -> None:
    limit(root, "pod/container", "400000 100000")
    limit(root, "pod", "300000 100000")
    assert available_cpus(root) == 3


def test_files_that_are_absent_or_odd_are_no_limit(root: Path) -> None:
    limit(root, "pod", "garbage")
    assert available_cpus(root) == 8
    assert available_cpus(root / "nowhere") == 8
