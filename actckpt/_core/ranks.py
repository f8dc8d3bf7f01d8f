"""Whether this process is one of several ranks, and whether all of them run the current code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["COLLECTIVE_NAMESPACES", "has_others", "is_local", "on_this_rank_only"]

#: Namespaces of operators that communicate with other processes.
COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "fsdp", "symm_mem"})


class _Thread(threading.local):
    num_local = 0


_thread = _Thread()


@contextmanager
def on_this_rank_only() -> Iterator[None]:
    """Mark the body as code that only this rank runs."""
    _thread.num_local += 1
    try:
        yield
    finally:
        _thread.num_local -= 1


def is_local() -> bool:
    """Whether only this rank runs the current code (NOTE [ Fake collectives ])."""
    return _thread.num_local > 0


def has_others() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
