"""What a rerun calls the function with: as it was when the forward was called.

NOTE [ Inputs of a region ]

Rule 1. A rerun gets the very objects that the forward got: tensors, containers, functions. Every tensor
        among args, kwargs and their containers, and in the closure cells, defaults and `partial` arguments
        of the function, is watched: if it was changed in place since, the rerun raises. torch's checkpoint
        watches positional tensors only and computes wrong gradients with the others.
Rule 2. A closure variable that is bound anew after the forward (the variable of a loop) does not change the
        rerun: the function, or one among the arguments, is called with the value of the forward. One that
        the forward itself binds anew has, for the time of a rerun, the value it had before the forward.
Rule 3. A global variable that the function names, and that is a tensor or a module, must not be bound anew
        later, nor the tensor be changed, unless the forward itself does so.
Rule 4. Parameters of a module that is called, or of which `forward` is, must be the same and unchanged in a
        rerun (csrc/frames/parameters.h). Buffers may move (BatchNorm's statistics do).
Rule 5. Where saved-tensor hooks were active when the region was opened (an outer checkpoint, `save_on_cpu`),
        tensors go through them, and the region holds the packed objects only, so that an outer checkpoint
        frees the inner one's inputs. packed.py does this.
Rule 6. Inference tensors have no version. What is held of them for a rerun (an argument of a module, and all that
        Rule 5 is about) is a copy; where the rerun gets the very object, it is compared with a copy. So are
        parameters.
"""

import dataclasses
import dis
import types
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _frames
from actckpt.errors import InputChangedError, RerunMismatchError
from actckpt.runtime import messages

__all__ = [
    "HeldTensorChanged",
    "Inputs",
    "Originals",
    "Survey",
    "Thawed",
    "changed_error",
    "has_same_bytes",
    "is_of_module",
    "own_copy",
    "parameter_error",
]

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type)
EMPTY_CELL = object()

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def is_of_module(function: object) -> bool:
    """Whether this is a module or a method of one, of which only parameters are watched (Rule 4)."""
    if type(function) is types.MethodType:
        function = function.__self__
    return isinstance(function, torch.nn.Module)


class HeldTensorChanged(Exception):  # noqa: N818 - never leaves the runtime
    """What `HeldTensor.thaw` raises; `changed_error` words it."""

    def __init__(self, held: "_frames.HeldTensor") -> None:
        super().__init__()
        self.held = held


class Survey:
    """All that can be reached from a region's function and arguments, each object once."""

    def __init__(self, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        #: Tensors with where they stand, and whether that is a global variable.
        self.tensors: list[tuple[str, Tensor, bool]] = []
        self.generators: list[torch.Generator] = []
        self.functions: list[types.FunctionType] = []
        self._seen: set[int] = set()
        for i, value in enumerate(args):
            self._visit(value, f"Argument {i}")
        for name, value in kwargs.items():
            self._visit(value, f"Keyword argument {name!r}")
        self._visit(function, "The function")

    @property
    def devices(self) -> list[torch.device]:
        """Devices other than the CPU of the tensors found, each once."""
        return list(dict.fromkeys(tensor.device for _, tensor, _ in self.tensors if not tensor.is_cpu))

    def _visit(self, value: Any, place: str, *, is_global: bool = False) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((place, value, is_global))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif not is_of_module(value):
            if isinstance(value, types.FunctionType):
                self.functions.append(value)
                for name, held in _watched_globals(value):
                    self._visit(held, f"Global variable {name!r} that {value.__name__} reads", is_global=True)
            for inner_place, part in _parts(value, place):
                self._visit(part, inner_place)


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
    elif isinstance(value, tuple | list):
        yield from ((f"{place}[{i}]", part) for i, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((f"{place}.{name}", getattr(value, name, None)) for name in names)


@dataclasses.dataclass(frozen=True, slots=True)
class Thawed:
    """What one rerun is called with."""

    call: Call
    #: The tensors among it.
    tensors: Sequence[Tensor] = ()
    #: Cells that hold these values during the rerun (Rule 2).
    cells: Sequence[tuple[types.CellType, Any]] = ()


class _Watched:
    """A tensor among the inputs, and what tells that it was changed: its version, or a copy (Rule 6)."""

    __slots__ = ("_copy", "is_global", "place", "tensor", "version")

    def __init__(self, place: str, tensor: Tensor, is_global: bool) -> None:
        self.place = place
        self.tensor = tensor
        self.is_global = is_global
        self.version = version(tensor)
        self._copy = own_copy(tensor) if tensor.is_inference() else None

    def is_changed(self) -> bool:
        return version(self.tensor) != self.version or (
            self._copy is not None and not has_same_bytes(self._copy, self.tensor)
        )


class Originals:
    """The function and arguments themselves, watched for changes (Rules 1 to 3)."""

    def __init__(self, call: Call, survey: Survey, *, watch_cells: bool = True) -> None:
        self._call = call
        self._tensors = [_Watched(*found) for found in survey.tensors]
        functions = survey.functions if watch_cells else []
        cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
        self._cells = [(cell, contents_of(cell)) for cell in cells.values()]
        self._rebound: list[tuple[types.CellType, Any]] = []
        self._globals = [
            (function.__globals__, name, value)
            for function in survey.functions
            for name, value in _watched_globals(function)
        ]

    def forward_done(self) -> None:
        """Note what the forward itself bound anew, or changed in a global tensor."""
        self._rebound = [(cell, value) for cell, value in self._cells if contents_of(cell) is not value]
        self._cells = [(cell, value) for cell, value in self._cells if contents_of(cell) is value]
        self._globals = [entry for entry in self._globals if entry[0].get(entry[1]) is entry[2]]
        self._tensors = [w for w in self._tensors if not w.is_global or not w.is_changed()]

    def thaw(self) -> Thawed:
        """Return what one rerun is called with.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        for watched in self._tensors:
            if watched.is_changed():
                raise _input_error(watched.place, "was changed in place", watched.tensor, watched.version)
        for namespace, name, value in self._globals:
            if namespace.get(name) is not value:
                raise _input_error(f"Global variable {name!r} that the function reads", "was bound to something else")
        call = self._call
        rebound = {id(cell): value for cell, value in self._cells if contents_of(cell) is not value}
        if rebound:
            call = _Rebinding(rebound).call(call)
        return Thawed(call, [watched.tensor for watched in self._tensors], self._rebound)


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
            raise _input_error("A closure variable of a function in a container or default", "was bound anew")
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

    __slots__ = ("_held", "devices", "generators", "name", "parameters")

    def __init__(self, held: Any, survey: Survey, function: Callable[..., Any]) -> None:
        self._held = held
        #: Name of the function, for error messages.
        self.name = messages.name_of(function)
        #: `torch.Generator`s found among the inputs.
        self.generators = survey.generators
        self.devices = survey.devices
        self.parameters = _frames.Parameters(function)

    def forward_done(self) -> None:
        """Note what the forward itself bound anew (Rule 2), and the parameters as it left them (Rule 4)."""
        self._held.forward_done()
        self.parameters.forward_done()

    def thaw(self) -> Thawed:
        """Return what one rerun is called with.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        thawed: Thawed = self._held.thaw()
        return thawed


def version(value: object) -> int:
    """Return the version of a tensor; 0 for what has none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def own_copy(tensor: Tensor) -> Tensor:
    """Return a normal tensor like an inference tensor, or like such a copy, on memory that nobody else has."""
    with torch.inference_mode(False), torch.no_grad():
        copied = tensor.clone()
        if tensor.layout is torch.strided and copied.stride() != tensor.stride():
            storage = tensor.untyped_storage().clone()
            copied = tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copied.requires_grad_(tensor.requires_grad)


def has_same_bytes(copied: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is still as it was when it was copied."""
    if copied.shape != tensor.shape or copied.dtype != tensor.dtype:
        return False
    with torch.no_grad():
        one, other = (t.to_dense().contiguous().reshape(-1).view(torch.uint8) for t in (copied, tensor))
        return torch.equal(one, other)


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL


@lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that `code`, or a function inside it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def _watched_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    namespace = function.__globals__
    for name in _global_names(function.__code__):
        value = namespace.get(name)
        if isinstance(value, Tensor | torch.nn.Module):
            yield name, value


def changed_error(changed: HeldTensorChanged, args: Sequence[Any]) -> InputChangedError:
    """Word a held tensor that was changed in place."""
    held = changed.held
    index = next((i for i, value in enumerate(args) if value is held), None)
    place = "A tensor in a container or closure" if index is None else f"Argument {index}"
    return _input_error(place, "was changed in place", held.held, held.version)


def _input_error(place: str, how: str, tensor: Tensor | None = None, before: int = 0) -> InputChangedError:
    """Word an input that is not as it was after the forward."""
    message = (
        f"{place}, an input of a checkpointed region, {how} since the region began, by its own function or after it, "
        "and backward has to run that again"
    )
    if tensor is not None and tensor.is_inference():
        message += f": an inference tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, whose bytes were compared"
    elif tensor is not None:
        message += (
            f": tensor of shape {tuple(tensor.shape)}, {tensor.dtype}.\nVersion {before} in forward, {version(tensor)} "
            "now (one of the variables needed for gradient computation has been modified by an inplace operation)"
        )
    return InputChangedError(
        f"{message}.\nChange a clone instead, or run backward before changing it. A statistic that the region itself "
        "updates belongs into a module's buffer."
    )


def parameter_error(module: torch.nn.Module, parameter: Tensor, before: int, now: int) -> RerunMismatchError:
    """Word a parameter that is not as the forward left it; `now` is -1 where it is another tensor."""
    name = next((name for name, found in module.named_parameters() if found is parameter), "?")
    how = f"is at version {now}; it was at version {before}" if now >= 0 else "is another tensor than it was"
    if parameter.is_inference() and now == before:
        how = "is an inference tensor with other bytes than it had"
    return RerunMismatchError(
        f"Parameter {name!r} of {messages.name_of(module)}, shape {tuple(parameter.shape)}, {how} in forward, and "
        "backward has to run the module again (one of the variables needed for gradient computation has been "
        "modified by an inplace operation).\n"
        'Run backward before the optimizer step that changes the parameter, or pass determinism_check="none" if the '
        "change does no harm."
    )
