"""Tests in which two processes exchange tensors over gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

needs_gloo = pytest.mark.skipif(
    sys.platform != "linux" or not (dist.is_available() and dist.is_gloo_available()),
    reason="needs Linux, and a torch that is built with gloo",
)


def run_on_two_ranks(check: Callable[[], None], folder: Path) -> None:
    """Call a function of a test module in two processes of one group; raises what one of them raises."""
    mp.spawn(_call, args=(check, folder / "ranks"), nprocs=2)


def _call(rank: int, check: Callable[[], None], store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        check()
    finally:
        dist.destroy_process_group()
