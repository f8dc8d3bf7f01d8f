"""What a rerun calls the function with: as it was when the forward was called.

NOTE [ Inputs of a region ]

Rule 1. A rerun gets the very objects that the forward got: tensors, containers, functions. Every tensor
        among args, kwargs and their containers, and in the closure cells, defaults and `partial` arguments
        of the function, is watched: if it was changed in place since, or given other memory (`.data`,
        `swap_tensors`), the rerun raises. torch's checkpoint watches positional tensors only and computes
        wrong gradients with the others. What stands in containers and objects may be others in the rerun.
Rule 2. A closure variable that is bound anew after the forward (the variable of a loop) does not change the
        rerun: the function, or one among the arguments, is called with the value of the forward. One that
        the forward itself binds anew is as it is when the rerun begins.
Rule 3. A global variable that the function names, and that is a tensor, must not be changed, unless the forward
        itself does so.
Rule 4. Parameters of a module that is called, or of which `forward` is, must be unchanged in a rerun
        (csrc/rerun/parameters.h). Buffers may move: NOTE [ Buffers ].
Rule 5. Where saved-tensor hooks were active when the region was opened (an outer checkpoint, `save_on_cpu`),
        tensors go through them, and the region holds the packed objects only, so that an outer checkpoint
        frees the inner one's inputs. packed.py does this.
Rule 6. Inference tensors have no version. What is held of them for a rerun (an argument of a module, and all that
        Rule 5 is about) is a copy; where the rerun gets the very object, it is compared with a copy. So are
        parameters.
"""

import dataclasses
import types
import weakref
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
from actckpt._rerun.buffers import Buffers
from actckpt._rerun.module_state import modules_as_found, reads_checked

__all__ = [
    "Inputs",
    "Originals",
    "Restored",
    "Survey",
]

_PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type}

#: The place of the function itself.
_FUNCTION = "The function"

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Survey:
    """All that can be reached from a region's function and arguments, each object once.

    What an object whose method is called holds, and what functions of the same file hold that the function names, is
    looked through for modules and generators only.
    """

    def __init__(self, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        #: Tensors with where they stand, and whether that is a global variable.
        self.tensors: list[tuple[str, Tensor, bool]] = []
        self.generators: list[torch.Generator] = []
        self.modules: list[torch.nn.Module] = []
        self.functions: list[types.FunctionType] = []
        #: Whether there are containers in which others may stand later.
        self.has_containers = False
        self._seen: set[int] = set()
        for i, value in enumerate(args):
            self._visit(value, f"Argument {i}")
        for name, value in kwargs.items():
            self._visit(value, f"Keyword argument {name!r}")
        self._visit(function, _FUNCTION)
        #: Devices other than the CPU of all tensors found, each once, also of those that are packed.
        self.devices = list(dict.fromkeys(tensor.device for _, tensor, _ in self.tensors if not tensor.is_cpu))

    def _visit(self, value: Any, place: str, *, is_global: bool = False, is_state: bool = False) -> None:
        if type(value) in _PLAIN or id(value) in self._seen or isinstance(value, type):
            return
        if isinstance(value, Tensor):
            if not is_state:
                self._seen.add(id(value))
                self.tensors.append((place, value, is_global))
            return
        self._seen.add(id(value))
        if type(value) is weakref.ref:
            value = value()
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif is_of_module(value):
            module: Any = value.__self__ if isinstance(value, types.MethodType) else value
            self.modules.append(module)
        else:
            self.has_containers = self.has_containers or isinstance(value, (list, dict, set, deque))
            if isinstance(value, types.FunctionType):
                self._visit_globals(value, is_state=is_state)
            for inner_place, part in _parts(value, place):
                self._visit(part, inner_place, is_state=is_state)
            owner = value.__self__ if isinstance(value, types.MethodType) else value
            for part in getattr(owner, "__dict__", {}).values() if place == _FUNCTION else ():
                self._visit(part, place, is_state=True)

    def _visit_globals(self, function: types.FunctionType, *, is_state: bool) -> None:
        if not is_state:
            self.functions.append(function)
        for name in global_names(function.__code__):
            held = function.__globals__.get(name)
            if isinstance(held, Tensor):
                place = f"Global variable {name!r} that {function.__name__} reads"
                self._visit(held, place, is_global=True, is_state=is_state)
            elif isinstance(held, torch.nn.Module | torch.Generator) or _is_of_file(held, function):
                self._visit(held, name, is_state=True)


def _is_of_file(value: Any, function: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what a container or function is made of, with where it stands."""
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
    """What one rerun is called with."""

    call: Call
    #: The tensors among it.
    tensors: Sequence[Tensor] = ()


@dataclasses.dataclass(slots=True)
class _WatchedInput:
    place: str
    is_global: bool
    watched: Watched


class Originals:
    """The function and arguments themselves, watched for changes (Rules 1 to 3)."""

    def __init__(self, call: Call, survey: Survey, *, watch_cells: bool = True) -> None:
        self._call = call
        self._has_containers = survey.has_containers and watch_cells
        self._tensors = [_WatchedInput(place, is_global, Watched(t)) for place, t, is_global in survey.tensors]
        functions = survey.functions if watch_cells else []
        cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
        self._cells = [(cell, contents_of(cell)) for cell in cells.values()]

    def forward_done(self) -> None:
        """Forget what the forward itself bound anew or displaced: the call before may have left it, with its graph."""
        displaced = {id(value) for cell, value in self._cells if contents_of(cell) is not value}
        self._cells = [(cell, value) for cell, value in self._cells if id(value) not in displaced]
        self._tensors = [found for found in self._tensors if not found.is_global or not found.watched.is_changed()]
        self._tensors = [found for found in self._tensors if id(found.watched.tensor) not in displaced]
        if self._has_containers and self._tensors:
            standing = {id(tensor) for _, tensor, _ in Survey(*self._call).tensors}
            self._tensors = [found for found in self._tensors if id(found.watched.tensor) in standing]

    def restore(self) -> Restored:
        """Return what one rerun is called with.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        for found in self._tensors:
            if found.watched.is_changed():
                raise messages.input_changed(
                    found.place, "was changed in place", found.watched.tensor, found.watched.version
                )
            if found.watched.has_other_memory():
                raise messages.input_changed(found.place, messages.OTHER_MEMORY)
        call = self._call
        rebound = {id(cell): value for cell, value in self._cells if contents_of(cell) is not value}
        if rebound:
            call = _Rebinding(rebound).call(call)
        return Restored(call, self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among function and arguments."""
        return [found.watched.tensor for found in self._tensors]


class _Rebinding:
    """Gives functions new cells where a closure variable was bound anew after the forward (Rule 2)."""

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
        self._made[id(value)] = function  # before its cells are filled: it may call itself
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
        """Whether `value` is a function from which a cell that was bound anew can be reached."""
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

    __slots__ = ("_buffers", "_held", "devices", "generators", "name", "parameters")

    def __init__(self, held: Any, survey: Survey, function: Callable[..., Any]) -> None:
        self._held = held
        #: Name of the function, for error messages.
        self.name = messages.name_of(function)
        self.parameters = _C.Parameters(function, survey.modules)
        #: `torch.Generator`s found among the inputs, and in attributes of modules.
        self.generators = list(dict.fromkeys([*survey.generators, *self.parameters.generators]))
        self.devices = survey.devices
        buffered = self.parameters.buffered
        self._buffers = Buffers(buffered) if buffered else None

    @property
    def is_swapped(self) -> bool:
        """Whether reruns change, for their time, what others see (Rule 3 of NOTE [ Found by the forward ])."""
        return self._buffers is not None

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in the forward instead of `function`."""
        return function if self._buffers is None else self._buffers.watching(function)

    def forward_done(self) -> None:
        """Note the parameters and buffers as the forward left them, and forget what it bound anew."""
        self.parameters.forward_done()
        self._held.forward_done()
        if self._buffers is not None:
            self._buffers.forward_done()

    def restore(self) -> Restored:
        """Return what one rerun is called with.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        restored: Restored = self._held.restore()
        return restored

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are held as they are."""
        return self._held.tensors if isinstance(self._held, Originals) else []

    def as_found(self, *, checks: bool) -> AbstractContextManager[Any]:
        """Return the context of a rerun: modules are as the forward found them.

        Args:
            checks: raise where an operator reads a buffer that could not be brought back.
        """
        are_buffers_as_found = self._buffers is None or self._buffers.are_as_found()
        if are_buffers_as_found and not self.parameters.check(False, True):
            return _NOTHING
        return self._swapped(checks=checks)

    @contextmanager
    def _swapped(self, *, checks: bool) -> Iterator[None]:
        with (
            modules_as_found(self.parameters, self._buffers) as stale,
            reads_checked(stale if checks else [], self.name),
        ):
            yield


_NOTHING = nullcontext()
