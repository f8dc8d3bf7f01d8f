"""Callbacks at the end of a backward: each is called once, when its own backward ends or fails."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from actckpt import _C


class FailError(Exception):
    """What a hook raises."""


def test_a_callback_is_called_once_at_the_end_of_its_own_backward_also_after_one_that_raises() -> None:
    x = torch.ones(2, requires_grad=True)
    log: list[str] = []

    @torch.enable_grad()
    def inner() -> None:
        y = torch.ones(2, requires_grad=True)
        z = (y * 2).sum()
        y.register_hook(lambda grad: _C.when_backward_ends(lambda: log.append("inner ended")))
        z.backward()

    def raises() -> None:
        log.append("raised")
        raise FailError

    def hook(grad: Tensor) -> None:
        for callback in (lambda: log.append("first"), raises, lambda: log.append("last")):
            _C.when_backward_ends(callback)
        inner()
        log.append("hook ended")

    x.register_hook(hook)
    with pytest.raises(FailError):
        (x * 3).sum().backward()
    assert log == ["inner ended", "hook ended", "first", "raised", "last"]
    with pytest.raises(RuntimeError):  # there is no backward to wait for
        _C.when_backward_ends(raises)


@pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch 2.9 and 2.11 alone crash where so many of their backwards fail, 2.13 does not",
)
def test_a_deep_stack_of_backwards_that_fails_tells_all_of_them() -> None:
    """Beyond some depth, autograd runs a backward inside of another in a thread of its own."""
    told: list[int] = []

    @torch.enable_grad()
    def backward(depth: int) -> None:
        x = torch.ones(2, requires_grad=True)

        def hook(grad: Tensor) -> None:
            _C.when_backward_ends(lambda: told.append(depth))
            if depth == 0:
                raise FailError
            backward(depth - 1)

        x.register_hook(hook)
        (x * 2).sum().backward()

    with pytest.raises((FailError, SystemError)):  # plain autograd loses the error there
        backward(80)
    deadline = time.monotonic() + 60
    while len(told) < 81 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(told) == list(range(81))
