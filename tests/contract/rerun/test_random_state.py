"""Randomness: reruns draw what the forward drew, and leave no trace in the state outside."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from oracle import Checkpoint, Log, Programs, assert_as_plain, assert_equal, gradients, leaf, mlp, ours, plain, theirs
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt
from actckpt.errors import ActckptWarning

programs = Programs()


@pytest.mark.parametrize("name", programs)
def test_what_is_drawn_is_drawn_again(name: str) -> None:
    assert_as_plain(programs[name])


@programs
def dropout(checkpoint: Checkpoint) -> Any:
    model, x = mlp(dropout=0.5, depth=3), leaf(3, 8)
    y = checkpoint(model[5:], checkpoint(model[:5], x))
    torch.manual_seed(1234)  # reseeding between forward and backward changes nothing
    y.sum().backward()
    return y, x.grad, gradients(model)


@programs
def drawing_and_putting_back_inside_is_seen_as_drawing(checkpoint: Checkpoint) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            x = torch.nn.functional.dropout(x, 0.5)
        return (x * torch.rand(3, 4)).exp()

    x = leaf(3, 4)
    y = checkpoint(function, x)
    torch.rand(5)
    y.sum().backward()
    return y, x.grad


@programs
def seeding_inside_is_repeated_and_stays_as_the_forward_left_it(checkpoint: Checkpoint) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = torch.rand(3, 4)
        torch.manual_seed(99)
        return (x * before * torch.rand(3, 4)).exp()

    x = leaf(3, 4)
    y = checkpoint(function, x)
    y.sum().backward()
    return y, x.grad, torch.rand(2)


@pytest.mark.parametrize("method", [theirs, ours])
def test_without_preserve_rng_state_the_rerun_draws_on(method: Checkpoint) -> None:
    drawn = Log()

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(3))
        return (x * drawn[-1]).exp()

    y = method(function, leaf(3), preserve_rng_state=False)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* a rerun draws other random numbers", ActckptWarning)
        y.sum().backward()
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(torch.get_rng_state(), state)


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


DEADLOCK = """
    import os, threading, torch, actckpt
    holds_lock, is_swapped, is_over = threading.Event(), threading.Event(), threading.Event()

    def unpack(packed):
        if threading.current_thread().name == "B":
            holds_lock.set()
            is_swapped.wait(1)
        return packed[0]

    z, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), unpack):
        shared = actckpt.checkpoint(lambda z: torch.nn.functional.dropout(z.sin(), 0.5).exp(), z).sum()

    def region(x):
        if threading.current_thread().name == "A":
            is_swapped.set()
        (grad,) = torch.autograd.grad(shared, z, retain_graph=True)
        return (x * grad).exp()

    y = actckpt.checkpoint(region, x).sum()

    def a():
        holds_lock.wait(10)
        y.backward()

    threads = [threading.Thread(target=a, name="A", daemon=True), threading.Thread(
        target=lambda: torch.autograd.grad(shared, z, retain_graph=True), name="B", daemon=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    os._exit(any(thread.is_alive() for thread in threads))
"""


def test_a_region_that_differentiates_a_graph_which_another_thread_differentiates_too_ends() -> None:
    # It must not matter who takes the swap lock and who the lock of the region first.
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(DEADLOCK)], timeout=300, check=False)
    assert done.returncode == 0


def test_tensor_tracker_beside_a_context_fn_that_saves_every_operator() -> None:
    # The tracker's clone() runs inside the rerun context, which looks for it among the forward's operators.
    tracker = ByteTracker()
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    x = leaf(3)
    y = ours(lambda x: x.sin().exp(), x, context_fn=contexts, rng_trackers=[lambda: tracker])
    y.sum().backward()
    assert_equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
