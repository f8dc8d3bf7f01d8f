"""Randomness: reruns draw what the forward drew, and leave no trace in the state outside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch
from oracle import Checkpoint, Log, assert_as_plain, assert_equal, gradients, leaf, mlp, ours, plain, theirs

import actckpt
from actckpt._core import devices, extensions
from actckpt._core.devices import Accelerator


def test_dropout_is_bit_equal() -> None:
    def program(checkpoint: Checkpoint) -> Any:
        model, x = mlp(dropout=0.5, depth=3), leaf(3, 8)
        y = checkpoint(model[5:], checkpoint(model[:5], x))
        torch.manual_seed(1234)  # reseeding between forward and backward changes nothing
        y.sum().backward()
        return y, x.grad, gradients(model)

    assert_as_plain(program)


def test_drawing_and_putting_back_inside_is_seen_as_drawing() -> None:
    def program(checkpoint: Checkpoint) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                x = torch.nn.functional.dropout(x, 0.5)
            return (x * torch.rand(3, 4)).exp()

        x = leaf(3, 4)
        y = checkpoint(function, x)
        torch.rand(5)
        y.sum().backward()
        return y, x.grad

    assert_as_plain(program)


def test_seeding_inside_is_repeated_and_stays_as_the_forward_left_it() -> None:
    def program(checkpoint: Checkpoint) -> Any:
        def function(x: torch.Tensor) -> torch.Tensor:
            before = torch.rand(3, 4)
            torch.manual_seed(99)
            return (x * before * torch.rand(3, 4)).exp()

        x = leaf(3, 4)
        y = checkpoint(function, x)
        y.sum().backward()
        return y, x.grad, torch.rand(2)

    assert_as_plain(program)


def test_state_outside_is_unchanged_by_every_kind_of_backward() -> None:
    model, x = mlp(dropout=0.5), leaf(3, 8)
    y = ours(model, x).sum()
    torch.rand(7)
    state = torch.get_rng_state()
    y.backward(retain_graph=True)
    assert_equal(torch.get_rng_state(), state)
    torch.autograd.grad(y, x, create_graph=True)
    assert_equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16):  # state differs from the forward's: the longer way
        y.backward()
    assert_equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("keywords", [{}, {"context_fn": lambda: (_nothing(), _nothing())}])
def test_state_outside_is_unchanged_after_a_failed_rerun(keywords: dict[str, Any]) -> None:
    runs: list[int] = []

    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.dropout(x, 0.5)
            runs.append(1)
            if len(runs) > 1:
                torch.manual_seed(5)
                raise KeyError("rerun")
            return x.exp()

    y = ours(Fails(), leaf(3), **keywords)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="rerun"):
        y.sum().backward()
    assert_equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", [theirs, ours])
def test_without_preserve_rng_state_the_rerun_draws_on(method: Checkpoint) -> None:
    drawn = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(3))
        return (x * drawn[-1]).exp()

    y = method(function, leaf(3), preserve_rng_state=False)
    state = torch.get_rng_state()
    y.sum().backward()
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(torch.get_rng_state(), state)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class ByteTracker:
    """Like Megatron's: states as byte tensors, handed out and taken over without a copy."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.given: list[int] = []
        with torch.random.fork_rng(devices=[]):
            for name, seed in (("model", 11), ("data", 12)):
                torch.manual_seed(seed)
                self.states[name] = torch.get_rng_state()

    def get_states(self) -> dict[str, Any]:
        return self.states

    def set_states(self, states: dict[str, Any]) -> None:
        self.given.append(id(states))
        assert states is not self.states, "a tracker must get a dict of its own"
        self.states = states

    def rand(self, *shape: int) -> torch.Tensor:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states["model"])
        try:
            return torch.rand(*shape)
        finally:
            self.states["model"].copy_(torch.get_rng_state())  # in place, into whatever it was given
            self.states["extra"] = self.states.get("extra", 0) + 1
            torch.set_rng_state(outside)

    def value(self) -> Any:
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.states.items()
        }


class HandleTracker:
    """Like TransformerEngine's with graph-safe states: `torch.Generator` handles."""

    def __init__(self) -> None:
        self.states = {"model": torch.Generator().manual_seed(11)}
        self.first = self.states["model"]

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states

    def rand(self, *shape: int) -> torch.Tensor:
        assert self.states["model"] is self.first, "the generator object must stay the same"
        return torch.rand(*shape, generator=self.states["model"])

    def value(self) -> Any:
        return self.states["model"].get_state()


@pytest.fixture(params=["keyword", "registered", "both"])
def enlisted(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Checkpoint]]:
    """Return a function that makes a checkpoint which knows a tracker."""
    registered: list[Any] = []

    def enlist(get: Callable[[], Any]) -> Checkpoint:
        if request.param != "keyword":
            actckpt.rng.register_tracker(get)
            actckpt.rng.register_tracker(get)  # a second time changes nothing
            registered.append(get)
        if request.param == "registered":
            return ours
        return lambda function, *args: ours(function, *args, rng_trackers=[get])

    yield enlist
    for get in registered:
        actckpt.rng.unregister_tracker(get)


@pytest.mark.parametrize("kind", [ByteTracker, HandleTracker])
@pytest.mark.parametrize("nested", [False, True])
def test_trackers_draw_the_same_again(enlisted: Callable[..., Checkpoint], kind: Any, nested: bool) -> None:
    def run(make: Callable[[Callable[[], Any]], Checkpoint]) -> Any:
        tracker = kind()
        checkpoint = make(lambda: tracker)

        def inner(x: torch.Tensor) -> torch.Tensor:
            return (x * tracker.rand(3)).exp() * tracker.rand(3)

        def outer(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, x * tracker.rand(3)) * tracker.rand(3)

        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        y = checkpoint(outer if nested else inner, x)
        y = y * tracker.rand(3)
        state = tracker.value()
        y.sum().backward(retain_graph=True)
        assert_equal(tracker.value(), state)
        y.sum().backward()
        assert_equal(tracker.value(), state)
        return y.detach(), x.grad, tracker.rand(3)

    assert_equal(run(enlisted), run(lambda _: plain))


def test_tracker_states_are_put_back_after_a_failed_rerun() -> None:
    tracker, runs = ByteTracker(), Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        x = x * tracker.rand(3)
        if len(runs) > 1:
            raise KeyError("rerun")
        return x.exp()

    y = ours(function, leaf(3), rng_trackers=[lambda: tracker])
    state = tracker.value()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert_equal(tracker.value(), state)


@pytest.mark.parametrize("which", ["python", "numpy"])
def test_python_and_numpy_draw_the_same_again_on_request(which: str) -> None:
    tracker, draw = {
        "python": (actckpt.rng.python_random, random.random),
        "numpy": (actckpt.rng.numpy_random, numpy.random.rand),
    }[which]
    drawn = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(float(draw()))
        return (x * drawn[-1]).exp()

    y = ours(function, leaf(3), rng_trackers=[tracker])
    after = float(draw())
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert drawn[0] == drawn[1] == drawn[2]
    assert float(draw()) not in (after, *drawn)


def test_registering_what_is_no_callable_says_what_to_pass() -> None:
    with pytest.raises(TypeError, match="not its result"):
        actckpt.rng.register_tracker(ByteTracker())
    with pytest.raises(ValueError, match="unregister_tracker"):
        actckpt.rng.unregister_tracker(ByteTracker)


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


#: A device's random state, where reruns do not find it: they put back what objects and lists hold.
_drawn: ContextVar[int] = ContextVar("_drawn", default=0)


def _draw() -> int:
    _drawn.set(_drawn.get() + 1)
    return _drawn.get()


class _Counting(Accelerator):
    """Stands for the accelerator of meta tensors: its one device draws random numbers by counting."""

    @property
    def module(self) -> Any:
        return self

    def current_index(self) -> int | None:
        return 0

    def get_rng_state(self, index: int) -> torch.Tensor:
        return torch.tensor([_drawn.get()])

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        _drawn.set(int(state))


def _given(x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint(draw, x, there)


def _in_keywords(
    x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint
) -> torch.Tensor:
    return checkpoint(lambda x, held: draw(x, held["there"]), x, held={"there": there})


def _in_closure(x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint(lambda x: draw(x, there), x)


@pytest.mark.parametrize("given", [_given, _in_keywords, _in_closure])
@pytest.mark.parametrize("hold", ["as they are", "offloaded", "in hooks", "nested", "in a region"])
def test_the_generator_of_a_device_is_restored_however_inputs_are_held(given: Callable[..., Any], hold: str) -> None:
    """Also where what is outside packs them: what is left of the inputs then has no device."""
    undo = devices.register(_Counting("meta"))
    x, there = leaf(3), torch.empty(2, device="meta")

    def draw(x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return (x * _draw()).exp()

    def run(checkpoint: Checkpoint) -> torch.Tensor:
        _drawn.set(0)
        if hold == "nested":
            y = checkpoint(lambda x, there: given(x, there, draw, checkpoint).sin(), x, there)
        elif hold == "in hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                y = given(x, there, draw, checkpoint)
        else:
            y = given(x, there, draw, checkpoint)
        _draw()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert _drawn.get() == 2
        return gradient

    def ours_so(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return actckpt.checkpoint(function, *args, offload_inputs=hold == "offloaded", **kwargs)

    try:
        with actckpt.region("keep") if hold == "in a region" else nullcontext():
            assert_equal(run(ours_so), run(plain))
    finally:
        undo()
