"""Making room: what holders give up comes back bit-identical, whenever, wherever and however often they are asked."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from internals.stores import flush, store_of_kind
from oracle import assert_equal
from random_programs import ByDepth, Drawn, draws, many_draws, outcome
from test_backward_ends import METHODS, _graph, _layers, _live_bytes, _on_few_bytes, _plain
from torch import Tensor

import actckpt
from actckpt import _C, _bind
from actckpt._core import pressure, torch_private
from actckpt._replay import active_region
from actckpt.memory import LiveStorages

_ALL = 1 << 60
_METHODS = pytest.mark.parametrize("method", METHODS)
_PROGRAMS = pytest.mark.parametrize("program", [_layers, _on_few_bytes], ids=["layers", "on few bytes"])
_RETAINS = pytest.mark.parametrize("retain", [True, False], ids=["retained", "not retained"])
#: Which holder a way back fills.
_HOLDERS = {
    "rerun": "rerun values",
    "replay from kept values": "replay caches",
    "replay": "replay caches",
    "replay from a store": "replay caches",
    "offload": "read-ahead",
}
#: Where a backward frees its graph, what these replayed from is gone soon.
_FROM_OTHERS = ("replay from kept values", "replay from a store")


@pytest.fixture(autouse=True)
def _store_in_memory() -> Iterator[None]:
    actckpt.configure(audit="off")  # until the fixture of all tests puts it back
    with store_of_kind("memory"):
        yield


@contextmanager
def pressed_inside(press: Callable[[], object]) -> Iterator[None]:
    """Press wherever the extension asks which backward is under way: before anything is brought back."""
    is_pressing = threading.local()

    def graph_task_id() -> int:
        if not getattr(is_pressing, "now", False):
            is_pressing.now = True
            try:
                press()
            finally:
                is_pressing.now = False
        return torch_private.current_graph_task_id()

    _C.connect(_bind.NAMES | {"graph_task_id": graph_task_id})
    try:
        yield
    finally:
        _C.connect(_bind.NAMES)


def _gradients(method: str, program: Any, press: Callable[[], object], retain: bool) -> list[Tensor]:
    graph = _graph(METHODS[method], program)
    graph.middle.register_hook(lambda grad: press() and None)
    graph = graph._replace(middle=graph.loss)
    found = list(torch.autograd.grad(graph.loss, graph.inputs, retain_graph=retain))
    if retain:
        again = torch.autograd.grad(graph.loss, graph.inputs)
        assert all(map(torch.equal, found, again))
    return found


def _expected(program: Any) -> list[Tensor]:
    graph = _graph(_plain, program)
    return list(torch.autograd.grad(graph.loss, graph.inputs))


@_METHODS
@_PROGRAMS
@_RETAINS
def test_pressing_in_the_middle_of_a_backward_gives_equal_gradients(method: str, program: Any, retain: bool) -> None:
    given: list[dict[str, int]] = []
    found = _gradients(method, program, lambda: given.append(pressure.release(_ALL)), retain)
    assert all(map(torch.equal, found, _expected(program)))
    if method in _HOLDERS and (retain or method not in _FROM_OTHERS):
        assert given[0][_HOLDERS[method]] > 0, given


def test_pressing_while_a_replayed_value_dies_does_not_free_it_twice() -> None:
    given: list[int] = []
    x = torch.randn(4, requires_grad=True)
    with actckpt.region():
        y = x.sin().exp()
        tape = active_region._local.tape

    def hook(grad: Tensor) -> None:
        value = _C.Value(16, x.device, 9)
        _C.cache(tape, value, torch.randn(4), torch_private.current_graph_task_id())
        reference = weakref.ref(value, lambda _: given.append(pressure.release(_ALL)["replay caches"]))
        del value
        assert reference() is None

    y.register_hook(hook)
    y.sum().backward()
    assert given == [0]


@pytest.mark.parametrize("method", ["rerun", "replay", "replay from kept values"])
def test_as_many_bytes_are_free_as_the_holder_says(method: str) -> None:
    with LiveStorages() as live:
        graph = _graph(METHODS[method], _layers)
        seen: list[tuple[int, int]] = []

        def hook(grad: Tensor) -> None:
            before = live.live_bytes
            given = pressure.release(_ALL)
            seen.append((sum(given.values()), before - live.live_bytes))

        graph.middle.register_hook(hook)
        torch.autograd.grad(graph.loss, graph.inputs, retain_graph=True)
        ((said, freed),) = seen
        assert said == freed > 0


def test_bytes_that_wait_for_other_saved_tensors_are_reloads() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with actckpt.offload(min_bytes=0):
        h = x.exp()
        y = h.sin()
        z = (y + h.cos()).sum()
    flush()
    given: list[dict[str, int]] = []
    node: Any = y.grad_fn  # it runs after the one of `cos`; both saved `h`
    node.register_prehook(lambda grads: given.append(pressure.release(_ALL)))
    found = torch.autograd.grad(z, x)[0]
    assert given[0]["reloads"] == h.nbytes
    plain = x.exp()
    assert torch.equal(found, torch.autograd.grad((plain.sin() + plain.cos()).sum(), x)[0])


def test_only_as_much_is_asked_for_as_is_missing() -> None:
    graph = _graph(METHODS["replay"], _layers)
    seen: list[Any] = []

    def hook(grad: Tensor) -> None:
        seen.append(pressure.release(0))
        seen.append(pressure.release(1))
        seen.append(pressure.release(_ALL))

    graph.middle.register_hook(hook)
    torch.autograd.grad(graph.loss, graph.inputs)
    nothing, one, rest = seen
    assert nothing == {}
    assert list(one) == ["read-ahead", "reloads", "replay caches"]
    assert one["replay caches"] == 64 * 64 * 4
    assert list(rest) == list(pressure.ORDER)
    assert rest["replay caches"] > 0


def test_every_holder_is_registered_once() -> None:
    assert set(pressure._holders) == set(pressure.ORDER)
    for name in ("replay caches", "unknown"):
        with pytest.raises(ValueError, match=name):
            pressure.register(name, lambda nbytes: 0)


def test_nothing_is_given_where_nothing_is_held() -> None:
    assert set(pressure.release(_ALL).values()) == {0}


@_METHODS
def test_pressing_from_another_thread_gives_equal_gradients(method: str) -> None:
    expected = _expected(_layers)
    is_over = threading.Event()
    problems: list[BaseException] = []

    def press() -> None:
        try:
            while not is_over.is_set():
                pressure.release(random.choice((1, 1 << 15, _ALL)))
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        for retain in (False, True, False):
            found = _gradients(method, _layers, lambda: None, retain)
            assert all(map(torch.equal, found, expected))
    finally:
        is_over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not problems


def test_a_rerun_after_pressing_brings_back_only_what_is_needed_still() -> None:
    with LiveStorages() as live:
        held: list[list[int]] = []
        for presses in (False, True):
            graph = _graph(METHODS["rerun"], _layers)
            seen: list[int] = []
            graph.middle.register_hook(lambda grad, p=presses: (pressure.release(_ALL) and None) if p else None)
            graph.inputs[0].register_hook(lambda grad, seen=seen: seen.append(live.live_bytes))
            before = _live_bytes(live)
            torch.autograd.grad(graph.loss, graph.inputs, retain_graph=True)
            held.append([bytes_ - before for bytes_ in seen])
            assert _live_bytes(live) == before
            del graph
        assert held[1] <= held[0]


@many_draws
@given(drawn=draws, ways=st.lists(st.sampled_from(sorted(METHODS)), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_pressing_at_random_points_of_random_programs_gives_equal_gradients(
    drawn: Drawn, ways: list[str], seed: int
) -> None:
    chosen = random.Random(seed)

    def press() -> None:
        if chosen.random() < 0.5:
            pressure.release(chosen.choice((1, 1 << 7, _ALL)))

    region = ByDepth([METHODS[way] for way in ways])

    def pressed(*args: Any, **kwargs: Any) -> list[Tensor]:
        made: list[Tensor] = region(*args, **kwargs)
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: press())
        return made

    expected = outcome(_plain, drawn)
    with pressed_inside(press):
        assert_equal(outcome(pressed, drawn), expected)
