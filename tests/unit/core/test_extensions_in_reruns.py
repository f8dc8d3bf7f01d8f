"""What an extension carries from a forward into its reruns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from oracle import Log, leaf, ours

import actckpt
from actckpt._core import extensions


class Provider(extensions.Extension):
    """Carries a number, and notes what it is asked."""

    def __init__(self, *, allows_early_stop: bool = True) -> None:
        self.number, self.log, self.allows = 0, [], allows_early_stop

    def capture(self) -> Any:
        self.log.append("capture")
        return self.number or None

    @contextmanager
    def forward(self, state: Any) -> Iterator[None]:
        self.log.append(f"forward {state}")
        yield
        self.log.append("forward ends")

    @contextmanager
    def rerun(self, state: Any) -> Iterator[None]:
        outside, self.number = self.number, state
        try:
            yield
        finally:
            self.number = outside
            self.log.append(f"rerun {state} ends")

    def allows_early_stop(self, state: Any) -> bool:
        return self.allows


@pytest.fixture
def provided() -> Iterator[Callable[[Provider], AbstractContextManager[None]]]:
    @contextmanager
    def registered(provider: Provider) -> Iterator[None]:
        extensions.register(provider)
        try:
            yield
        finally:
            extensions.unregister(provider)

    yield registered


@pytest.mark.parametrize("method_of_module", [True, False])
def test_extensions_carry_state_into_the_rerun(provided: Any, method_of_module: bool) -> None:
    provider, seen = Provider(), []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(provider.number)
            return x.sin().exp()

    layer = Layer()
    provider.number = 3
    with provided(provider):
        y = ours(layer if method_of_module else (lambda x: layer(x)), leaf(3))
    provider.number = 5
    y.sum().backward()
    assert seen == [3, 3]
    assert provider.number == 5
    assert provider.log == ["capture", "forward 3", "forward ends", "rerun 3 ends"]


def test_an_extension_with_nothing_to_carry_is_not_entered(provided: Any) -> None:
    provider = Provider()
    with provided(provider):
        ours(torch.sin, leaf(3)).sum().backward()
    assert provider.log == ["capture"]


@pytest.mark.parametrize("allowed", [True, False])
def test_an_extension_may_forbid_the_early_stop(provided: Any, allowed: bool) -> None:
    provider, ends = Provider(allows_early_stop=allowed), Log()
    provider.number = 1

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.sin().exp()
        ends.append(1)
        return x

    with provided(provider):
        ours(function, leaf(3)).sum().backward()
    assert len(ends) == (1 if allowed else 2)


def test_an_extension_sees_a_failed_rerun_end(provided: Any) -> None:
    provider, runs = Provider(), Log()
    provider.number = 1

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x[1:].sin().exp()

    with provided(provider):
        y = ours(function, leaf(3))
    provider.number = 2
    with pytest.raises(actckpt.errors.RerunMismatchError):
        y.sum().backward()
    assert provider.number == 2 and provider.log[-1] == "rerun 1 ends"
