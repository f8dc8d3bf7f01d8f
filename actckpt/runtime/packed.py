"""Inputs of a region inside other saved-tensor hooks: held packed, and built again for each rerun.

NOTE [ Packed inputs ]

Rule 1. Tensors in args, kwargs, tuples, lists, dicts, dataclasses, and in the closure cells and defaults of
        functions go through the hooks outside, each once. What holds one is built again for a rerun; the
        rest is passed as it is. One object is built once per rerun, so what was one object is one then.
Rule 2. A container or a closure variable that the forward itself changed stays as it is: somebody else
        refers to it too, and it will be changed again.
Rule 3. Containers of other types, and objects, are passed as they are; they keep their tensors alive.
"""

import dataclasses
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _frames
from actckpt.runtime.inputs import (
    EMPTY_CELL,
    Call,
    HeldTensorChanged,
    Originals,
    Survey,
    changed_error,
    contents_of,
    is_of_module,
)

__all__ = ["Packed", "SavedThroughFunction"]


class _HeldContainer:
    """A tuple, list, dict or partial that holds tensors, and how to build it again."""

    __slots__ = ("_original", "_read", "build", "live", "parts")

    def __init__(
        self, original: Any, read: Callable[[Any], list[Any]], build: Callable[[list[Any]], Any], parts: list[Any]
    ) -> None:
        self._original = original  # until the forward is done
        self._read = read
        self.build = build
        self.parts = parts
        #: The container itself, where it has to stay (Rule 2).
        self.live: Any = None

    def forward_done(self, before: list[Any]) -> None:
        now = self._read(self._original)
        if len(now) != len(before) or any(new is not old for new, old in zip(now, before, strict=True)):
            self.live = self._original
        self._original = None


class _HeldFunction:
    """A function whose closure or defaults hold tensors."""

    __slots__ = ("cells", "defaults", "function", "kwdefaults")

    def __init__(self, function: types.FunctionType, holding: "_Holding") -> None:
        # Not the function itself: its cells keep the tensors alive.
        self.function = (function.__code__, function.__globals__, function.__name__, function.__dict__)
        self.defaults = holding.hold(function.__defaults__)
        self.kwdefaults = holding.hold(function.__kwdefaults__)
        self.cells = [holding.hold_cell(cell) for cell in function.__closure__ or ()]


class _HeldCell:
    """A closure cell: itself where it stays live, else by value."""

    __slots__ = ("cell", "held")

    def __init__(self, cell: types.CellType) -> None:
        self.cell: types.CellType | None = cell
        self.held: Any = None


class Packed:
    """See NOTE [ Packed inputs ]."""

    def __init__(self, call: Call, survey: Survey, hooks: Any) -> None:
        function, args, kwargs = call
        self._holding = holding = _Holding(hooks)
        self._function = holding.hold(function)
        self._args = [holding.hold(value) for value in args]
        self._kwargs = {name: holding.hold(value) for name, value in kwargs.items()}
        if isinstance(hooks, SavedThroughFunction):
            hooks.save()
        # What is not packed (globals, objects) is watched as without hooks.
        packed = holding.packed_ids()
        survey.tensors = [(place, tensor) for place, tensor in survey.tensors if id(tensor) not in packed]
        self._watched = Originals((_nothing, (), {}), survey, watch_cells=False)

    def forward_done(self) -> None:
        """Decide what stays live (Rule 2) and let go of the originals."""
        self._holding.forward_done()
        self._watched.forward_done()

    def thaw(self) -> tuple[Call, Sequence[Tensor]]:
        """Return the call of one rerun, and the tensors that it is given."""
        self._watched.thaw()
        thawing = _Thawing()
        try:
            args = tuple([thawing.thaw(value) for value in self._args])
            kwargs = {name: thawing.thaw(value) for name, value in self._kwargs.items()}
            return (thawing.thaw(self._function), args, kwargs), thawing.tensors
        except HeldTensorChanged as changed:
            raise changed_error(changed, self._args) from None


class _Holding:
    """One pass over the inputs of a region."""

    def __init__(self, hooks: Any) -> None:
        self._pack, self._unpack = hooks
        self._known: dict[int, Any] = {}
        self._originals: list[Any] = []  # keep ids taken until the forward is done
        self._containers: list[tuple[_HeldContainer, list[Any]]] = []
        self._cells: list[tuple[_HeldCell, Any]] = []
        self._tensor_ids: set[int] = set()

    def packed_ids(self) -> set[int]:
        return self._tensor_ids

    def hold(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = value  # what contains itself stays as it is
        self._originals.append(value)
        held = self._known[id(value)] = self._hold_new(value)
        return held

    def hold_cell(self, cell: types.CellType) -> _HeldCell:
        found = self._known.get(id(cell))
        if found is None:
            found = self._known[id(cell)] = _HeldCell(cell)
            self._originals.append(cell)
            contents = contents_of(cell)
            if contents is not EMPTY_CELL:
                found.held = self.hold(contents)
                self._cells.append((found, contents))
        return found

    def forward_done(self) -> None:
        for held, before in self._containers:
            held.forward_done(before)
        for cell, before in self._cells:
            if cell.cell is not None and contents_of(cell.cell) is before:
                cell.cell = None  # by value from now on
        self._known, self._originals, self._containers, self._cells = {}, [], [], []

    def _hold_new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self._tensor_ids.add(id(value))
            with torch.no_grad():
                return _frames.hold(value, self._pack, self._unpack)
        if is_of_module(value):
            return value
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            function = _HeldFunction(value, self)
            return function if self._needs_rebuild(function, value) else value
        kind = type(value)
        if kind is tuple or kind is list:
            return self._hold_container(value, list, kind)
        if kind is dict or kind is OrderedDict:
            return self._hold_container(value, _dict_values, partial(_dict, kind, list(value)))
        if kind is defaultdict:
            return self._hold_container(
                value, _dict_values, partial(_dict, partial(defaultdict, value.default_factory), list(value))
            )
        if isinstance(value, tuple) and hasattr(kind, "_make"):
            return self._hold_container(value, list, kind._make)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return self._hold_container(value, partial(_fields, names), _dataclass_builder(value, names))
        if kind is partial:
            parts = [self.hold(part) for part in (value.func, value.args, value.keywords)]
            same = parts[0] is value.func and parts[1] is value.args and parts[2] is value.keywords
            return value if same else _HeldPartial(parts)
        return value

    def _hold_container(self, value: Any, read: Callable[[Any], list[Any]], build: Callable[[list[Any]], Any]) -> Any:
        parts = read(value)
        held_parts = [self.hold(part) for part in parts]
        if all(new is old for new, old in zip(held_parts, parts, strict=True)):
            return value
        held = _HeldContainer(value, read, build, held_parts)
        self._containers.append((held, parts))
        return held

    @staticmethod
    def _needs_rebuild(held: _HeldFunction, function: types.FunctionType) -> bool:
        if held.defaults is not function.__defaults__ or held.kwdefaults is not function.__kwdefaults__:
            return True
        # Also without tensors: a variable of a loop is bound anew before the rerun.
        return bool(held.cells)


class _HeldPartial:
    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class _Thawing:
    """One rerun's inputs; what was one object is one object (Rule 1)."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._built: dict[int, Any] = {}

    def thaw(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (_frames.HeldTensor, _HeldContainer, _HeldFunction, _HeldCell, _HeldPartial):
            return value
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value)
        return self._built[id(value)]

    def _build(self, value: Any) -> Any:
        if isinstance(value, _frames.HeldTensor):
            with torch.no_grad():
                tensor = value.thaw()
            self.tensors.append(tensor)
            return tensor
        if isinstance(value, _HeldContainer):
            return value.live if value.live is not None else value.build([self.thaw(part) for part in value.parts])
        if isinstance(value, _HeldCell):
            return value.cell if value.cell is not None else types.CellType(self.thaw(value.held))
        if isinstance(value, _HeldPartial):
            function, args, keywords = (self.thaw(part) for part in value.parts)
            return partial(function, *args, **keywords)
        code, namespace, name, attributes = value.function
        cells = tuple(self.thaw(cell) for cell in value.cells)
        function = types.FunctionType(code, namespace, name, self.thaw(value.defaults), cells)
        function.__kwdefaults__ = self.thaw(value.kwdefaults)
        function.__dict__.update(attributes)
        return function


class SavedThroughFunction:
    """Hooks for a torch that does not tell which hooks are active: autograd itself applies them."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._node: Any = None

    def __iter__(self) -> Any:
        return iter((self._pack, self._unpack))

    def save(self) -> None:
        if self._tensors:
            anchor = torch.empty(0, requires_grad=True)
            self._node = _SaveForBackward.apply(anchor, *self._tensors).grad_fn  # type: ignore[no-untyped-call]
            self._tensors.clear()

    def _pack(self, tensor: Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _unpack(self, index: int) -> Tensor:
        tensor: Tensor = self._node.saved_tensors[index]
        return tensor


class _SaveForBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("a node that only saves tensors has no backward")


def _dict(kind: Callable[[Any], Any], keys: list[Any], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _dict_values(original: dict[Any, Any]) -> list[Any]:
    return list(original.values())


def _fields(names: list[str], original: Any) -> list[Any]:
    return [getattr(original, name) for name in names]


def _dataclass_builder(original: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    empty = copy(original)
    for name in names:
        object.__setattr__(empty, name, None)

    def build(values: list[Any]) -> Any:
        result = copy(empty)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(result, name, value)
        return result

    return build


def _nothing() -> None:
    """Stands for a function where only globals and objects are watched."""
