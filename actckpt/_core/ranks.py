"""Whether this process is one of several ranks, and whether all of them run what it runs now."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["COLLECTIVE_NAMESPACES", "has_others", "is_local", "on_this_rank_only"]

#: Namespaces whose operators talk to other processes.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "symm_mem"})


class _Thread(threading.local):
    num_local = 0


_thread = _Thread()


@contextmanager
def on_this_rank_only() -> Iterator[None]:
    """Say that what runs in this thread runs on this rank only."""
    _thread.num_local += 1
    try:
        yield
    finally:
        _thread.num_local -= 1


def is_local() -> bool:
    """Whether other ranks do not run what runs now (NOTE [ Fake collectives ])."""
    return _thread.num_local > 0


def has_others() -> bool:
    """Whether this is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
