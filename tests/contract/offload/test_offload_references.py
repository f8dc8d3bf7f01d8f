"""500 offloads of each kind give every reference back: internals/references.py tells how."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from internals.references import STEPS, SavesBoth, assert_references_flat, chain, fails, sines
from internals.stores import faults, faulty_store, flush, store_of_kind
from offload_oracle import two_tensor
from oracle import leaf, ours

import actckpt


def _overlapping(x: torch.Tensor) -> torch.Tensor:
    h = (x * 2).view(-1)
    return h[0:5].sin().sum() + h[3:8].exp().sum() + h.exp().sum()


def _both_kinds(x: torch.Tensor) -> torch.Tensor:
    y = ours(sines, x * 2)
    with actckpt.region(["aten.sin"]):
        return y.sin().exp().cos()


def _of_a_subclass(x: torch.Tensor) -> torch.Tensor:
    return SavesBoth.apply(x, two_tensor(2, 4))


OFFLOADED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chain": lambda x: chain(x * 2),
    "overlapping": _overlapping,
    "regions inside": _both_kinds,
    "subclass": _of_a_subclass,
    "failing forward": fails,
}


@contextmanager
def _full_disk(folder: Path) -> Iterator[None]:
    with faulty_store(folder, num_workers=0) as io:
        io.set(faults(fail_write_at=0, write_errno=errno.ENOSPC))
        yield


STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: store_of_kind("memory", num_workers=0),
    "disk": lambda folder: store_of_kind("disk", num_workers=0),
    "full disk": _full_disk,
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("program", OFFLOADED)
def test_offloading_gives_every_reference_back(program: str, store: str, tmp_path: Path) -> None:
    x = leaf(2, 4)

    def step() -> None:
        with suppress(KeyError):
            with actckpt.offload(min_bytes=0):
                y = OFFLOADED[program](x)
            flush()
            y.sum().backward()

    with STORES[store](tmp_path):
        assert_references_flat(step, STEPS if store == "memory" else STEPS // 4)


def test_a_context_around_the_training_loop_gives_every_reference_back() -> None:
    """Its lists of spans and sizes could keep an entry per tensor ever saved."""
    x = leaf(2, 4)
    with actckpt.offload(min_bytes=0):
        assert_references_flat(lambda: chain(x * 2).sum().backward())
