"""What the contract tests compare: plain autograd, torch's checkpoint, and ours, on the same program."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import on_device
import torch
import torch.utils.checkpoint
from on_device import random_states
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt

Checkpoint = Callable[..., Any]


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call without checkpointing."""
    return function(*args, **kwargs)


def theirs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call through torch's non-reentrant checkpoint."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def soon(holds: Callable[[], bool]) -> bool:
    """Whether a condition holds: on a device within a minute, since its thread lets go of a graph after backward."""
    deadline = time.monotonic() + 60
    while on_device.device_type != "cpu" and not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return holds()


ours = actckpt.checkpoint
BOTH = {"torch": theirs, "actckpt": ours}


def in_region(policy: Any = "recompute") -> Checkpoint:
    """Return a method that calls a function inside of a region."""

    def method(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with actckpt.region(policy):
            return function(*args, **kwargs)

    return method


def in_offload(method: Checkpoint = plain, **options: Any) -> Checkpoint:
    """Return a method that calls another one inside of `offload`, which moves tensors of all sizes."""

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with actckpt.offload(**{"min_bytes": 0, **options}):
            return method(*args, **kwargs)

    return offloaded


class Log:
    """What runs of a function append, reruns too, which undo what they do to a list.

    They leave alone what has a lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[Any] = []

    def append(self, item: Any) -> None:
        """Add an item at the end."""
        with self._lock:
            self._items.append(item)

    def clear(self) -> None:
        """Forget all items."""
        self._items.clear()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __eq__(self, other: object) -> bool:
        return self._items == list(other) if isinstance(other, Log | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Log({self._items})"


class CountOperators(TorchDispatchMode):
    """Count the operators that run inside the `with` block, without the bookkeeping's `detach`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """All operators seen."""
        return sum(self.counts.values())


def num_checksums(program: Callable[[], object]) -> int:
    """Return how many checksums audits of a program compute, which runs no `arange` itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:  # modes do not see them
        program()
    return sum(event.name == "aten::arange" for event in profiler.events())


def assert_equal(left: Any, right: Any) -> None:
    """Raise unless two nested results are bit-equal."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert torch.equal(left, right), f"largest difference {(left - right).abs().max()}"
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_equal(left[name], right[name])
    else:
        assert left == right


class Programs(dict[str, Callable[..., Any]]):
    """A table of programs by what they do, which is the name of the function. A decorator."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add a program."""
        self[function.__name__.replace("_", " ")] = function
        return function

    def each(self, **values: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a program once for each combination of values of its keywords; a dict has names for them."""
        named = [
            v.items() if isinstance(v, dict) else [(getattr(o, "__name__", o), o) for o in v] for v in values.values()
        ]

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for chosen in itertools.product(*named):
                name = " ".join([function.__name__, *(f"{k}={n}" for k, (n, _) in zip(values, chosen, strict=True))])
                keywords = {key: value for key, (_, value) in zip(values, chosen, strict=True)}
                self[name.replace("_", " ")] = partial(function, **keywords)
            return function

        return add


def assert_as_plain(program: Callable[[Checkpoint], Any], *, with_torch: bool = True) -> Any:
    """Run `program` plainly, with torch's checkpoint and with ours from one seed: all results are bit-equal."""
    results = {}
    for name, method in {"plain": plain, **BOTH}.items():
        if name != "torch" or with_torch:
            torch.manual_seed(7)
            results[name] = (program(method), random_states())
    for name in results:
        assert_equal(results[name], results["plain"])
    return results["actckpt"][0]


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Run `work(i)` in `count` threads that start together; return what they return or raise."""
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@contextmanager
def no_collector() -> Iterator[None]:
    """Free inside the block only what nobody refers to."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Saves(torch.autograd.Function):
    """Twice its first argument. Saves the second one, of any kind, for `backward`, which subclasses have."""

    @staticmethod
    def forward(ctx: Any, x: Any, saved: Any) -> Any:
        """Save the tensor."""
        ctx.save_for_backward(saved)
        return x * 2


class SavingSquare(torch.autograd.Function):
    """The square of its argument, which it saves for `backward`, which subclasses have."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Save the argument."""
        ctx.save_for_backward(x)
        return x * x


class FailsInBackward(torch.autograd.Function):
    """A copy of its argument, whose backward raises an `ArithmeticError`."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Fail."""
        raise ArithmeticError("in backward")


def leaf(*shape: int, **options: Any) -> torch.Tensor:
    """Return a random tensor that requires grad."""
    return torch.randn(*shape, requires_grad=True, **options)


def mlp(width: int = 8, depth: int = 2, dropout: float = 0.0) -> torch.nn.Sequential:
    """Return a small stack of Linear, GELU and Dropout."""
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU()]
        if dropout:
            layers.append(torch.nn.Dropout(dropout))
    return torch.nn.Sequential(*layers)


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter."""
    return [parameter.grad for parameter in model.parameters()]
