"""A rerun gets the very objects that the forward got: shared, tagged and of their own kind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, assert_equal, ours, plain, theirs


def _x() -> torch.Tensor:
    return torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


def _assert_as_torch(program: Callable[[Checkpoint, torch.Tensor], torch.Tensor]) -> None:
    grads = []
    for method in (plain, theirs, ours):
        x = _x()
        program(method, x).sum().backward()
        grads.append(x.grad)
    assert_equal(grads[1], grads[0])
    assert_equal(grads[2], grads[0])


def test_list_that_a_helper_in_the_closure_writes_is_one_list_in_the_rerun() -> None:
    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        state = [torch.ones(3, requires_grad=True)]

        def step(x: torch.Tensor) -> None:
            state[0] = x.sin()

        def region(x: torch.Tensor) -> torch.Tensor:
            step(x)
            return (state[0] * x).exp()

        return checkpoint(region, x)

    _assert_as_torch(program)


def test_list_passed_twice_is_one_list_in_the_rerun() -> None:
    def region(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
        a[0] = x.sin()
        return (b[0] * x).exp()

    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        both = [torch.ones(3, requires_grad=True)]
        return checkpoint(region, x, both, both)

    _assert_as_torch(program)


def test_dict_that_an_object_holds_too_is_one_dict_in_the_rerun() -> None:
    class Holder:
        def __init__(self) -> None:
            self.state = {"h": torch.ones(3, requires_grad=True)}

    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        holder = Holder()
        state = holder.state

        def region(x: torch.Tensor) -> torch.Tensor:
            holder.state["h"] = x.sin()
            return (state["h"] * x).exp()

        return checkpoint(region, x)

    _assert_as_torch(program)


@dataclasses.dataclass
class State:
    h: torch.Tensor

    def set(self, h: torch.Tensor) -> None:
        self.h = h


def test_dataclass_and_its_bound_method_are_one_object_in_the_rerun() -> None:
    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        state = State(torch.ones(3, requires_grad=True))
        set_state = state.set

        def region(x: torch.Tensor) -> torch.Tensor:
            set_state(x.sin())
            return (state.h * x).exp()

        return checkpoint(region, x)

    _assert_as_torch(program)


def test_variable_that_a_method_assigns_is_seen_by_the_rerun() -> None:
    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(3, requires_grad=True)

        class Setter:
            def set(self, value: torch.Tensor) -> None:
                nonlocal hidden
                hidden = value

        setter = Setter()

        def region(x: torch.Tensor) -> torch.Tensor:
            setter.set(x.sin())
            return (hidden * x).exp()

        return checkpoint(region, x)

    _assert_as_torch(program)


class Scaled(list[Any]):
    scale = 1.0


def test_attributes_of_a_list_subclass_are_there_in_the_rerun() -> None:
    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        scaled = Scaled([torch.ones(3)])
        scaled.scale = 2.0
        return checkpoint(lambda x, s: (x * s[0] * s.scale).exp(), x, scaled)

    _assert_as_torch(program)


class Two(tuple[Any, ...]):
    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


class Repeated(list[Any]):
    def __init__(self, count: int, value: Any) -> None:
        super().__init__([value] * count)


@pytest.mark.parametrize("make", [lambda x: Two(x, x), lambda x: Repeated(2, x)], ids=["tuple", "list"])
def test_subclasses_with_a_constructor_of_their_own_come_back(make: Callable[..., Any]) -> None:
    # TypeError out of backward.
    _assert_as_torch(lambda checkpoint, x: checkpoint(lambda pair: (pair[0] * pair[1]).exp(), make(x)))


@pytest.mark.parametrize("place", ["positional", "keyword", "module"])
def test_attributes_of_an_input_tensor_are_there_in_the_rerun(place: str) -> None:
    def region(t: torch.Tensor) -> torch.Tensor:
        return (t * getattr(t, "scale", 1.0)).exp()

    class Region(torch.nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return region(t)

    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        t = x * 2
        t.scale = 3.0
        return (
            checkpoint(region, t=t) if place == "keyword" else checkpoint(Region() if place == "module" else region, t)
        )

    _assert_as_torch(program)


def test_tensors_and_containers_keep_their_identity_where_the_function_asks_for_it() -> None:
    def program(checkpoint: Checkpoint, x: torch.Tensor) -> torch.Tensor:
        t = x * 2
        scale_of = {id(t): 3.0}
        return checkpoint(lambda t: (t * scale_of.get(id(t), 1.0)).exp(), t)

    _assert_as_torch(program)


def test_an_input_that_has_a_grad_fn_has_one_in_the_rerun() -> None:
    _assert_as_torch(
        lambda checkpoint, x: checkpoint(lambda t: (t * (1.0 if t.is_leaf else 3.0)).exp(), x * 2),
    )


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
