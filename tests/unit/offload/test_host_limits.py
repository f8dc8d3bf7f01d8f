"""What a process may use of the host's memory, over made-up proc and sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from actckpt._offload.limits import available_host_bytes, default_host_limit, total_host_bytes

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(gib: int) -> dict[str, str]:
    """A machine with as much as is available, and half as much again."""
    return {"proc/meminfo": f"MemTotal: {3 * gib << 19} kB\nMemAvailable:   {gib << 20} kB\n"}


def group(limit: str, used: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": limit,
        "sys/fs/cgroup/job/memory.current": str(used),
        "sys/fs/cgroup/job/step/memory.max": "max\n",  # the tightest counts, here the parent
        "sys/fs/cgroup/job/step/memory.current": "1",
    }


OLD_GROUP = {
    "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/box\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(1 * GIB),
}


@pytest.mark.parametrize(
    ("files", "ranks", "total", "available"),
    [
        (meminfo(8), None, 12 * GIB, 8 * GIB),
        (meminfo(64) | group(str(10 * GIB), 4 * GIB), None, 10 * GIB, 6 * GIB),
        (meminfo(8) | group("max", 4 * GIB), None, 12 * GIB, 8 * GIB),
        (meminfo(64) | OLD_GROUP, None, 2 * GIB, GIB),
        (meminfo(8), "4", 3 * GIB, 2 * GIB),
        (meminfo(8), "none", 12 * GIB, 8 * GIB),
        (meminfo(8) | group("5", 9), None, 5, 0),
    ],
    ids=["no group", "a group", "no limit", "an old group", "four ranks", "no number of ranks", "an overrun group"],
)
def test_a_process_may_use_what_its_tightest_group_leaves_of_its_share_and_stores_half_of_that(
    files: dict[str, str], ranks: str | None, total: int, available: int, tmp_path: Path
) -> None:
    root, environment = tree(tmp_path, files), {} if ranks is None else {"LOCAL_WORLD_SIZE": ranks}
    assert total_host_bytes(root, environment) == total
    assert available_host_bytes(root, environment) == available
    assert default_host_limit(root, environment) == available // 2


def test_this_machine_has_a_limit() -> None:
    assert default_host_limit() > 0
