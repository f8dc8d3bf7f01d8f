"""The inputs of reruns: function and arguments as they were in the forward.

NOTE [ Inputs of a region ]

Rule 1. A rerun gets the same objects as the forward: tensors, containers, functions. Every tensor among args, kwargs
and their containers, and in the function's closure cells, defaults and `partial` arguments, is watched. If it was
changed in place, or given other memory (`.data`, `swap_tensors`), the rerun raises. torch's checkpoint watches
positional tensors only, and computes wrong gradients for the others. For the contents of containers and objects see
NOTE [ Object state ].
Rule 2. A closure variable that is rebound after the forward (a loop variable) does not affect the rerun: the function,
or a function among its arguments, is called with the forward's value. A variable that the forward itself rebinds has,
during a rerun, its value from before the forward.
Rule 3. A global variable that the function names and that holds a tensor must not be changed, except by the forward
itself. It may be rebound: NOTE [ Object state ].
Rule 4. Parameters of the called module (or of the module whose `forward` is called) must be unchanged in a rerun
(csrc/rerun/parameters.h). Buffers may change: NOTE [ Buffers ].
Rule 5. If saved-tensor hooks were active at opening (an outer checkpoint, `save_on_cpu`), tensors go through them. The
region holds only the packed objects, so an outer checkpoint frees the inner one's inputs. See packed.py.
Rule 6. Inference tensors have no version counter. A rerun gets a copy of such a module argument, and of such a tensor
under Rule 5. If it gets the object itself, or if a parameter is one, it is compared with a copy.
"""

import dataclasses
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import messages
from actckpt._core.functions import contents_of, global_names, is_of_module
from actckpt._core.tensor_changes import Watched
from actckpt._rerun.buffers import Buffers, Stale
from actckpt._rerun.object_state import modules_as_found, reads_checked, structure_as_found

__all__ = [
    "Inputs",
    "Originals",
    "Restored",
    "Survey",
]

_PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type}

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Survey:
    """Everything reachable from a region's function and arguments, each object once."""

    def __init__(self, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        #: Tensors, where they were found, and whether in a global variable.
        self.tensors: list[tuple[str, Tensor, bool]] = []
        self.generators: list[torch.Generator] = []
        self.functions: list[types.FunctionType] = []
        self._seen: set[int] = set()
        for i, value in enumerate(args):
            self._visit(value, f"Argument {i}")
        for name, value in kwargs.items():
            self._visit(value, f"Keyword argument {name!r}")
        self._visit(function, "The function")
        #: Non-CPU devices of all tensors found, without repeats, including packed ones.
        self.devices = list(dict.fromkeys(tensor.device for _, tensor, _ in self.tensors if not tensor.is_cpu))

    def _visit(self, value: Any, place: str, *, is_global: bool = False) -> None:
        if type(value) in _PLAIN or id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((place, value, is_global))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif not is_of_module(value):
            if isinstance(value, types.FunctionType):
                self.functions.append(value)
                for name in global_names(value.__code__):
                    held = value.__globals__.get(name)
                    if isinstance(held, Tensor):
                        self._visit(held, f"Global variable {name!r} that {value.__name__} reads", is_global=True)
            for inner_place, part in _parts(value, place):
                self._visit(part, inner_place)


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container or function, each with its location."""
    if isinstance(value, types.FunctionType):
        name = value.__name__
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"Variable {variable!r} in the closure of {name}", contents_of(cell)
        yield f"The defaults of {name}", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, types.MethodType):
        yield place, value.__func__
    elif isinstance(value, partial):
        yield place, value.func
        yield f"{place}, arguments of partial", value.args
        yield f"{place}, keywords of partial", value.keywords
    elif isinstance(value, dict):
        yield from ((f"{place}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple | list | deque):
        yield from ((f"{place}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{place}, an element", part) for part in value)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((f"{place}.{name}", getattr(value, name, None)) for name in names)


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """The inputs of one rerun."""

    call: Call
    #: The tensors among them.
    tensors: Sequence[Tensor] = ()
    #: Cells and the values that they hold during the rerun (Rule 2).
    cells: Sequence[tuple[types.CellType, Any]] = ()
    #: Cells that the forward did not rebind.
    unchanged_cells: Sequence[tuple[types.CellType, Any]] = ()


@dataclasses.dataclass(slots=True)
class _WatchedInput:
    place: str
    is_global: bool
    watched: Watched


class Originals:
    """The function and arguments themselves, watched for changes (Rules 1 to 3)."""

    def __init__(self, call: Call, survey: Survey, *, watch_cells: bool = True) -> None:
        self._call = call
        self._tensors = [_WatchedInput(place, is_global, Watched(t)) for place, t, is_global in survey.tensors]
        functions = survey.functions if watch_cells else []
        cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
        self._cells = [(cell, contents_of(cell)) for cell in cells.values()]
        self._rebound: list[tuple[types.CellType, Any]] = []

    def forward_done(self, kept: dict[int, Tensor]) -> None:
        """Record what the forward itself rebound, or changed in a global tensor.

        Args:
            kept: replacements of the tensors that the forward displaced, by id.
        """
        rebound = [(cell, value) for cell, value in self._cells if contents_of(cell) is not value]
        kept = kept | {id(value): _C.without_graph(value) for _, value in rebound if isinstance(value, Tensor)}
        self._rebound = [(cell, kept.get(id(value), value)) for cell, value in rebound]
        self._cells = [(cell, value) for cell, value in self._cells if contents_of(cell) is value]
        self._tensors = [item for item in self._tensors if not item.is_global or not item.watched.is_changed()]
        for item in self._tensors if kept else ():
            item.watched.hold_instead(kept.get(id(item.watched.tensor), item.watched.tensor))

    def restore(self) -> Restored:
        """Return the inputs of one rerun.

        Raises:
            InputChangedError: an input was changed after the forward.
        """
        for item in self._tensors:
            if item.watched.is_changed():
                raise messages.input_changed(
                    item.place, "was changed in place", item.watched.tensor, item.watched.version
                )
            if item.watched.has_other_memory():
                raise messages.input_changed(item.place, messages.OTHER_MEMORY)
        call = self._call
        rebound = {id(cell): value for cell, value in self._cells if contents_of(cell) is not value}
        if rebound:
            call = _Rebinding(rebound).call(call)
        unchanged = [(cell, value) for cell, value in self._cells if id(cell) not in rebound]
        return Restored(call, self.tensors, self._rebound, unchanged)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among function and arguments."""
        return [item.watched.tensor for item in self._tensors]


class _Rebinding:
    """Gives functions new cells for closure variables that were rebound after the forward (Rule 2)."""

    def __init__(self, contents: dict[int, Any]) -> None:
        self._contents = contents  # by id of the cell
        self._made: dict[int, Any] = {}
        self._placed: set[int] = set()

    def call(self, call: Call) -> Call:
        function, args, kwargs = call
        result = (
            self._rebind(function),
            tuple([self._rebind(value) for value in args]),
            {name: self._rebind(value) for name, value in kwargs.items()},
        )
        if len(self._placed) < len(self._contents):
            raise messages.input_changed("A closure variable of a function in a container or default", "was bound anew")
        return result

    def _rebind(self, value: Any) -> Any:
        if not isinstance(value, types.FunctionType | partial) or not self._reaches(value, set()):
            return value
        if id(value) not in self._made:
            if isinstance(value, partial):
                inner = [self._rebind(part) for part in value.args]
                words = {name: self._rebind(part) for name, part in value.keywords.items()}
                self._made[id(value)] = partial(self._rebind(value.func), *inner, **words)
            else:
                self._made[id(value)] = self._new_function(value)
        return self._made[id(value)]

    def _new_function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple([self._new_cell(cell) for cell in value.__closure__ or ()])
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        self._made[id(value)] = function  # before its cells are filled: it may be recursive
        for cell, new in zip(value.__closure__ or (), cells, strict=True):
            if new is not cell:
                known = id(cell) in self._contents
                held = self._contents[id(cell)] if known else cell.cell_contents
                new.cell_contents = self._rebind(held)
        return function

    def _new_cell(self, cell: types.CellType) -> types.CellType:
        if id(cell) in self._contents:
            self._placed.add(id(cell))
        elif not self._reaches(contents_of(cell), set()):
            return cell
        if id(cell) not in self._made:
            self._made[id(cell)] = types.CellType()
        made: types.CellType = self._made[id(cell)]
        return made

    def _reaches(self, value: Any, seen: set[int]) -> bool:
        """Whether `value` is a function from which a rebound cell is reachable."""
        if id(value) in seen or not isinstance(value, types.FunctionType | partial):
            return False
        seen.add(id(value))
        if isinstance(value, partial):
            return any(self._reaches(part, seen) for part in (value.func, *value.args, *value.keywords.values()))
        return any(
            id(cell) in self._contents or self._reaches(contents_of(cell), seen) for cell in value.__closure__ or ()
        )


class Inputs:
    """The function and arguments of one region, held for reruns. See NOTE [ Inputs of a region ]."""

    __slots__ = ("_buffers", "_held", "_object_tensors", "_structure", "devices", "generators", "name", "parameters")

    def __init__(self, held: Any, survey: Survey, function: Callable[..., Any], structure: "_C.Structure") -> None:
        self._held = held
        self._structure = structure
        #: The function's name, for error messages.
        self.name = messages.name_of(function)
        #: `torch.Generator`s among the inputs and in module attributes.
        self.generators = survey.generators
        self.devices = survey.devices
        #: Tensors that are reachable only through objects.
        self._object_tensors: list[Watched] = []
        self._add_what_objects_hold(survey, structure)
        self.parameters = _C.Parameters(function, structure.modules)
        self._add_generators(self.parameters.generators)
        buffered = self.parameters.buffered
        self._buffers = Buffers(buffered) if buffered else None

    def _add_what_objects_hold(self, survey: Survey, structure: "_C.Structure") -> None:
        if tensors := structure.take_tensors():
            known = {id(tensor) for _, tensor, _ in survey.tensors}
            self._object_tensors = [Watched(tensor) for tensor in tensors if id(tensor) not in known]
            devices = (watched.tensor.device for watched in self._object_tensors if not watched.tensor.is_cpu)
            self.devices = list(dict.fromkeys([*survey.devices, *devices]))
        self._add_generators(structure.take_generators())

    def _add_generators(self, generators: list[torch.Generator]) -> None:
        if generators:
            self.generators = list(dict.fromkeys([*self.generators, *generators]))

    @property
    def is_swapped(self) -> bool:
        """Whether reruns temporarily change state that others see (Rule 1 of NOTE [ Object state ])."""
        return self._buffers is not None or not self._structure.is_empty

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in the forward instead of `function`."""
        return function if self._buffers is None else self._buffers.watching(function)

    def forward_done(self) -> None:
        """Record what the forward itself rebound or changed, and the parameters after it."""
        self.parameters.forward_done()
        kept = self._structure.forward_done()
        self._held.forward_done(kept)
        for watched in self._object_tensors if kept else ():
            watched.hold_instead(kept.get(id(watched.tensor), watched.tensor))
        if self._buffers is not None:
            self._buffers.forward_done()

    def restore(self) -> Restored:
        """Return the inputs of one rerun.

        Raises:
            InputChangedError: an input was changed after the forward.
        """
        restored: Restored = self._held.restore()
        return restored

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are held directly."""
        return self._held.tensors if isinstance(self._held, Originals) else []

    def is_half_done(self, restored: Restored) -> bool:
        """Whether a rerun has yet to undo a change that its forward undid too (Rule 6 of NOTE [ Object state ])."""
        is_bound_anew = any(contents_of(cell) is not value for cell, value in restored.unchanged_cells)
        return is_bound_anew or self._structure.is_half_done()

    def as_found(self, *, checks: bool) -> AbstractContextManager[Any]:
        """Return the context of a rerun: containers, objects and modules are as the forward found them.

        Args:
            checks: raise if an operator reads state that could not be restored.
        """
        are_modules_as_found = self._buffers is None or self._buffers.are_as_found()
        are_modules_as_found = are_modules_as_found and not self.parameters.check(False, True)
        changed = [watched for watched in self._object_tensors if watched.is_changed() or watched.has_other_memory()]
        if are_modules_as_found and self._structure.is_empty and not changed:
            return _NOTHING
        stale = [self._stale(watched) for watched in changed]
        return self._swapped(stale, checks=checks)

    @contextmanager
    def _swapped(self, stale: list[Stale], *, checks: bool) -> Iterator[None]:
        with (
            modules_as_found(self.parameters, self._buffers) as stale_buffers,
            structure_as_found(self._structure),
            reads_checked([*stale, *stale_buffers] if checks else [], self.name),
        ):
            yield

    def _stale(self, watched: Watched) -> Stale:
        advice = (
            "Change a clone instead, or run backward before changing it. What the function itself changes in place "
            'belongs into a module\'s buffer. Or pass a policy, or determinism_check="none" if the change does no harm.'
        )
        return Stale(watched.tensor, watched.version, self._structure.place_of(watched.tensor), advice)


_NOTHING = nullcontext()
