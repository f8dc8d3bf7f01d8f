"""The default limit of host memory, over made-up proc and sys trees."""

from __future__ import annotations

from pathlib import Path

from actckpt._offload.limits import default_host_limit

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(gib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {gib << 20} kB\n"}


def test_without_cgroups_it_is_half_of_what_is_available(tmp_path: Path) -> None:
    assert default_host_limit(tree(tmp_path, meminfo(8)), {}) == 4 * GIB


def test_the_tightest_cgroup_counts_also_when_it_is_a_parent(tmp_path: Path) -> None:
    files = meminfo(64) | {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": str(10 * GIB),
        "sys/fs/cgroup/job/memory.current": str(4 * GIB),
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1",
    }
    assert default_host_limit(tree(tmp_path, files), {}) == 3 * GIB


def test_old_cgroups_count_too(tmp_path: Path) -> None:
    files = meminfo(64) | {
        "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(1 * GIB),
    }
    assert default_host_limit(tree(tmp_path, files), {}) == GIB // 2


def test_local_ranks_share_it(tmp_path: Path) -> None:
    assert default_host_limit(tree(tmp_path, meminfo(8)), {"LOCAL_WORLD_SIZE": "4"}) == GIB
    assert default_host_limit(tree(tmp_path, meminfo(8)), {"LOCAL_WORLD_SIZE": "none"}) == 4 * GIB


def test_an_overrun_group_leaves_nothing(tmp_path: Path) -> None:
    files = meminfo(8) | {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "5",
        "sys/fs/cgroup/memory.current": "9",
    }
    assert default_host_limit(tree(tmp_path, files), {}) == 0


def test_this_machine_has_a_limit() -> None:
    assert default_host_limit() > 0
