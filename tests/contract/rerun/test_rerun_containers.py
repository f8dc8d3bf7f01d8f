"""A rerun finds containers of the call as its forward found them, and leaves them as it finds them."""

from __future__ import annotations

import collections
import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from input_routes import METHODS, ROUTES
from oracle import Checkpoint, Log, assert_equal, in_threads, leaf, ours, plain, soon

import actckpt
from actckpt.errors import RerunMismatchError


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Data:
    value: Any


class Marked(list[Any]):
    value: Any = None


def _set(name: str) -> Callable[[Any, Any], None]:
    return lambda c, value: object.__setattr__(c, name, value)


def _total(values: Any) -> Any:
    total: Any = 0.0
    for value in values:
        total = total + value
    return total


@dataclasses.dataclass(frozen=True)
class Kind:
    """A container that holds values: how to make it, read it and change it."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any, Any], Any]


def _at(key: Any) -> Callable[[Any, Any], None]:
    return lambda c, value: c.__setitem__(key, value)


KINDS: dict[str, Kind] = {
    "item of a list": Kind(lambda: [2.0], lambda c: c[0], _at(0)),
    "list appended to": Kind(lambda: [2.0], _total, lambda c, v: c.append(v)),
    "list emptied": Kind(lambda: [2.0, 1.0], lambda c: _total(c) + len(c), lambda c, v: c.clear()),
    "list of a subclass": Kind(lambda: Marked([2.0]), lambda c: c[0], _at(0)),
    "value of a dict": Kind(lambda: {"a": 2.0}, lambda c: c["a"], _at("a")),
    "new key of a dict": Kind(lambda: {"a": 2.0}, lambda c: _total(c.values()), _at("b")),
    "key taken out": Kind(lambda: {"a": 2.0, "b": 3.0}, lambda c: _total(c.values()), lambda c, v: c.pop("a", 0)),
    "order of a dict": Kind(
        lambda: {"a": 2.0, "b": 3.0}, lambda c: next(iter(c.values())), lambda c, v: c.update(a=c.pop("a"))
    ),
    "ordered dict": Kind(
        lambda: collections.OrderedDict(a=2.0, b=3.0), lambda c: next(iter(c.values())), lambda c, v: c.move_to_end("a")
    ),
    "default dict": Kind(lambda: collections.defaultdict(float), lambda c: c["a"] + 2.0, _at("a")),
    "counter": Kind(lambda: collections.Counter(a=2), lambda c: c["a"], lambda c, v: c.update("a")),
    "set": Kind(lambda: {2.0}, lambda c: len(c) + 1.0, lambda c, v: c.add(v)),
    "deque": Kind(lambda: collections.deque([2.0, 1.0], maxlen=2), lambda c: c[0], lambda c, v: c.append(v)),
    "list in a tuple": Kind(lambda: (1.0, [2.0]), lambda c: c[1][0], lambda c, v: _at(0)(c[1], v)),
    "deep inside": Kind(
        lambda: {"a": [Data(collections.deque([[2.0]]))]},
        lambda c: c["a"][0].value[0][0],
        lambda c, v: _at(0)(c["a"][0].value[0], v),
    ),
}


class Slotted:
    __slots__ = ("other", "value")


#: Objects, whose state reruns do not restore, whatever holds it: audits compare what reruns compute.
OBJECTS: dict[str, Kind] = {
    "attribute": Kind(lambda: Plain(2.0), lambda c: c.value, _set("value")),
    "new slot": Kind(Slotted, lambda c: getattr(c, "other", 2.0), _set("other")),
    "user dict": Kind(lambda: collections.UserDict(a=2.0), lambda c: c["a"], _at("a")),
    "attribute of a function": Kind(lambda: lambda: None, lambda c: getattr(c, "value", 2.0), _set("value")),
}


def _gradient_and_state(method: Checkpoint, kind: Kind, region: Callable[..., Any], after: Any) -> list[Any]:
    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    container = kind.make()
    y = method(region, x, container)
    if after is not None:
        kind.change(container, after)
    result = []
    for _ in range(2):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        result += [grad, kind.read(container)]
    return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [5.0, torch.tensor([5.0, 6.0, 7.0])], ids=["number", "tensor"])
@pytest.mark.parametrize("name", KINDS)
def test_what_was_changed_after_the_forward_is_as_it_was_in_the_rerun(name: str, value: Any, method: str) -> None:
    kind = KINDS[name]

    def region(x: torch.Tensor, container: Any) -> torch.Tensor:
        return (x * kind.read(container)).exp()

    results = [_gradient_and_state(one, kind, region, value) for one in (plain, METHODS[method])]
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("makes_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", KINDS)
def test_what_the_function_itself_changes_is_changed_once(name: str, makes_tensor: bool, method: str) -> None:
    kind = KINDS[name]

    def region(x: torch.Tensor, container: Any) -> torch.Tensor:
        h = (x * kind.read(container)).exp()
        kind.change(container, h.sin() if makes_tensor and name != "set" else 4.0)
        return (h * kind.read(container)).exp().sin()

    results = [_gradient_and_state(one, kind, region, None) for one in (plain, METHODS[method])]
    assert_equal(_detached(results[1]), _detached(results[0]))


@pytest.mark.parametrize("method", ["plainly", "nested", "to the end"])
@pytest.mark.parametrize("is_changed_by", ["the function", "code after it"])
@pytest.mark.parametrize("name", OBJECTS)
def test_state_of_objects_that_changes_raises(name: str, is_changed_by: str, method: str) -> None:
    kind, is_own = OBJECTS[name], is_changed_by == "the function"

    def region(x: torch.Tensor, container: Any) -> torch.Tensor:
        h = (x * kind.read(container)).exp()
        if is_own:
            kind.change(container, 4.0 + kind.read(container))
        return h.sin()

    actckpt.configure(audit="always")  # until the fixture of all tests puts it back
    with pytest.raises(RerunMismatchError):
        _gradient_and_state(METHODS[method], kind, region, None if is_own else 5.0)


def _detached(values: list[Any]) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in values]


def _read_and_count(x: torch.Tensor, held: list[float]) -> torch.Tensor:
    held[0] += 1.0
    return (x * held[0]).exp()


#: Ways in which the call itself does not refer to the container.
_OUTSIDE = ["object", "method of an object", "object that can be called", "global", "global of another function"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", [route for route in ROUTES if route not in _OUTSIDE])
def test_containers_are_found_wherever_the_function_gets_them_from(route: str, method: str) -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        x, state = torch.tensor([0.1, 0.2, 0.3], requires_grad=True), [1.0]
        y = ROUTES[route](checkpoint, _read_and_count, x, state)
        left = list(state)
        state.append(7.0)
        y.sum().backward()
        return [x.grad, left, state]

    assert_equal(run(METHODS[method]), run(plain))


@pytest.mark.parametrize("route", _OUTSIDE)
def test_containers_in_objects_and_globals_that_change_raise(route: str) -> None:
    actckpt.configure(audit="always")
    with pytest.raises(RerunMismatchError):
        ROUTES[route](ours, _read_and_count, leaf(3), [1.0]).sum().backward()


def test_several_regions_that_share_one_container_each_find_what_their_forward_found() -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        x = h = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        past: list[torch.Tensor] = []

        def region(h: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
            past.append(h.sin())
            return torch.stack(past).cos().sum(0)

        for _ in range(4):
            h = checkpoint(region, h, past)
        lengths = [len(past)]
        h.sum().backward()
        return [x.grad, *lengths, len(past), [p.detach() for p in past]]

    assert_equal(run(ours), run(plain))
    assert_equal(run(METHODS["nested"]), run(plain))


def test_a_container_is_put_back_after_a_rerun_that_failed() -> None:
    runs = Log()

    def region(x: torch.Tensor, past: list[Any]) -> torch.Tensor:
        runs.append(1)
        past.append(1)
        if len(runs) > 1:
            raise KeyError("rerun")
        return (x * len(past)).exp()

    past = [0]
    y = ours(region, leaf(3), past)
    past.append(2)
    with pytest.raises(KeyError, match="rerun"):
        y.sum().backward()
    assert past == [0, 1, 2]


def test_a_container_that_the_forward_emptied_holds_its_objects_until_backward_only() -> None:
    held = leaf(3) * 2
    storage = weakref.ref(held.untyped_storage())
    past = [held]
    del held

    def region(x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        return (x * past.pop()).exp()

    y = ours(region, leaf(3), past)
    assert past == [] and storage() is not None
    y.sum().backward()
    del y
    assert soon(lambda: storage() is None)


def test_attributes_of_modules_are_left_as_a_second_call_leaves_them() -> None:
    # Frameworks keep state there which the rerun must find as the forward left it.
    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor, scale: list[float]) -> torch.Tensor:
            self.calls += 1
            return (x * scale[0]).exp()

    module = Stateful()
    ours(module, leaf(3), [2.0]).sum().backward()
    assert module.calls == 2


def test_two_threads_that_rerun_with_one_container_find_each_their_own() -> None:
    shared: list[float] = [1.0]
    x = [torch.tensor([0.1, 0.2, 0.3], requires_grad=True) for _ in range(2)]

    def region(x: torch.Tensor, state: list[float]) -> torch.Tensor:
        state[0] += 1.0
        scale = state[0]
        for _ in range(50):
            x = x * 1.0
            assert state[0] == scale
        return (x * scale).exp()

    for _ in range(20):
        shared[:] = [1.0]
        expected = [torch.autograd.grad((one * (i + 2.0)).exp().sum(), one)[0] for i, one in enumerate(x)]
        losses = [ours(region, one, shared, preserve_rng_state=False).sum() for one in x]
        found = in_threads(lambda i, losses=losses: torch.autograd.grad(losses[i], x[i])[0], 2)
        assert_equal(found, expected)
        assert shared == [3.0]


@pytest.mark.parametrize("method", METHODS)
def test_what_the_function_changes_and_changes_back_is_back_after_a_rerun_that_ends_early(method: str) -> None:
    def run(checkpoint: Checkpoint) -> list[Any]:
        past, ordered, depth = [1.0], collections.OrderedDict(a=2.0, b=3.0), 0

        def region(x: torch.Tensor, past: list[float]) -> torch.Tensor:
            nonlocal depth
            past.append(2.0)
            ordered.move_to_end("a")
            depth += 1
            y = (x * len(past) * depth * next(iter(ordered.values()))).exp()
            past.pop()
            ordered.move_to_end("b")
            depth -= 1
            return y

        torch.manual_seed(0)
        x = leaf(3)
        grads = []
        for _ in range(2):
            y = checkpoint(region, x, past) + checkpoint(region, x, past)
            grads += torch.autograd.grad(y.sum(), x)
        return [*grads, past, list(ordered), depth]

    expected, found = run(plain), run(METHODS[method])
    assert found[2:] == expected[2:]
    assert_equal(found[:2], expected[:2])


@pytest.mark.parametrize("container", [collections.OrderedDict(), set()], ids=["OrderedDict", "set"])
def test_a_tensor_that_the_forward_displaces_does_not_own_the_regions_before(container: Any) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        if isinstance(container, set):
            container.clear()
            container.add(y)
        else:
            container["last"] = y
        return y.sin()

    storages = []
    for _ in range(4):
        x = leaf(3) * 1
        storages.append(weakref.ref(x.untyped_storage()))
        ours(region, x)
        del x
    assert [storage() is None for storage in storages[:2]] == [True, True]


class OutOfContext:
    """A proxy that stands for nothing at the moment."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of its context")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise AssertionError


def test_objects_are_not_looked_through() -> None:
    state = Plain(2.0)
    state.program = [Plain({"values": list(range(1000))}) for _ in range(1000)]  # type: ignore[attr-defined]
    state.proxies = OutOfContext(), weakref.proxy(Log())  # type: ignore[attr-defined]  # the second one's is gone
    x, started = leaf(3), time.process_time()
    ours(lambda x: (x * state.value).exp(), x).sum().backward()
    assert x.grad is not None and time.process_time() - started < 1


class Present(list[Any]):
    """Shows only some of its elements."""

    def __iter__(self) -> Any:
        return (value for value in list.__getitem__(self, slice(None)) if value is not None)


def test_a_list_that_shows_other_elements_than_it_holds_is_left_alone() -> None:
    values = Present([1.0, None, 2.0])
    ours(lambda x, values: (x * values[0]).sin().cos(), leaf(3), values).sum().backward()
    assert list.__len__(values) == 3


def test_a_closure_variable_that_other_code_sets_during_a_rerun_stays() -> None:
    scale, runs = 2.0, Log()

    class Other:
        def run(self) -> None:
            nonlocal scale
            runs.append(1)
            if len(runs) == 2:
                scale = 5.0

    other = Other()
    ours(lambda x: ((x * scale).exp(), other.run())[0], leaf(3), early_stop=False).sum().backward()
    assert len(runs) == 2 and scale == 5.0
