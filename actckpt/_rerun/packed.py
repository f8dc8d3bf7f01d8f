"""Inputs of a region inside other saved-tensor hooks: held packed, and built again for each rerun.

NOTE [ Packed inputs ]

Rule 1. Tensors in args, kwargs, tuples, lists, dicts, dataclasses, and in the closure cells and defaults of
        functions go through the hooks outside, each once. What holds one is built again for a rerun; the
        rest is passed as it is. One object is built once per rerun, so what was one object is one then.
Rule 2. A list, dict or dataclass is built again only if nothing but the call refers to it: nobody else can
        tell the difference. Tuples cannot be changed and always are. Other containers, and objects, are passed
        as they are; they keep their tensors alive.
Rule 3. A closure variable counts as in Rule 2 of NOTE [ Inputs of a region ].
Rule 4. Tensors on one storage are on one in a rerun too, in the same places: hooks may give each of them memory of its
        own, and a region inside, which hands out what it holds storage by storage, would take one for the other.
Rule 5. A leaf that requires grad, that is no positional argument and alone on its storage, is passed as it is and
        watched, where the hooks may do without it (`get_all_leaves`).
"""

import dataclasses
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import messages, torch_private
from actckpt._core.functions import EMPTY_CELL, contents_of, is_of_module
from actckpt._core.hooks import get_all_leaves
from actckpt._rerun.inputs import Call, Inputs, Originals, Restored, Survey

__all__ = ["held_inputs"]


#: Offset, shape and strides.
_Place = tuple[int, torch.Size, tuple[int, ...]]


class _OneStorage:
    """Tensors that are on one storage (Rule 4)."""

    __slots__ = ("members", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        #: With offset, shape and strides of each, in elements, and its type.
        self.members: list[tuple[_C.HeldTensor, _Place, torch.dtype]] = []

    def restore(self) -> list[Tensor]:
        """Return the tensors for one rerun."""
        found = [held.restore() for held, *_ in self.members]
        storages = [_C.strided_storage_of(tensor) for tensor in found]
        if None in storages or len({storage.data_ptr() for storage in storages if storage is not None}) == 1:
            return found
        pairs = list(zip(found, self.members, strict=True))
        if any(tensor.shape != place[1] or tensor.dtype is not dtype for tensor, (_, place, dtype) in pairs):
            return found  # hooks that change this are reported where it is read
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=found[0].device).untyped_storage()
        return [_moved(tensor, memory, place) for tensor, (_, place, _) in pairs]


def _moved(tensor: Tensor, memory: torch.UntypedStorage, place: _Place) -> Tensor:
    """Return what stands for a tensor in other memory."""
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, *place)
    once = tuple(slice(1) if step == 0 else slice(None) for step in place[2])  # of elements that share an address
    result[once].copy_(tensor[once])
    result.__dict__.update(tensor.__dict__)
    return result.requires_grad_(tensor.requires_grad)


class _HeldContainer:
    """A container that holds tensors, and how to build it again."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.build = build
        self.parts = parts


class _HeldFunction:
    """A function whose closure or defaults hold tensors."""

    __slots__ = ("cells", "defaults", "function", "kwdefaults")

    def __init__(self, function: types.FunctionType, holding: "_Holding") -> None:
        # Not the function itself: its cells keep the tensors alive.
        self.function = (function.__code__, function.__globals__, function.__name__, dict(function.__dict__))
        self.defaults = holding.hold(function.__defaults__)
        self.kwdefaults = holding.hold_changeable(function.__kwdefaults__)
        self.cells = [holding.hold_cell(cell) for cell in function.__closure__ or ()]


class _HeldCell:
    """A closure cell: itself where it stays live, else by value."""

    __slots__ = ("cell", "held")

    def __init__(self, cell: types.CellType) -> None:
        self.cell: types.CellType | None = cell
        self.held: Any = None


class Packed:
    """See NOTE [ Packed inputs ]."""

    def __init__(self, call: Call, survey: Survey, hooks: Any, exclusive_ids: set[int]) -> None:
        function, args, kwargs = call
        staying_ids = set() if get_all_leaves(hooks) else _staying_ids(survey, args)
        holding = _Holding(hooks, exclusive_ids, staying_ids)
        self.argument_ids = set(map(id, args)) | set(map(id, kwargs.values()))
        #: None once the forward is done: what was packed knows its hook, and nothing else may keep them alive.
        self._holding: _Holding | None = holding
        self._function = holding.hold(function)
        self._args = [holding.hold(value) for value in args]
        self._kwargs = {name: holding.hold(value) for name, value in kwargs.items()}
        self._rebound: list[_HeldCell] = []
        self._together: dict[int, _OneStorage] = {}
        #: id() of the containers and functions that are built again.
        self.rebuilt_ids = holding.rebuilt_ids
        # What is not packed (globals, what objects hold) is watched as without hooks.
        survey.tensors = [entry for entry in survey.tensors if id(entry[1]) not in holding.packed_ids]
        self._watched = Originals((_nothing, (), {}), survey, watch_cells=False)

    def forward_done(self, kept: dict[int, Tensor]) -> None:
        """Decide which closure variables stay live (Rule 3), and release the originals."""
        assert self._holding is not None
        self._rebound = self._holding.forward_done()
        self._together = self._holding.together()
        self._holding = None
        self._watched.forward_done(kept)

    def restore(self) -> Restored:
        """Return what one rerun is called with."""
        self._watched.restore()
        restoring = _Restoring(self._together)
        try:
            args = tuple([restoring.restore(value) for value in self._args])
            kwargs = {name: restoring.restore(value) for name, value in self._kwargs.items()}
            call = (restoring.restore(self._function), args, kwargs)
            cells = [(held.cell, restoring.restore(held.held)) for held in self._rebound if held.cell is not None]
            return Restored(call, [*self._watched.tensors, *restoring.tensors], cells)
        except messages.HeldTensorChanged as changed:
            raise messages.changed_error(changed, self._args) from None


def _staying_ids(survey: Survey, args: tuple[Any, ...]) -> set[int]:
    """Return the id() of tensors that hooks do not get (Rule 5)."""
    plain = [(t, _C.strided_storage_of(t)) for _, t, _ in survey.tensors if type(t) in (Tensor, torch.nn.Parameter)]
    sharing = Counter(id(storage) for _, storage in plain)
    leaves = {id(t) for t, storage in plain if t.is_leaf and t.requires_grad and sharing[id(storage)] == 1}
    return leaves - set(map(id, args))


class _Holding:
    """One pass over the inputs of a region."""

    def __init__(self, hooks: Any, exclusive_ids: set[int], staying_ids: set[int]) -> None:
        self._pack, self._unpack = hooks
        self._exclusive_ids = exclusive_ids
        self._staying_ids = staying_ids
        self._known: dict[int, Any] = {}
        self._originals: list[Any] = []  # keep ids taken until the forward is done
        self._cells: list[tuple[_HeldCell, Any]] = []
        #: By id() of the storage.
        self._storages: dict[int, _OneStorage] = {}
        #: id() of the tensors that went through the hooks.
        self.packed_ids: set[int] = set()
        #: id() of the containers and functions that are built again.
        self.rebuilt_ids: set[int] = set()

    def hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if id(value) in self._staying_ids else self._hold_tensor(value)
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

    def forward_done(self) -> list[_HeldCell]:
        """Return the cells that the forward itself bound anew; the others are held by value from now on."""
        rebound = []
        for held, before in self._cells:
            if held.cell is not None and contents_of(held.cell) is before:
                held.cell = None
            else:
                rebound.append(held)
        self._known, self._originals, self._cells = {}, [], []
        return rebound

    def _hold_tensor(self, tensor: Tensor) -> "_C.HeldTensor":
        # Packed anew at each place, since in a rerun of the outer region they may be different objects;
        # but given back as one.
        with torch.no_grad():
            held = _C.hold(tensor, self._pack, self._unpack)
        self._originals.append(tensor)
        self.packed_ids.add(id(tensor))
        known: _C.HeldTensor = self._known.setdefault(id(tensor), held)
        if known is held:
            self._note_storage(tensor, held)
        return known

    def _note_storage(self, tensor: Tensor, held: "_C.HeldTensor") -> None:
        storage = _C.strided_storage_of(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
        if storage is None or tensor.is_conj() or tensor.is_neg():
            return
        one = self._storages.setdefault(id(storage), _OneStorage(storage.nbytes()))
        one.members.append((held, (int(tensor.storage_offset()), tensor.shape, tensor.stride()), tensor.dtype))
        self._originals.append(storage)

    def together(self) -> dict[int, _OneStorage]:
        """Return the storages of several tensors, by id() of what is held of each."""
        several = [one for one in self._storages.values() if len(one.members) > 1]
        return {id(held): one for one in several for held, *_ in one.members}

    def _hold_new(self, value: Any) -> Any:
        if is_of_module(value):
            return value
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            function = _HeldFunction(value, self)
            if not self._needs_rebuild(function, value):
                return value
            self.rebuilt_ids.add(id(value))
            return function
        kind = type(value)
        if kind is tuple:
            return self._hold_container(value, list(value), tuple)
        if isinstance(value, tuple) and hasattr(kind, "_make") and not getattr(value, "__dict__", None):
            return self._hold_container(value, list(value), kind._make)
        if kind is partial:
            parts = [self.hold(value.func), self.hold(value.args), self.hold_changeable(value.keywords)]
            same = parts[0] is value.func and parts[1] is value.args and parts[2] is value.keywords
            return value if same else _HeldPartial(parts)
        return self.hold_changeable(value) if id(value) in self._exclusive_ids else value

    def hold_changeable(self, value: Any) -> Any:
        """Hold a list, dict or dataclass that nobody else refers to."""
        kind = type(value)
        if kind is list:
            return self._hold_container(value, value, list)
        if kind is dict or kind is OrderedDict:
            return self._hold_container(value, list(value.values()), partial(_dict, kind, list(value)))
        if kind is defaultdict:
            make: Callable[[Any], Any] = partial(defaultdict, value.default_factory)
            return self._hold_container(value, list(value.values()), partial(_dict, make, list(value)))
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            parts = [getattr(value, name) for name in names]
            return self._hold_container(value, parts, _dataclass_builder(value, names))
        return value

    def _hold_container(self, value: Any, parts: list[Any], build: Callable[[list[Any]], Any]) -> Any:
        held = [self.hold(part) for part in parts]
        if all(new is old for new, old in zip(held, parts, strict=True)):
            return value
        self.rebuilt_ids.add(id(value))
        return _HeldContainer(build, held)

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


class _Restoring:
    """One rerun's inputs; what was one object is one object (Rule 1)."""

    def __init__(self, together: dict[int, _OneStorage]) -> None:
        self.tensors: list[Tensor] = []
        self._together = together
        self._built: dict[int, Any] = {}

    def restore(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (_C.HeldTensor, _HeldContainer, _HeldFunction, _HeldCell, _HeldPartial):
            return value
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value)
        return self._built[id(value)]

    def _build(self, value: Any) -> Any:
        if isinstance(value, _C.HeldTensor):
            return self._tensor(value)
        if isinstance(value, _HeldContainer):
            return value.build([self.restore(part) for part in value.parts])
        if isinstance(value, _HeldCell):
            return value.cell if value.cell is not None else types.CellType(self.restore(value.held))
        if isinstance(value, _HeldPartial):
            function, args, keywords = (self.restore(part) for part in value.parts)
            return partial(function, *args, **keywords)
        code, namespace, name, attributes = value.function
        cells = tuple(self.restore(cell) for cell in value.cells)
        function = types.FunctionType(code, namespace, name, self.restore(value.defaults), cells)
        function.__kwdefaults__ = self.restore(value.kwdefaults)
        function.__dict__.update(attributes)
        return function

    def _tensor(self, value: "_C.HeldTensor") -> Tensor:
        one = self._together.get(id(value))
        with torch.no_grad():
            tensors = [value.restore()] if one is None else one.restore()
        self.tensors += tensors
        if one is None:
            return tensors[0]
        self._built.update((id(held), tensor) for (held, *_), tensor in zip(one.members, tensors, strict=True))
        built: Tensor = self._built[id(value)]
        return built


def _dict(kind: Callable[[Any], Any], keys: list[Any], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


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


def held_inputs(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    hooks: Any,
    excluded: Sequence[Any] = (),
) -> Inputs:
    """Hold the inputs of a region: packed where hooks are active outside, else as they are.

    Args:
        hooks: (pack, unpack) for the tensors where none are active outside; None: hold the tensors.
        excluded: objects that reruns find as they are, whatever of them the function reaches.
    """
    call = (function, args, kwargs)
    outer = torch_private.outer_hooks() or hooks
    exclusive_ids = set() if outer is None else _C.exclusive_ids(args, kwargs)  # before the survey refers to them
    survey = Survey(call, excluded)
    held = Originals(call, survey) if outer is None else Packed(call, survey, outer, exclusive_ids)
    return Inputs(held, survey, function, held.rebuilt_ids if isinstance(held, Packed) else set())
