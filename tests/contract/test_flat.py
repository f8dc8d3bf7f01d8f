"""Offloading over many steps: nothing grows with their number.

Each kind runs 2,000 of them; `make soak` runs 20,000 (marker `soak`, which pytest leaves out unless it is asked for).
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from heap import allocated_bytes
from internals.stores import assert_no_ticket_is_left, flush, num_spans, store_of_kind
from oracle import leaf, mlp, ours

import actckpt
from actckpt.action import Action
from actckpt.memory import LiveStorages

Step = Callable[[], None]

_KIB = 1 << 10


def _backward(y: torch.Tensor, *leaves: torch.Tensor) -> None:
    torch.autograd.grad(y.sum(), leaves)


def _small_values_of_a_policy() -> Step:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    x = torch.randn(256, 16)
    policy = actckpt.policies.PerOp({torch.ops.aten.tanh.default: Action.OFFLOAD}, default=Action.RECOMPUTE)

    def step() -> None:
        with actckpt.region(policy):
            y = model(x)
        _backward(y, *model.parameters())

    return step


def _around(context: Callable[[], Any], numel: int, *, is_flushed: bool = False) -> Step:
    x = leaf(numel)

    def step() -> None:
        with context():
            y = (x * 2).sin().tanh()
        if is_flushed:
            flush()
        _backward(y, x)

    return step


def _offload() -> Any:
    return actckpt.offload(min_bytes=0)


def _of_a_partial_backward(*, fails: bool = False, is_dropped: bool = False) -> Step:
    x = leaf(4 * _KIB)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in backward")

    def step() -> None:
        with _offload():
            first = (x * 2).sin()
            second = first.tanh()
        if is_dropped:
            return
        flush()
        if fails:
            first.register_hook(fail)
            with suppress(KeyError):
                _backward(second, x)
        else:
            torch.autograd.grad(second.sum(), first, retain_graph=True)
            torch.autograd.grad(first.sum(), x)

    return step


def _of_offloaded_inputs() -> Step:
    model, x = mlp(16), leaf(64, 16)

    def step() -> None:
        _backward(ours(model, ours(model, x * 2, offload_inputs=True), offload_inputs=True), x)

    return step


def _of_any_number_of_backwards() -> Step:
    model, x, numbers = mlp(4, 2), torch.randn(2, 4), itertools.count()

    def step() -> None:
        number = next(numbers)
        with _offload():
            y = model(x * (number % 7)).sum()
        for is_last in (False, True)[number % 3 :]:
            y.backward(retain_graph=not is_last)
        model.zero_grad()

    return step


KINDS: dict[str, tuple[Callable[[], Step], int]] = {
    "small values of a policy": (_small_values_of_a_policy, 2),
    "small values of a policy, no workers": (_small_values_of_a_policy, 0),
    "two tensors, no workers": (partial(_around, _offload, 64 * _KIB), 0),
    "two tensors that were written, no workers": (lambda: _around(_offload, 4 * _KIB, is_flushed=True), 0),
    "what prefers to be offloaded": (lambda: _around(lambda: actckpt.region("prefer_offload"), 4 * _KIB), 2),
    "a dropped graph": (partial(_of_a_partial_backward, is_dropped=True), 0),
    "a partial backward": (_of_a_partial_backward, 0),
    "a failing backward": (partial(_of_a_partial_backward, fails=True), 0),
    "offloaded inputs": (_of_offloaded_inputs, 2),
    "two backwards, one or none": (_of_any_number_of_backwards, 2),
}
_STEPS = [2_000, pytest.param(20_000, marks=pytest.mark.soak)]
#: What may be more at the end; everything else is the same.
_SLACK = {"objects": 10, "allocated bytes": 128 << 10, "file bytes": 64 * 4096}


def _open_file_bytes() -> int:
    """Return the size of this process's files that have no name."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = os.stat(f"/proc/self/fd/{descriptor}")
            total += found.st_size if found.st_nlink == 0 else 0
    return total


def _look() -> dict[str, int]:
    flush()  # lets go of what was copied
    gc.collect()
    assert_no_ticket_is_left()
    return {
        "bytes in stores": actckpt.stats().store_bytes,
        "spans": num_spans(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "file bytes": _open_file_bytes(),
        "objects": len(gc.get_objects()),
        "allocated bytes": allocated_bytes(),
    }


def _repeat(step: Step, times: int) -> dict[str, int]:
    for _ in range(times):
        step()
    return _look()


def _assert_flat(step: Step, steps: int) -> None:
    """No more must be there at the end than after a fifth of the steps.

    Bytes of tensors are counted in the second half of that fifth, since the mode that counts them makes a step two to
    three times as long.
    """
    with LiveStorages() as live:
        _repeat(step, steps // 10)
        live_bytes = live.live_bytes
        _repeat(step, steps // 10)
        grown = {"live bytes": live.live_bytes - live_bytes}
    early = _look()
    late = _repeat(step, steps - steps // 10 * 2)
    grown |= {name: late[name] - early[name] for name in late}
    assert all(change <= _SLACK.get(name, 0) for name, change in grown.items()), f"in {steps} steps: {grown}"


@pytest.mark.usefixtures("small_tensors")
@pytest.mark.parametrize("steps", _STEPS)
@pytest.mark.parametrize("name", KINDS)
def test_offloading_stays_flat_over_many_steps(name: str, steps: int) -> None:
    make_step, num_workers = KINDS[name]
    with store_of_kind("disk", num_workers=num_workers):
        _assert_flat(make_step(), steps)
