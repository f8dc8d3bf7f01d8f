"""Which operators lead to which bytes: the graph that a region records and replay walks.

NOTE [ Lineage ]

A *value* is what a storage holds at one version. A *step* is one recorded call of an operator: it reads
values and makes values. A tensor is a *window* on a value: dtype, shape, strides, offset, conj and neg bits.
So views need no step of their own, and one replayed storage serves all of them.

References point from a saved tensor's handle to its value, from a value to the step that makes it, from a
step to the values that it reads, and never the other way. What no handle leads to is therefore freed by
reference counting alone: when a graph dies, and piece by piece while backward frees its nodes.

A value whose bytes are at hand (`held`, `stored`, `cached`) needs no step. One that must not be computed again
(kept, offloaded, opaque) has none, so nothing before it is kept alive on its account.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt.action import Action
from actckpt.runtime.replay.operators import Operator

__all__ = ["Block", "Step", "Value", "Window", "is_obtainable", "window_of"]


class Window(NamedTuple):
    """A tensor, as geometry on a value."""

    value: "Value"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    is_conj: bool
    is_neg: bool


class Value:
    """The bytes of one storage at one version."""

    __slots__ = (
        "__weakref__",
        "action",
        "cached",
        "cached_task",
        "device",
        "entry",
        "handles",
        "held",
        "hold_bytes",
        "index",
        "is_candidate",
        "is_input",
        "is_parameter",
        "key",
        "nbytes",
        "operator",
        "ordinal",
        "root",
        "spare",
        "step",
        "stored",
        "version",
        "why_opaque",
    )

    def __init__(self, nbytes: int, device: torch.device, ordinal: int) -> None:
        self.nbytes = nbytes
        self.device = device
        #: How many values the region had before.
        self.ordinal = ordinal
        #: What makes it, and as which of its results; None: nothing that may be executed again.
        self.step: Step | None = None
        self.index = 0
        #: What made it, also where it is not to be replayed.
        self.operator: Operator | None = None
        #: None until a policy that is asked per saved tensor was asked.
        self.action: Action | None = None
        #: A tensor on these bytes that keeps them.
        self.held: Tensor | None = None
        #: The version of these bytes, -1 until somebody looks, and whose counter tells it: two tensors on one storage
        #: need not share a counter (`unsafe_chunk`, `Tensor.data`).
        self.version = -1
        self.root: weakref.ref[Tensor] | None = None
        #: What brings the bytes back from a store, or through the hooks outside: a callable.
        self.stored: Any = None
        #: Replayed for the backward `cached_task`.
        self.cached: Tensor | None = None
        self.cached_task = -1
        #: A tensor on the bytes of a dropped value, until the region closes and decides (`is_candidate`).
        self.spare: Tensor | None = None
        self.is_input = False
        self.is_parameter = False
        #: Why it cannot be replayed, for reports. Empty: it can.
        self.why_opaque = ""
        #: Fewest bytes that must be held to have it back (an upper bound).
        self.hold_bytes = nbytes
        #: Recomputing it may hold more than keeping it.
        self.is_candidate = False
        #: Names its place in the structure that the region runs, for audits.
        self.key = 0
        #: Its line in the report.
        self.entry: Any = None
        self.handles: list[weakref.ref[Any]] = []

    def is_at_hand(self) -> bool:
        """Whether the bytes can be had without executing anything."""
        return self.held is not None or self.stored is not None or self.cached is not None


class Step:
    """One recorded call of an operator."""

    __slots__ = ("args", "grad_enabled", "inputs", "kwargs", "operator", "outputs", "random", "results", "written")

    def __init__(self, operator: Operator, args: list[Any], kwargs: dict[str, Any] | None, inputs: list[Value]) -> None:
        self.operator = operator
        #: With windows in the place of tensors.
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        #: Some kernels (recurrent layers of oneDNN) look at it.
        self.grad_enabled = torch.is_grad_enabled()
        #: Generator states from before the call, None: it draws no random numbers.
        self.random: Any = None
        #: The values that it makes, and where to find each: (0, i): the i-th tensor that it returns; (1, i): the
        #: i-th entry of `written`.
        self.outputs: list[weakref.ref[Value]] = []
        self.results: list[tuple[int, int]] = []
        #: The values that it overwrites, each once.
        self.written: list[Value] = []

    def add_output(self, value: Value, place: tuple[int, int]) -> None:
        """Note that this call makes `value`."""
        value.step = self
        value.index = len(self.outputs)
        self.outputs.append(weakref.ref(value))
        self.results.append(place)


class Block:
    """A storage that the recorder knows: recognised by identity, never by address (Rule 2)."""

    __slots__ = ("storage", "value", "writes")

    def __init__(self, storage: Any, value: Value) -> None:
        self.storage = weakref.ref(storage)
        #: What it holds now.
        self.value = value
        #: Windows written since it was allocated, while it is uninitialised.
        self.writes: list[Window] | None = None


def window_of(tensor: Tensor, value: Value) -> Window:
    """Return the geometry of `tensor`, whose bytes are those of `value`."""
    dtype = tensor.dtype
    return Window(
        value,
        dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        dtype.is_complex and tensor.is_conj(),
        tensor.is_neg(),
    )


def is_obtainable(value: Value) -> bool:
    """Whether the bytes are at hand, or can be replayed from what is."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if id(current) in seen or current.is_at_hand():
            continue
        if current.step is None:
            return False
        seen.add(id(current))
        pending.extend(current.step.inputs)
    return True
