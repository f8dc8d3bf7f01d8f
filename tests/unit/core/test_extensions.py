"""Extensions: who is asked what, and when, and what they carry from a forward into its reruns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    return tuple(map(len, (extensions.around_regions, extensions.must_stay, extensions.clears_saved)))


def test_an_extension_is_asked_only_what_it_overrides(register: Register) -> None:
    class Staying(Extension):
        def must_stay(self, tensor: torch.Tensor, /) -> bool:
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


def test_unregistering_what_is_not_registered_raises() -> None:
    with pytest.raises(ValueError, match="not in list"):
        extensions.unregister(Extension())


def test_contexts_of_extensions_end_in_the_reverse_order(register: Register) -> None:
    log: list[str] = []

    class Carrying(Extension):
        def __init__(self, name: str) -> None:
            self.name = name

        def capture(self) -> Any:
            return self.name

        @contextmanager
        def rerun(self, state: Any, /) -> Iterator[None]:
            log.append(f"{state} begins")
            yield
            log.append(f"{state} ends")

    register(Carrying("first"))
    register(Carrying("second"))
    x = torch.randn(3, requires_grad=True)
    actckpt.checkpoint(torch.sin, x).sum().backward()
    assert log == ["first begins", "second begins", "second ends", "first ends"]
    assert torch.equal(x.grad, x.detach().cos())


def test_the_tracker_of_an_extension_is_restored(register: Register) -> None:
    generator = torch.Generator()

    class Tracking(Extension):
        def tracker(self) -> Any:
            return SimpleNamespace(get_states=lambda: {"model": generator}, set_states=lambda states: None)

    register(Tracking())

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(3, generator=generator)).exp()

    x = torch.randn(3, requires_grad=True)
    before = generator.get_state()
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    generator.set_state(before)
    y = actckpt.checkpoint(function, x)
    outside = generator.get_state()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert torch.equal(generator.get_state(), outside)


def test_what_an_extension_wants_to_stay_is_not_moved(register: Register) -> None:
    asked: list[torch.Size] = []

    class Staying(Extension):
        def must_stay(self, tensor: torch.Tensor, /) -> bool:
            asked.append(tensor.shape)
            return tensor.shape[0] == 64

    register(Staying())
    x = torch.randn(64, requires_grad=True)
    with actckpt.offload(min_bytes=0) as block:
        y = x.exp().reshape(8, 8).contiguous().sin().sum() + torch.cat([x, x]).exp().sum()
    assert block.report().offloaded_bytes == 64 * 4 + 128 * 4
    assert torch.Size([64]) in asked and torch.Size([128]) in asked
    y.backward()
    assert torch.isfinite(x.grad).all()


def test_what_backward_may_clear_comes_back_as_an_alias(register: Register) -> None:
    class Clearing(Extension):
        def clears_saved(self) -> bool:
            return True

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(constant)
            return x * constant

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            seen.append(ctx.saved_tensors[0])
            return grad * seen[-1], None

    seen: list[torch.Tensor] = []
    x, constant = torch.randn(3, requires_grad=True), torch.randn(3)
    for extension in (None, Clearing()):
        if extension is not None:
            register(extension)
        with actckpt.offload():
            y = Keep.apply(x, constant)
        y.sum().backward()
    assert seen[0] is constant and seen[1] is not constant
    assert seen[1].data_ptr() == constant.data_ptr()


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
