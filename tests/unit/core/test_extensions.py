"""Extensions: who is asked what, and when, and what they carry from a forward into its reruns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Log, leaf, ours

import actckpt
from actckpt._core import extensions
from actckpt._core.extensions import Extension

Register = Callable[[Extension], Extension]


@pytest.fixture
def register() -> Iterator[Register]:
    """Return a function that registers an extension until the end of the test."""
    registered: list[Extension] = []

    def enlist(extension: Extension) -> Extension:
        extensions.register(extension)
        registered.append(extension)
        return extension

    yield enlist
    for extension in registered:
        extensions.unregister(extension)


def _lists() -> tuple[int, ...]:
    return tuple(map(len, (extensions.around_regions, extensions.excludes_from_offload, extensions.clears_saved)))


def test_an_extension_is_asked_only_what_it_overrides(register: Register) -> None:
    class Staying(Extension):
        def excludes_from_offload(self, tensor: torch.Tensor, /) -> bool:
            return True

    class Carrying(Extension):
        def capture(self) -> Any:
            return None

    before = _lists()
    register(Extension())
    assert _lists() == before
    register(Staying())
    assert _lists() == (before[0], before[1] + 1, before[2])
    carrying = register(Carrying())
    register_again = extensions.register
    register_again(carrying)
    assert _lists() == (before[0] + 1, before[1] + 1, before[2])


def test_an_awaited_package_that_cannot_be_carried_raises_at_every_region(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Extension()
    answers: list[Any] = [LookupError("unknown"), LookupError("unknown"), made]

    def make() -> Extension:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    package = ModuleType("actckpt_test_package")
    package.__spec__ = SimpleNamespace(_initializing=False)
    extensions.await_package(package.__name__, make)
    actckpt.checkpoint(torch.sin, torch.randn(3, requires_grad=True)).sum().backward()
    assert len(answers) == 3, "made before the package was loaded"
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for _ in range(2):
        with pytest.raises(LookupError, match="unknown"):
            actckpt.checkpoint(torch.sin, torch.randn(3, requires_grad=True))
    actckpt.checkpoint(torch.sin, torch.randn(3, requires_grad=True)).sum().backward()
    assert not answers and package.__name__ not in extensions.lazy_extensions
    extensions.unregister(made)


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


def test_extensions_carry_state_into_the_rerun_and_end_in_the_reverse_order(register: Register) -> None:
    providers, seen, log = [Provider(), Provider()], Log(), []
    for number, provider in enumerate(providers, 3):
        provider.number, provider.log = number, log
        register(provider)

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append([provider.number for provider in providers])
        return x.sin().exp()

    idle = Provider()  # has nothing to carry
    register(idle)
    y = ours(function, leaf(3))
    providers[0].number = 5
    y.sum().backward()
    assert seen == [[3, 4], [3, 4]]
    assert providers[0].number == 5
    begun = ["capture", "capture", "forward 3", "forward 4", "forward ends", "forward ends"]
    assert log == [*begun, "rerun 4 ends", "rerun 3 ends"] and idle.log == ["capture"]


@pytest.mark.parametrize("allowed", [True, False])
def test_an_extension_may_forbid_the_early_stop_and_sees_a_failed_rerun_end(register: Register, allowed: bool) -> None:
    provider, ends = Provider(allows_early_stop=allowed), Log()
    provider.number = 1
    register(provider)

    def function(x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        x = x[rows.pop() :].sin().exp()
        ends.append(1)
        return x

    ours(lambda x: function(x, [0]), leaf(3)).sum().backward()
    assert len(ends) == (1 if allowed else 2)
    rows = iter((0, 1))
    y = ours(lambda x: function(x, [next(rows)]), leaf(3))
    provider.number = 2
    with pytest.raises(actckpt.errors.RerunMismatchError):
        y.sum().backward()
    assert provider.number == 2 and provider.log[-1] == "rerun 1 ends"
