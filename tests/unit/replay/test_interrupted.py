"""Regions whose opening or closing does not come to its end: a signal handler raises, or another thread closes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import in_threads, leaf
from torch.utils import _python_dispatch

import actckpt
from actckpt import regions
from actckpt._core import torch_private
from actckpt._replay import active_region, saved_tensor_hooks

_POLICIES = pytest.mark.parametrize("policy", ["keep", "recompute", "offload", [torch.ops.aten.sin.default]], ids=str)
_OPENS_AND_CLOSES = tuple(
    str(module.__file__) for module in (regions, active_region, saved_tensor_hooks, _python_dispatch)
)


class InterruptError(Exception):
    """What the signal handler raises."""


@pytest.fixture(autouse=True)
def _flags_as_without_modes() -> None:
    """Clear flags that earlier tests left set.

    torch keeps them per process, and sets them back to what each mode found: modes that overlap in several threads, as
    regions of several threads do, leave them set (torch 2.13).
    """
    torch_private.remove_dispatch_mode(None)


def thread_state() -> tuple[Any, ...]:
    """What a region changes in its thread."""
    modes: Any = torch.utils._python_dispatch
    return (
        torch_private.outer_hooks(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        modes._is_in_torch_dispatch_mode,
        modes._is_in_non_infra_torch_dispatch_mode,
        getattr(modes, "_is_in_any_mode_without_ignore_compile_internals", None),
    )


def program(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).cos().exp()


def gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(program(x).sum(), x)[0]


def assert_regions_work() -> None:
    """A region in this thread records and replays."""
    x = leaf(4)
    with actckpt.region() as r:
        y = program(x)
    assert r.report().recomputed_bytes > 0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient(x))


def interrupt(call: Callable[[], Any], at: int) -> bool:
    """Call, and raise before the given opcode of what opens and closes regions; return whether it came to that one."""
    left = at

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(_OPENS_AND_CLOSES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise InterruptError
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 tells opcodes to what is set after that only
    sys.settrace(trace)
    try:
        call()
    except InterruptError:
        return True
    finally:
        sys.settrace(before)
    return left < 0


def interruptions(call: Callable[[], Any]) -> Iterator[int]:
    """Call again and again, each time interrupted one opcode later, until it comes to its end."""
    at = 0
    while interrupt(call, at):
        yield at
        at += 1
    assert at > 20


@_POLICIES
@pytest.mark.parametrize("is_inside", [False, True])
def test_opening_interrupted_at_any_opcode_changes_nothing(policy: Any, is_inside: bool) -> None:
    x, opened = leaf(4), []

    def enter() -> None:
        opened[:] = [actckpt.region(policy)]
        opened[0].__enter__()

    with actckpt.region(lambda info: actckpt.Action.RECOMPUTE) if is_inside else nullcontext() as outer:
        before = thread_state()
        for _ in interruptions(enter):
            assert thread_state() == before
            if not is_inside:
                assert_regions_work()
        opened[0].__exit__(None, None, None)
        assert thread_state() == before
        y = program(x)
    if outer is not None:
        assert outer.report().recomputed_bytes > 0 and outer.report().kept_bytes == 0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient(x))


@_POLICIES
@pytest.mark.parametrize("changes", [False, True], ids=["", "input changed after it"])
def test_closing_interrupted_at_any_opcode_closes_and_gradients_are_right_or_raise(policy: Any, changes: bool) -> None:
    before = thread_state()
    x, at, is_interrupted = leaf(4), 0, True
    expected = gradient(x)
    while is_interrupted:
        t = x + 0
        region = actckpt.region(policy)
        region.__enter__()
        y = program(t)
        is_interrupted = interrupt(lambda region=region: region.__exit__(None, None, None), at)  # type: ignore[misc]
        assert thread_state() == before
        try:
            if changes:
                t.detach().fill_(2.0)
            (grad,) = torch.autograd.grad(y.sum(), x)
        except RuntimeError:
            assert is_interrupted or changes
        else:
            assert torch.equal(grad, expected)
        at += 1
    assert at > 20
    assert_regions_work()


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_closing_in_another_thread_raises_and_leaves_the_region_open(policy: Any) -> None:
    before, x = thread_state(), leaf(4)
    region = actckpt.region(policy)
    region.__enter__()

    def close(_: int) -> None:
        here = thread_state()
        with pytest.raises(RuntimeError, match=r"was opened in thread .*close it there"):
            region.__exit__(None, None, None)
        assert thread_state() == here

    in_threads(close, 1)
    y = program(x)
    region.__exit__(None, None, None)
    assert thread_state() == before
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient(x))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (lambda: actckpt.region("recompute"), lambda: actckpt.region("offload")),
        (lambda: actckpt.region(["aten.sin"]), lambda: actckpt.region(["aten.sin"])),
        (lambda: actckpt.offload(min_bytes=0), lambda: actckpt.offload(min_bytes=0)),
        (lambda: actckpt.offload(min_bytes=0), lambda: actckpt.region("recompute")),
    ],
)
def test_closing_the_outer_of_two_first_raises_and_both_can_be_closed_in_order(outer: Any, inner: Any) -> None:
    before, x = thread_state(), leaf(4)
    outside, inside = outer(), inner()
    outside.__enter__()
    inside.__enter__()
    with pytest.raises(actckpt.errors.ActckptError, match="closed before what was opened in it"):
        outside.__exit__(None, None, None)
    y = program(x)
    inside.__exit__(None, None, None)
    outside.__exit__(None, None, None)
    assert thread_state() == before
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], gradient(x))


def test_offload_blocks_that_are_not_open_cannot_be_closed() -> None:
    closed = actckpt.offload(min_bytes=0)
    with closed:
        pass
    for block in (closed, actckpt.offload()):
        with pytest.raises(actckpt.errors.ActckptError, match="not open in this thread"):
            block.__exit__(None, None, None)
    assert_regions_work()
