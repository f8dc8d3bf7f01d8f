"""What a backward caches is released when it ends: also when it fails, at once, and with the graph still alive."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import on_device
import pytest
import torch
from internals.stores import PythonStore, Tested, flush, store_in_memory, using
from oracle import in_offload, in_region, in_threads, plain
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import actckpt
from actckpt.memory import LiveStorages

_N = 64
_BYTES = _N * _N * 4


class FailError(Exception):
    """What the hook raises."""


class Graph(NamedTuple):
    """A forward that ran, and a tensor in the middle of it whose gradient can be made to fail."""

    loss: Tensor
    middle: Tensor
    inputs: list[Tensor]


def _parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(_N, _N, generator=generator).div_(8).requires_grad_() for _ in range(4)]


Pair = tuple[Tensor, Tensor]


def _layers(x: Tensor, *weights: Tensor) -> Pair:
    """Each value is saved more than once, and made from others that are saved. Returns one in the middle, too."""
    middle = x
    for i, weight in enumerate(weights):
        h = x @ weight
        g = h.exp() * 0.01
        middle = g if i == len(weights) // 2 else middle
        x = g.sin() * g.cos() + h.tanh()
    return x, middle


def _on_few_bytes(x: Tensor, *weights: Tensor) -> Pair:
    """What is kept is small, and what is replayed from it large."""
    middle = x
    for i, weight in enumerate(weights):
        few = x @ weight[:, :1]
        large = few * x
        a = large.sin()
        middle = a if i == len(weights) // 2 else middle
        x = a * large.cos() + large.tanh()
    return x, middle


def _outside(function: Callable[..., Pair], *args: Any, **kwargs: Any) -> Pair:
    with save_on_cpu(), actckpt.region(policy="recompute"):
        return function(*args, **kwargs)


_plain = plain
METHODS: dict[str, Callable[..., Pair]] = {
    "rerun": actckpt.checkpoint,
    "replay from kept values": in_region([torch.ops.aten.mm.default]),
    "replay": in_region(),
    "replay from a store": in_region(actckpt.policies.PerOp({"aten.mm.default": "offload"}, default="recompute")),
    "offload": in_offload(),
    "hooks outside": _outside,
}
_METHODS = pytest.mark.parametrize("method", METHODS)
_PROGRAMS = pytest.mark.parametrize("program", [_layers, _on_few_bytes], ids=["layers", "on few bytes"])


pytestmark = pytest.mark.usefixtures("no_audit", "store_in_memory")


def _graph(method: Callable[..., Pair], program: Callable[..., Pair]) -> Graph:
    inputs = [torch.linspace(-1, 1, _N * _N).view(_N, _N).requires_grad_(), *_parameters()]
    result, middle = method(program, *inputs)
    flush()
    return Graph(result.sum(), middle, inputs)


Act = Callable[[], object]


class _Hook:
    """Calls `act` once when a backward reaches the middle of the graph, and records the live bytes there."""

    def __init__(self, live: LiveStorages, graph: Graph) -> None:
        self._live = live
        self.act: Act | None = None
        self.live_bytes = 0
        self.handle = graph.middle.register_hook(self)

    def __call__(self, grad: Tensor) -> None:
        act, self.act = self.act, None
        self.live_bytes = self._live.live_bytes
        if act is not None:
            with torch.enable_grad():
                act()


def _raise() -> None:
    raise FailError


def _interrupt() -> None:
    raise KeyboardInterrupt


def _signal() -> None:
    signal.raise_signal(signal.SIGINT)


FAILURES = {"raises": _raise, "is interrupted": _interrupt, "gets a signal": _signal}


@pytest.fixture(autouse=True)
def _signals_interrupt() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _live_bytes(live: LiveStorages) -> int:
    """Count after copies under way have ended, and the thread of a device has let go of the backward that it ran."""
    if on_device.device_type != "cpu":  # torch tells the caller first, whoever lets go last frees what is cached
        time.sleep(0.02)
    flush()
    return live.live_bytes


def _expected(program: Callable[..., Pair]) -> list[Tensor]:
    graph = _graph(_plain, program)
    return list(torch.autograd.grad(graph.loss, graph.inputs))


def _succeeds(graph: Graph, program: Callable[..., Pair] = _layers, retain: bool = False) -> None:
    found = torch.autograd.grad(graph.loss, graph.inputs, retain_graph=retain)
    assert all(map(torch.equal, found, _expected(program)))


def _fails(graph: Graph, retain: bool, hook: _Hook, act: Act = _raise) -> None:
    """Run a backward that fails, and let go of the error."""
    hook.act = act
    try:
        torch.autograd.grad(graph.loss, graph.inputs, retain_graph=retain)
    except (FailError, KeyboardInterrupt):
        return
    pytest.fail("it did not fail")


@_METHODS
@_PROGRAMS
@pytest.mark.parametrize("seed", range(6))
def test_no_backward_leaves_more_bytes_than_it_found(method: str, program: Callable[..., Pair], seed: int) -> None:
    """Whether it fails, is of a part, or runs others inside, over the same graph or another one.

    Two graph tasks may use one region at once: the end of each takes what is its own.
    """
    draw = random.Random(f"{method} {program.__name__} {seed}")
    with LiveStorages() as live:
        graph, other = _graph(METHODS[method], program), _graph(METHODS[draw.choice(list(METHODS))], _layers)
        hook, of_other, middle = _Hook(live, graph), _Hook(live, other), graph.middle if seed % 2 else graph.loss
        graph, other = (each._replace(middle=each.loss) for each in (graph, other))

        def leaves_nothing(run: Act) -> None:
            before = _live_bytes(live)
            run()
            assert _live_bytes(live) <= before

        insides: list[Act] = [
            lambda: None,
            lambda: _succeeds(graph, program, retain=True),
            lambda: _succeeds(other, retain=True),
            lambda: leaves_nothing(lambda: _fails(other, True, of_other)),
            lambda: torch.autograd.grad(graph.loss, middle, retain_graph=True),
        ]
        before = _live_bytes(live)
        for _ in range(6):
            inside, fail = draw.choice(insides), FAILURES[draw.choice(list(FAILURES))]
            if draw.random() < 0.5:
                leaves_nothing(lambda inside=inside, fail=fail: _fails(graph, True, hook, lambda: (inside(), fail())))
                assert hook.live_bytes > before, "nothing was cached"
            else:
                hook.act = inside
                leaves_nothing(draw.choice(insides[1:]))
        for each in (hook, of_other):
            each.handle.remove()  # it refers to the graph that it is in: a cycle that the collector does not see


@_METHODS
@_PROGRAMS
@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_backward_that_frees_its_graph_leaves_no_more_bytes_than_it_found(
    method: str, program: Callable[..., Pair], how: str
) -> None:
    with LiveStorages() as live:
        graph = _graph(METHODS[method], program)
        hook = _Hook(live, graph)
        graph = graph._replace(middle=graph.loss)
        before = _live_bytes(live)
        _fails(graph, False, hook, FAILURES[how])
        assert hook.live_bytes > before, "nothing was cached"
        # What was in the store may be gone from there: what was made from it is held instead.
        assert _live_bytes(live) <= before + (_BYTES if method == "replay from a store" else 0)


@_METHODS
def test_what_a_failed_backward_left_of_the_graph_gives_equal_gradients(method: str) -> None:
    """Without `retain_graph`, what comes after the failure can run backward still."""

    def gradients(method: Callable[..., Pair], fails: bool) -> list[Tensor]:
        with LiveStorages() as live:
            graph = _graph(method, _on_few_bytes)
            hook = _Hook(live, graph)
            if fails:
                _fails(graph, False, hook)
            hook.handle.remove()
            return list(torch.autograd.grad(graph.middle.sum(), graph.inputs[:3]))

    expected = gradients(_plain, False)
    assert all(map(torch.equal, gradients(METHODS[method], True), expected))


def test_values_of_a_group_go_when_one_of_its_backwards_fails() -> None:
    group = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    if group is None:
        pytest.skip(f"torch {torch.__version__} has no GraphExecGroup")
    with LiveStorages() as live:
        graph = _graph(METHODS["rerun"], _layers)
        hook = _Hook(live, graph)
        graph = graph._replace(middle=graph.loss)
        before = _live_bytes(live)
        with group():
            _fails(graph, True, hook)
            assert hook.live_bytes > before
            assert _live_bytes(live) <= before
            hook.handle.remove()
            _succeeds(graph)


@_METHODS
def test_a_double_backward_that_fails_leaves_no_more_bytes_than_it_found(method: str) -> None:
    def twice(method: Callable[..., Pair]) -> Graph:
        graph = _graph(method, _layers)
        firsts = torch.autograd.grad(graph.loss, graph.inputs, create_graph=True)
        return graph._replace(loss=torch.stack([first.square().sum() for first in firsts]).sum())

    with LiveStorages() as live:
        graph = twice(METHODS[method])
        hook = _Hook(live, graph)
        before = _live_bytes(live)
        _fails(graph, True, hook)
        assert _live_bytes(live) <= before
        found = torch.autograd.grad(graph.loss, graph.inputs)
    plain_graph = twice(plain)
    assert all(map(torch.equal, found, torch.autograd.grad(plain_graph.loss, plain_graph.inputs)))


@_METHODS
def test_backwards_in_several_threads_fail_and_succeed_apart(method: str) -> None:
    """Over one graph that all of them retain."""
    graph = _graph(METHODS[method], _layers)
    expected = _expected(_layers)

    def hook(grad: Tensor) -> None:
        if grad.isnan().any():  # the thread of a device runs hooks of all backwards
            raise FailError

    graph.middle.register_hook(hook)
    graph = graph._replace(middle=graph.loss)

    def work(number: int) -> None:
        fails = number % 2 == 0
        scale = torch.full((), float("nan") if fails else 1.0)
        for _ in range(6):
            try:
                found = torch.autograd.grad(graph.loss, graph.inputs, scale, retain_graph=True)
            except FailError:
                assert fails, "a backward failed that should not"
            else:
                assert not fails and all(map(torch.equal, found, expected))

    in_threads(work, 4)
    with LiveStorages() as live:
        torch.autograd.grad(graph.loss, graph.inputs, retain_graph=True)
        assert _live_bytes(live) == 0


def test_a_saved_tensor_can_be_read_again_outside_of_a_backward() -> None:
    with actckpt.region(policy=[torch.ops.aten.mm.default]):
        b = (torch.eye(4, requires_grad=True) @ torch.eye(4)) * 2
        y = b.sin() + b.cos()
    y.sum().backward(retain_graph=True)
    node: Any = y.grad_fn
    for _ in range(2):
        assert torch.equal(node.next_functions[0][0]._saved_self, b.detach())


class _RecordingStore(PythonStore):
    """Notes which tickets are asked for, those read ahead too, each once, by their place among those put."""

    def __init__(self, inner: Tested) -> None:
        super().__init__(inner)
        self._put: list[Any] = []
        self.read: list[int] = []

    def put(self, source: Any, nbytes: int, *, must: bool = True) -> Any | None:
        ticket = super().put(source, nbytes, must=must)
        self._put.append(ticket)
        return ticket

    def fetch(self, ticket: Any) -> Any:
        self._note(ticket)
        return super().fetch(ticket)

    def prefetch(self, ticket: Any) -> Any:
        self._note(ticket)
        return super().prefetch(ticket)

    def _note(self, ticket: Any) -> None:
        place = next(index for index, each in enumerate(self._put) if each is ticket)
        if place not in self.read:
            self.read.append(place)


def test_the_order_of_a_backward_without_retained_graph_is_learnt() -> None:
    """Three values are saved; the first is saved again after the second, so that backward reads it before that."""
    read = []
    for _ in range(2):
        store = _RecordingStore(store_in_memory())
        x = torch.linspace(-1, 1, 77 * 78).view(77, 78).requires_grad_()
        with using(store):
            with actckpt.offload(min_bytes=0):
                first = x.exp()
                y = x.sigmoid().sum() + (first * first).sum() + x.tanh().sum()
            del first
            store.inner.flush()
            y.backward()
        read.append(store.read)
    assert read == [[2, 1, 0], [2, 0, 1]]
