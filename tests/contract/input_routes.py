"""Ways in which a function gets a value that it reads, and ways to call a module in a region."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import types
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from oracle import Checkpoint, ours
from torch import Tensor

import actckpt

Read = Callable[[Tensor, Any], Any]
#: Runs `read(x, held)` in a region: takes checkpoint, read, x, held.
Route = Callable[[Checkpoint, Read, Tensor, Any], Any]

Pair = namedtuple("Pair", ["number", "held"])


@dataclasses.dataclass
class Options:
    """A dataclass that holds it."""

    held: Any


class Reader:
    """An object that holds it, with a method, and called itself."""

    def __init__(self, read: Read, held: Any) -> None:
        self.read, self.held = read, held

    def run(self, x: Tensor) -> Tensor:
        """Read it."""
        return self.read(x, self.held)

    __call__ = run


def _in(make: Callable[[Any], Any], pick: Callable[[Any], Any]) -> Route:
    """Pass it inside of something."""
    return lambda ck, read, x, held: ck(lambda x, inside: read(x, pick(inside)), x, make(held))


def _in_closure_of_a_closure(ck: Checkpoint, read: Read, x: Tensor, held: Any) -> Any:
    def inner(x: Tensor) -> Tensor:
        return read(x, held)

    return ck(lambda x: inner(x), x)


def _in_keyword_default(ck: Checkpoint, read: Read, x: Tensor, held: Any) -> Any:
    def function(x: Tensor, *, held: Any = held) -> Tensor:
        return read(x, held)

    return ck(function, x)


def _in_a_class(ck: Checkpoint, read: Read, x: Tensor, held: Any) -> Any:
    class Layer:
        def forward(self, x: Tensor) -> Tensor:
            return read(x, held)

    return ck(Layer().forward, x)


GLOBAL: Any = None


def _get_global() -> Any:
    return GLOBAL


def _in_global(ck: Checkpoint, read: Read, x: Tensor, held: Any) -> Any:
    global GLOBAL
    GLOBAL = held
    return ck(lambda x: read(x, GLOBAL), x)


def _in_global_of_another_function(ck: Checkpoint, read: Read, x: Tensor, held: Any) -> Any:
    global GLOBAL
    GLOBAL = held
    return ck(lambda x: read(x, _get_global()), x)


ROUTES: dict[str, Route] = {
    "positional": lambda ck, read, x, held: ck(read, x, held),
    "keyword": lambda ck, read, x, held: ck(lambda x, *, held: read(x, held), x, held=held),
    "keyword list": lambda ck, read, x, held: ck(lambda x, *, items: read(x, items[0]), x, items=[held]),
    "list": _in(lambda held: [held], lambda v: v[0]),
    "tuple": _in(lambda held: (0, held), lambda v: v[1]),
    "dict": _in(lambda held: {"held": held}, lambda v: v["held"]),
    "ordered dict": _in(lambda held: OrderedDict(held=held, none=None), lambda v: v["held"]),
    "default dict": _in(lambda held: defaultdict(int, held=held), lambda v: v["held"]),
    "named tuple": _in(lambda held: Pair(1, held), lambda v: v.held),
    "dataclass": _in(Options, lambda v: v.held),
    "nested containers": _in(lambda held: {"a": [(1, {"held": held})]}, lambda v: v["a"][0][1]["held"]),
    "deque": _in(lambda held: collections.deque([held]), lambda v: v[0]),
    "object": _in(lambda held: types.SimpleNamespace(held=held), lambda v: v.held),
    "closure": lambda ck, read, x, held: ck(lambda x: read(x, held), x),
    "closure of a closure": _in_closure_of_a_closure,
    "function argument": _in(lambda held: lambda: held, lambda v: v()),
    "default": lambda ck, read, x, held: ck(lambda x, held=held: read(x, held), x),
    "keyword-only default": _in_keyword_default,
    "partial": lambda ck, read, x, held: ck(partial(lambda held, x: read(x, held), held), x),
    "partial keyword": lambda ck, read, x, held: ck(partial(read, held=held), x),
    "method of a class": _in_a_class,
    "method of an object": lambda ck, read, x, held: ck(Reader(read, held).run, x),
    "object that can be called": lambda ck, read, x, held: ck(Reader(read, held), x),
    "global": _in_global,
    "global of another function": _in_global_of_another_function,
}


def with_option(checkpoint: Checkpoint, **options: Any) -> dict[str, Any]:
    """Return options of our checkpoint, none for others."""
    return options if checkpoint is ours else {}


def _applied(ck: Checkpoint, m: torch.nn.Module, x: Tensor) -> Tensor:
    """Run it as a block, from its first call on."""
    if ck is ours and "forward" not in vars(m):
        actckpt.apply(torch.nn.Sequential(m), blocks="0")
    found: Tensor = m(x)
    return found


#: Runs a module in a region: takes checkpoint, module, x.
MODULE_CALLS: dict[str, Callable[[Checkpoint, Any, Tensor], Tensor]] = {
    "module": lambda ck, m, x: ck(m, x),
    "forward": lambda ck, m, x: ck(m.forward, x),
    "__call__": lambda ck, m, x: ck(m.__call__, x),
    "method": lambda ck, m, x: ck(MethodType(lambda self, x: self(x), m), x),
    "method without a name": lambda ck, m, x: ck(MethodType(partial(lambda self, x: self(x)), m), x),
    "closure": lambda ck, m, x: ck(lambda x: m(x), x),
    "partial": lambda ck, m, x: ck(partial(m), x),
    "argument": lambda ck, m, x: ck(lambda m, x: m(x), m, x),
    "keyword": lambda ck, m, x: ck(lambda x, *, m: m(x), x, m=m),
    "keyword of the module": lambda ck, m, x: ck(m, **{next(iter(inspect.signature(m.forward).parameters)): x}),
    "list": lambda ck, m, x: ck(lambda x, modules: modules[0](x), x, [m]),
    "weak reference": lambda ck, m, x: ck(lambda x, reference: reference()(x), x, weakref.ref(m)),
    "twice": lambda ck, m, x: ck(m, ck(m, x)),
    "nested": lambda ck, m, x: ck(lambda x: ck(m, x.sin()), x),
    "debug": lambda ck, m, x: ck(m, x, **with_option(ck, debug=True)),
    "applied": _applied,
    "to the end": lambda ck, m, x: ck(m, x, **with_option(ck, early_stop=False)),
}


def _hooked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Inside saved-tensor hooks, inputs are held packed and built again."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(),), lambda packed: packed[0]):
        return ours(function, *args, **kwargs)


#: Our checkpoint, called in one of these ways.
METHODS: dict[str, Checkpoint] = {
    "plainly": ours,
    "inside hooks": _hooked,
    "nested": lambda function, *args, **kwargs: ours(lambda: ours(function, *args, **kwargs) * 1.0),
    "to the end": partial(ours, early_stop=False),
    "without random state": partial(ours, preserve_rng_state=False),
    "debug": partial(ours, debug=True),
}
