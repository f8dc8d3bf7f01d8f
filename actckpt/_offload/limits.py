"""How much host memory this process may pin: pages are charged to the cgroup, and an overrun kills the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MAX_BOUNCE_BYTES = 64 << 20
_MAX_BUFFER_BYTES = 4 << 20
_PAGE_BYTES = 4096


def default_host_limit(root: Path = Path("/"), environ: dict[str, str] | None = None) -> int:
    """Return half of the free memory of the machine and of this process's cgroups, in bytes per local rank.

    Args:
        root: parent of `proc` and `sys`; for tests.
        environ: where LOCAL_WORLD_SIZE is looked up; defaults to the process's environment.
    """
    return available_host_bytes(root, environ) // 2


def bounce_sizes(host_limit: int) -> tuple[int, int]:
    """Return the pinned bytes for bounce buffers, half per direction, and the bytes of one buffer.

    A quarter of `host_limit`, at most 64 MiB; at least four buffers per direction, of at most 4 MiB. Zero if that
    leaves no pages for buffers (below 32 KiB): then nothing goes to disk.
    """
    buffer = min(host_limit // 4 // 8, _MAX_BUFFER_BYTES) // _PAGE_BYTES * _PAGE_BYTES
    if buffer == 0:  # too little for four buffers of one page
        return (2 * _PAGE_BYTES if host_limit >= 8 * _PAGE_BYTES else 0), _PAGE_BYTES
    return min(host_limit // 4, _MAX_BOUNCE_BYTES) // (2 * buffer) * 2 * buffer, buffer


def available_host_bytes(root: Path = Path("/"), environ: dict[str, str] | None = None) -> int:
    """Return what the machine and this process's cgroups have free, per local rank, in bytes."""
    headrooms = [limit - used for limit, used in _cgroup_limits(root)]
    return max(min([_meminfo_bytes(root, "MemAvailable"), *headrooms]), 0) // _num_ranks(environ)


def total_host_bytes(root: Path = Path("/"), environ: dict[str, str] | None = None) -> int:
    """Return the memory of the machine or of this process's cgroups, whichever is less, per local rank, in bytes."""
    return min([_meminfo_bytes(root, "MemTotal"), *(limit for limit, _ in _cgroup_limits(root))]) // _num_ranks(environ)


def _num_ranks(environ: dict[str, str] | None) -> int:
    ranks = (os.environ if environ is None else environ).get("LOCAL_WORLD_SIZE", "1")
    return int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1


def _meminfo_bytes(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage of this process's cgroup and of its parents, v1 and v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            try:
                yield int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # no such group, or "max"
                continue
