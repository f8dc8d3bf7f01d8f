"""What a rerun calls the function with: as it was when the forward was called.

NOTE [ Inputs of a region ]

Rule 1. A rerun gets the very objects that the forward got: tensors, containers, functions. Every tensor
        among args, kwargs and their containers, and in the closure cells, defaults and `partial` arguments
        of the function, is watched: if it was changed in place since, the rerun raises. torch's checkpoint
        watches positional tensors only and computes wrong gradients with the others.
Rule 2. A closure variable counts as it was after the forward: one that is bound anew later (the variable of
        a loop) does not change the rerun. One that the forward itself binds anew stays live, since the
        function, or one that it calls, will bind it again.
Rule 3. A global variable that the function names, and that is a tensor or a module, must not be bound anew
        later, nor the tensor be changed.
Rule 4. A change of a parameter of a module among the inputs is noticed by the sum of all versions. Buffers
        may move (BatchNorm's statistics do).
Rule 5. Where saved-tensor hooks were active when the region was opened (an outer checkpoint, `save_on_cpu`),
        tensors go through them, and the region holds the packed objects only, so that an outer checkpoint
        frees the inner one's inputs. packed.py does this.
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
from actckpt.runtime import messages, torch_private

__all__ = ["HeldTensorChanged", "Inputs", "changed_error", "is_of_module", "parameter_error"]

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
        #: Tensors with where they stand.
        self.tensors: list[tuple[str, Tensor]] = []
        self.generators: list[torch.Generator] = []
        self.modules: list[torch.nn.Module] = []
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
        return list(dict.fromkeys(tensor.device for _, tensor in self.tensors if not tensor.is_cpu))

    def _visit(self, value: Any, place: str) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append((place, value))
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif is_of_module(value):
            self.modules.append(value)
        else:
            if isinstance(value, types.FunctionType):
                self.functions.append(value)
            for inner_place, part in _parts(value, place):
                self._visit(part, inner_place)


def _parts(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield what a container or function is made of, with where it stands."""
    if isinstance(value, types.FunctionType):
        name = value.__name__
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"Variable {variable!r} in the closure of {name}", contents_of(cell)
        yield f"The defaults of {name}", (value.__defaults__, value.__kwdefaults__)
        for variable, held in _watched_globals(value):
            yield f"Global variable {variable!r} that {name} reads", held
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


class Originals:
    """The function and arguments themselves, watched for changes (Rules 1 to 3)."""

    def __init__(self, call: Call, survey: Survey, *, watch_cells: bool = True) -> None:
        self._call = call
        self._tensors = [(place, tensor, version(tensor)) for place, tensor in survey.tensors]
        functions = survey.functions if watch_cells else []
        self._cells = [(cell, contents_of(cell)) for function in functions for cell in function.__closure__ or ()]
        self._globals = [
            (function.__globals__, name, value)
            for function in survey.functions
            for name, value in _watched_globals(function)
        ]

    def forward_done(self) -> None:
        """What the forward itself bound anew, or changed in a global tensor, is its own business."""
        self._cells = [(cell, value) for cell, value in self._cells if contents_of(cell) is value]
        self._globals = [entry for entry in self._globals if entry[0].get(entry[1]) is entry[2]]
        self._tensors = [
            (place, tensor, before)
            for place, tensor, before in self._tensors
            if not place.startswith("Global") or version(tensor) == before
        ]

    def thaw(self) -> tuple[Call, Sequence[Tensor]]:
        """Return the call of one rerun, and the tensors that it is given.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        for place, tensor, before in self._tensors:
            if version(tensor) != before:
                raise _input_error(place, "was changed in place", tensor, before)
        for namespace, name, value in self._globals:
            if namespace.get(name) is not value:
                raise _input_error(f"Global variable {name!r} that the function reads", "was bound to something else")
        function, args, kwargs = self._call
        rebound = {id(cell): value for cell, value in self._cells if contents_of(cell) is not value}
        if rebound:
            function = _with_cells(function, rebound)
        return (function, args, kwargs), [tensor for _, tensor, _ in self._tensors]


class Inputs:
    """The function and arguments of one region, held for reruns. See NOTE [ Inputs of a region ]."""

    __slots__ = ("_held", "_modules", "_parameter_versions", "devices", "generators", "name")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Any) -> None:
        from actckpt.runtime.packed import Packed, SavedThroughFunction  # only where hooks are active

        survey = Survey(function, args, kwargs)
        outer = torch_private.outer_hooks() or hooks
        if not torch_private.knows_outer_hooks():
            outer = SavedThroughFunction()
        call = (function, args, kwargs)
        self._held: Originals | Packed = Originals(call, survey) if outer is None else Packed(call, survey, outer)
        #: Name of the function, for error messages.
        self.name = messages.name_of(function)
        #: `torch.Generator`s found among the inputs.
        self.generators = survey.generators
        self.devices = survey.devices
        self._modules = tuple(survey.modules)
        self._parameter_versions: int | None = None

    def forward_done(self) -> None:
        """Note what the forward itself bound anew (Rule 2), and the parameters as it left them (Rule 4)."""
        self._held.forward_done()
        self._parameter_versions = _frames.sum_parameter_versions(self._modules)

    def check_parameters(self) -> None:
        """Raise if a parameter was changed in place since the forward.

        Raises:
            RerunMismatchError: one was.
        """
        found = _frames.sum_parameter_versions(self._modules)
        if self._parameter_versions is not None and self._parameter_versions != found:
            raise parameter_error(self.name, self._parameter_versions, found)

    def thaw(self) -> tuple[Call, Sequence[Tensor]]:
        """Return the call of one rerun, and the tensors that it is given.

        Raises:
            InputChangedError: something was changed after the forward.
        """
        return self._held.thaw()


def version(value: object) -> int:
    """Return the version of a tensor; 0 for what has none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL


def _with_cells(value: Any, contents: dict[int, Any]) -> Any:
    """Return `value` with cells replaced by new ones of these contents, by id; itself if it has none of them."""
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = []
        for cell in value.__closure__:
            held = contents[id(cell)] if id(cell) in contents else contents_of(cell)
            inner = held if held is EMPTY_CELL else _with_cells(held, contents)
            cells.append(cell if inner is contents_of(cell) else types.CellType(inner))
        if all(new is old for new, old in zip(cells, value.__closure__, strict=True)):
            return value
        function = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells)
        )
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function
    if isinstance(value, partial):
        function = _with_cells(value.func, contents)
        return value if function is value.func else partial(function, *value.args, **value.keywords)
    return value


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
    message = f"{place}, an input of a checkpointed region, {how} after its forward, and backward has to run it again"
    if tensor is not None:
        message += (
            f": tensor of shape {tuple(tensor.shape)}, {tensor.dtype}.\nVersion {before} in forward, {version(tensor)} "
            "now (one of the variables needed for gradient computation has been modified by an inplace operation)"
        )
    return InputChangedError(
        f"{message}.\nChange a clone instead, or run backward before changing it. A statistic that the region itself "
        "updates belongs into a module's buffer."
    )


def parameter_error(function: object, expected: int, found: int) -> RerunMismatchError:
    """Word a parameter that was changed in place between forward and rerun."""
    name = function if isinstance(function, str) else messages.name_of(function)
    return RerunMismatchError(
        f"A parameter of {name} was changed in place after its forward, and backward has to run it again (one of the "
        "variables needed for gradient computation has been modified by an inplace operation): the versions of its "
        f"parameters add up to {expected} in forward, {found} now.\n"
        'Run backward before the optimizer step that changes the parameter, or pass determinism_check="none" if the '
        "change does no harm."
    )
