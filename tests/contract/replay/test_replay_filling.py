"""Buffers from empty factories that are filled piece by piece: they are kept."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import memory_of
from oracle import CountOperators, leaf
from torch import Tensor

import actckpt

Program = Callable[[Tensor], Tensor]


def rows(x: Tensor) -> Tensor:
    b = torch.empty(6, 8)
    for i in range(6):
        b[i] = x[i].sin()
    return b


def by_out(x: Tensor) -> Tensor:
    b = torch.empty(6, 8)
    with torch.no_grad():
        torch.sin(x[:3], out=b[:3])
        torch.cos(x[2:], out=b[2:])
    return b * x


def behind_the_back(x: Tensor) -> Tensor:
    b = torch.empty(6, 8)
    with torch.no_grad():
        b[:3] = x[:3].sin()
        memory_of(b)[3:] = 2.5
    return b * x


def behind_the_back_of_the_version(x: Tensor) -> Tensor:
    b = torch.empty(6, 8)
    memory_of(b)[:] = 2.5
    with torch.no_grad():
        b[:3] = x[:3].sin()
    return b * x


def at_once(x: Tensor) -> Tensor:
    b = torch.empty(6, 8)
    b.copy_(x.sin())
    return b


KEPT = [rows, by_out, behind_the_back, behind_the_back_of_the_version]


def _run(program: Program, region: Any, num_backwards: int = 1) -> Tensor:
    torch.manual_seed(0)
    x = leaf(6, 8)
    with region:
        b = program(x)
        y = (b * b).exp() * x[:3, :3].sum()
    for left in range(num_backwards - 1, -1, -1):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=left > 0)
    return found


@pytest.mark.parametrize(
    "policy", ["recompute", ["aten.sin"], ["aten.copy_"], "offload", lambda i: actckpt.Action.RECOMPUTE]
)
@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("program", [*KEPT, at_once], ids=lambda program: program.__name__)
@pytest.mark.filterwarnings("ignore:.*came back from replay with other bytes:UserWarning")
def test_gradients_are_those_of_plain_autograd(program: Program, policy: Any, num_backwards: int) -> None:
    expected = _run(program, nullcontext())
    for _ in range(2):  # the first is audited
        assert torch.equal(_run(program, actckpt.region(policy), num_backwards), expected)


def test_a_buffer_that_one_operator_writes_is_dropped() -> None:
    region = actckpt.region()
    _run(at_once, region)
    reasons = {reason for row in region.report().rows for reason in row.not_replayed}
    assert reasons <= {"an input of the region", "others are replayed from it"}


@pytest.mark.parametrize("program", KEPT, ids=lambda program: program.__name__)
def test_a_buffer_that_is_filled_piece_by_piece_is_kept(program: Program) -> None:
    region = actckpt.region()
    _run(program, region)
    reasons = {reason for row in region.report().rows for reason in row.not_replayed}
    assert reasons & {"uninitialised memory", "changed outside of the recorder"}


def test_writes_that_a_policy_or_a_setting_keeps_are_not_executed_again() -> None:
    def copies(policy: Any, program: Program = rows) -> int:
        x = leaf(6, 8)
        with actckpt.region(policy):
            b = program(x)
            y = (b * b).exp()
        with CountOperators() as counted:
            y.sum().backward()
        return counted.counts["aten.copy_.default"]

    actckpt.configure(audit="off")
    assert copies("recompute") == copies(["aten.copy_"]) == copies("keep")
    plainly = copies("keep", at_once)
    assert copies("recompute", at_once) == plainly + 1
    assert copies(["aten.copy_"], at_once) == plainly
    actckpt.configure(opaque=["aten.copy_"])
    assert copies("recompute", at_once) == plainly


def _reads_and_overwrites(x: Tensor, b: Tensor) -> Tensor:
    y = x * b.sin()
    b.fill_(3.0)
    return (y * b.cos()).sin()


def test_memory_that_a_dropped_value_is_made_from_is_copied_when_it_is_overwritten() -> None:
    x, b = leaf(6, 8), torch.full((6, 8), 0.5)
    _reads_and_overwrites(x, b.clone()).sum().backward()
    expected, x.grad = x.grad, None
    with actckpt.region():
        y = _reads_and_overwrites(x, b)
    y.sum().backward()
    assert x.grad is not None and expected is not None
    assert torch.equal(x.grad, expected)


def test_memory_that_was_offloaded_is_not_held_until_its_region_closes(tmp_path: Path) -> None:
    actckpt.configure(spill_dir=tmp_path)
    x = leaf(256, 256)
    with actckpt.region(lambda info: actckpt.Action.OFFLOAD):
        raw = torch.empty(256, 256)
        memory_of(raw)[:] = 2.0
        storage = weakref.ref(raw.untyped_storage())
        y = x * raw
        del raw
        until = time.monotonic() + 60
        while storage() is not None and time.monotonic() < until:
            time.sleep(0.01)
            y = y * 1.5 + x.sin()  # looks whether it was written
        is_freed = storage() is None
        assert is_freed
    y.sum().backward()
