"""What a rerun calls the function with: everything as it was when the forward was called.

NOTE [ Inputs of a region ]

Rule 1. Every tensor in args, kwargs, their containers, and in the closure cells, defaults and
        `partial` arguments of the function is held with its version. A rerun whose input was
        changed in place raises; torch's checkpoint checks positional tensors only and computes
        wrong gradients with the others.
Rule 2. A non-leaf enters the rerun as a view of its own. It is connected with the graph outside, so
        that a gradient taken inside can reach upstream, but a hook registered on it in a rerun is not
        registered on the graph outside a second time.
Rule 3. Where saved-tensor hooks were active when the region was opened (an outer checkpoint,
        `save_on_cpu`), tensors go through them and the region holds the packed objects only. So an
        outer checkpoint frees the inner one's inputs, also those in kwargs, containers and closures.
Rule 4. A closure variable is held by value: one that is bound anew after the forward (the variable of a
        loop) does not change the rerun. One that the forward itself binds anew, here or in a function
        that it calls, stays live. A global variable that is a tensor or a module must not be bound
        anew, nor the tensor changed, unless the forward itself does so.
Rule 5. Containers without tensors, and objects we do not know, are passed as they are.
Rule 6. Modules and their methods are held as they are. A change of a parameter of a module that stands
        among the inputs is noticed by the sum of all versions; buffers may move (BatchNorm's do).
"""

import dataclasses
import dis
import types
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _frames
from actckpt.errors import InputChangedError, RerunMismatchError
from actckpt.runtime import messages, torch_private

__all__ = ["Inputs"]

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type)


def is_of_module(function: object) -> bool:
    """Whether this is a module or a method of one, which are held as they are (Rule 6)."""
    if type(function) is types.MethodType:
        function = function.__self__
    return isinstance(function, torch.nn.Module)


class Inputs:
    """The function and arguments of one region, held for reruns. See NOTE [ Inputs of a region ]."""

    __slots__ = ("_functions", "_modules", "_parameter_versions", "args", "devices", "function", "generators", "kwargs")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: torch_private.Hooks | None = None,
    ) -> None:
        holding = _Holding(hooks)
        self.args = tuple([holding.hold(value) for value in args])
        self.kwargs = {name: holding.hold(value) for name, value in kwargs.items()}
        self.function = holding.hold(function)
        holding.finish()
        #: `torch.Generator`s found among the inputs.
        self.generators = holding.generators
        #: Devices other than the CPU of the tensors found.
        self.devices = holding.devices
        self._functions = holding.functions
        self._modules = tuple(holding.modules)
        self._parameter_versions: int | None = None

    def forward_done(self) -> None:
        """Note what the forward itself bound anew (Rule 4), and the parameters as it left them."""
        for function in self._functions:
            function.forward_done()
        self._functions = []
        self._parameter_versions = _frames.sum_parameter_versions(self._modules)

    def check_parameters(self) -> None:
        """Raise if a parameter was changed in place since the forward.

        Raises:
            RerunMismatchError: one was.
        """
        found = _frames.sum_parameter_versions(self._modules)
        if self._parameter_versions is not None and self._parameter_versions != found:
            raise parameter_error(self.function, self._parameter_versions, found)

    def thaw(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Return function, args and kwargs for one rerun, and the tensors among them.

        Raises:
            InputChangedError: a tensor was changed in place after the forward.
        """
        thawing = _Thawing()
        try:
            args = tuple([thawing.thaw(value) for value in self.args])
            kwargs = {name: thawing.thaw(value) for name, value in self.kwargs.items()}
            return thawing.thaw(self.function), args, kwargs, list(thawing.tensors.values())
        except HeldTensorChanged as changed:
            raise changed_error(changed, self.args, self.kwargs, self.function) from None


class HeldTensorChanged(Exception):  # noqa: N818 - never leaves the runtime
    """What `HeldTensor.thaw` raises; `changed_error` words it."""

    def __init__(self, held: object, how: str = "was changed in place") -> None:
        super().__init__()
        self.held = held
        self.how = how


@dataclasses.dataclass(frozen=True, slots=True)
class _HeldContainer:
    """A list, tuple, dict or dataclass with held values, and how to build it again."""

    build: Callable[[list[Any]], Any]
    places: list[str]
    values: list[Any]


class _HeldFunction:
    """A Python function with its defaults and closure variables held by value (Rule 4)."""

    __slots__ = ("_contents", "defaults", "function", "globals", "kwdefaults", "original", "variables")

    def __init__(self, function: types.FunctionType, holding: "_Holding") -> None:
        cells = function.__closure__ or ()
        #: Cells with what they contained; let go of after the forward.
        self._contents = [(cell, cell.cell_contents if _is_filled(cell) else _EMPTY_CELL) for cell in cells]
        self.defaults = holding.hold(function.__defaults__)
        self.kwdefaults = holding.hold(function.__kwdefaults__)
        self.variables = [
            _LiveCell(cell) if value is _EMPTY_CELL else holding.hold(value) for cell, value in self._contents
        ]
        self.globals = {
            name: _HeldGlobal(value, holding.hold(value))
            for name in _global_names(function.__code__)
            if isinstance(value := function.__globals__.get(name), Tensor | torch.nn.Module)
        }
        # Nothing held: reruns call the function itself as long as no variable is bound anew. With
        # tensors held they must not: its cells keep tensors alive that outer hooks want to free.
        same = all(
            new is old or old is _EMPTY_CELL for new, (_, old) in zip(self.variables, self._contents, strict=True)
        )
        same = same and self.defaults is function.__defaults__ and self.kwdefaults is function.__kwdefaults__
        self.original = function if same else None
        self.function = (function.__code__, function.__globals__, function.__name__, function.__dict__)

    @property
    def holds_anything(self) -> bool:
        """Whether reruns need more than the function itself."""
        return bool(self.original is None or self.variables or self.globals)

    @property
    def name(self) -> str:
        """Name and place of the function, for error messages."""
        code = self.function[0]
        return f"{self.function[2]} ({code.co_filename}:{code.co_firstlineno})"

    def forward_done(self) -> None:
        """What the forward bound anew stays live."""
        for i, (cell, value) in enumerate(self._contents):
            if not _is_filled(cell) or cell.cell_contents is not value:
                self.variables[i] = _LiveCell(cell)
        self._contents = []
        namespace = self.function[1]
        self.globals = {name: held for name, held in self.globals.items() if held.is_unchanged_in(namespace, name)}

    def thaw(self, thawing: "_Thawing") -> types.FunctionType:
        code, namespace, name, attributes = self.function
        for global_name, held in self.globals.items():
            if namespace.get(global_name) is not held.value:
                raise HeldTensorChanged(held, "was bound to something else")
            thawing.thaw(held.held)
        if self.original is not None and self._is_unchanged(self.original):
            return self.original
        cells = tuple(
            value.cell if isinstance(value, _LiveCell) else types.CellType(thawing.thaw(value))
            for value in self.variables
        )
        function = types.FunctionType(code, namespace, name, thawing.thaw(self.defaults), cells)
        function.__kwdefaults__ = thawing.thaw(self.kwdefaults)
        function.__dict__.update(attributes)
        return function

    def _is_unchanged(self, original: types.FunctionType) -> bool:
        return (
            original.__defaults__ is self.defaults
            and original.__kwdefaults__ is self.kwdefaults
            and all(
                isinstance(value, _LiveCell) or (_is_filled(cell) and cell.cell_contents is value)
                for value, cell in zip(self.variables, original.__closure__ or (), strict=True)
            )
        )


class _HeldGlobal:
    """A global variable that a function names: a tensor or a module."""

    __slots__ = ("_version", "held", "value")

    def __init__(self, value: "Tensor | torch.nn.Module", held: Any) -> None:
        self.value = value
        self.held = held
        self._version = _version(value)

    def is_unchanged_in(self, namespace: dict[str, Any], name: str) -> bool:
        """Whether the forward left the variable alone."""
        return namespace.get(name) is self.value and _version(self.value) == self._version


@dataclasses.dataclass(frozen=True, slots=True)
class _LiveCell:
    cell: types.CellType


_EMPTY_CELL = object()


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


class _Holding:
    """One pass over the inputs of a region."""

    __slots__ = ("_hooks", "_open", "_outer", "_tensors", "devices", "functions", "generators", "modules")

    def __init__(self, hooks: torch_private.Hooks | None) -> None:
        self.functions: list[_HeldFunction] = []
        self.modules: list[torch.nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.devices: list[torch.device] = []
        self._tensors: dict[int, _frames.HeldTensor] = {}
        self._open: set[int] = set()
        self._outer: _SavedThroughFunction | None = None
        self._hooks: tuple[Any, Any] = torch_private.outer_hooks() or hooks or (None, None)
        if not torch_private.knows_outer_hooks():
            self._outer = _SavedThroughFunction()
            self._hooks = self._outer.hooks()

    def finish(self) -> None:
        if self._outer is not None:
            self._outer.save()

    def hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._hold_tensor(value)
        if isinstance(value, _PLAIN):
            return value
        if is_of_module(value):
            self.modules.append(value)
            return value
        if isinstance(value, torch.Generator):
            if not any(value is known for known in self.generators):
                self.generators.append(value)
            return value
        return self._hold_compound(value)

    def _hold_tensor(self, tensor: Tensor) -> "_frames.HeldTensor":
        held = self._tensors.get(id(tensor))
        if held is None:
            pack, unpack = self._hooks
            with torch.no_grad():
                held = self._tensors[id(tensor)] = _frames.hold(tensor, pack, unpack)
            if not tensor.is_cpu and tensor.device not in self.devices:
                self.devices.append(tensor.device)
        return held

    def _hold_compound(self, value: Any) -> Any:
        if id(value) in self._open:
            return value  # a container or closure that contains itself stays as it is
        self._open.add(id(value))
        try:
            return self._take_apart(value)
        finally:
            self._open.discard(id(value))

    def _take_apart(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            held = _HeldFunction(value, self)
            if not held.holds_anything:
                return value
            self.functions.append(held)
            return held
        if isinstance(value, types.MethodType):
            return self._container(value, [value.__func__], ["function"], partial(_method, value.__self__))
        if isinstance(value, partial):
            parts = [value.func, value.args, value.keywords]
            return self._container(value, parts, ["function", "arguments", "keywords"], _partial)
        if isinstance(value, tuple):
            build = type(value)._make if hasattr(value, "_make") else type(value)
            return self._container(value, list(value), [str(i) for i in range(len(value))], build)
        if isinstance(value, list):
            return self._container(value, value, [str(i) for i in range(len(value))], partial(_list, type(value)))
        if isinstance(value, dict):
            return self._container(value, list(value.values()), [repr(k) for k in value], _rebuild_dict(value))
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return self._container(value, [getattr(value, n) for n in names], names, _rebuild_dataclass(value, names))
        return value

    def _container(self, value: Any, parts: list[Any], places: list[str], build: Callable[..., Any]) -> Any:
        held = [self.hold(part) for part in parts]
        if all(new is old for new, old in zip(held, parts, strict=True)):
            return value  # Rule 5
        return _HeldContainer(build, places, held)


class _Thawing:
    """One rerun's inputs; a tensor that stands in several places is the same object in each."""

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: dict[_frames.HeldTensor, Tensor] = {}

    def thaw(self, value: Any) -> Any:
        kind = type(value)
        if kind is _frames.HeldTensor:
            tensor = self.tensors.get(value)
            if tensor is None:
                with torch.no_grad():
                    tensor = self.tensors[value] = value.thaw()
            return tensor
        if kind is _HeldContainer:
            return value.build([self.thaw(part) for part in value.values])
        if kind is _HeldFunction:
            return value.thaw(self)
        return value


def _method(owner: Any, parts: list[Any]) -> types.MethodType:
    return types.MethodType(parts[0], owner)


def _partial(parts: list[Any]) -> Any:
    return partial(parts[0], *parts[1], **parts[2])


def _list(kind: type, parts: list[Any]) -> Any:
    return parts if kind is list else kind(parts)


def _rebuild_dict(original: dict[Any, Any]) -> Callable[[list[Any]], Any]:
    keys = list(original)
    if type(original) is dict:
        return lambda values: dict(zip(keys, values, strict=True))
    empty = copy(original)  # keeps a defaultdict's factory, an OrderedDict's order
    for key in keys:
        dict.__setitem__(empty, key, None)

    def build(values: list[Any]) -> Any:
        result = copy(empty)
        for key, value in zip(keys, values, strict=True):
            result[key] = value
        return result

    return build


def _rebuild_dataclass(original: Any, names: list[str]) -> Callable[[list[Any]], Any]:
    empty = copy(original)
    for name in names:
        object.__setattr__(empty, name, None)

    def build(values: list[Any]) -> Any:
        result = copy(empty)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(result, name, value)
        return result

    return build


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that `code`, or a function inside it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _frames.HeldTensor):
        yield place, value
    elif isinstance(value, _HeldContainer):
        for name, part in zip(value.places, value.values, strict=True):
            yield from _walk(part, f"{place}[{name}]")
    elif isinstance(value, _HeldFunction):
        name = value.function[2]
        for variable, part in zip(value.function[0].co_freevars, value.variables, strict=True):
            yield from _walk(part, f"Variable {variable!r} in the closure of {name}")
        for variable, held in value.globals.items():
            yield f"Global variable {variable!r} that {name} reads", held
            yield from _walk(held.held, f"Global variable {variable!r} that {name} reads")
        yield from _walk(value.defaults, f"The defaults of {name}")
        yield from _walk(value.kwdefaults, f"The defaults of {name}")


def changed_error(
    changed: HeldTensorChanged, args: Sequence[Any], kwargs: dict[str, Any], function: Any
) -> InputChangedError:
    """Word an input that is not as it was, with its place among the inputs."""
    place = _place_of(changed.held, args, kwargs, function)
    message = (
        f"{place}, an input of a checkpointed region, {changed.how} after its forward, and backward has to run the "
        "region again"
    )
    held = changed.held
    if isinstance(held, _frames.HeldTensor) and isinstance(held.held, Tensor):
        tensor = held.held
        message += (
            f": tensor of shape {tuple(tensor.shape)}, {tensor.dtype}.\nVersion {held.version} in forward, "
            f"{tensor._version} now (one of the variables needed for gradient computation has been modified by an "
            "inplace operation)"
        )
    return InputChangedError(
        f"{message}.\nChange a clone instead, or run backward before changing it. A statistic that the region itself "
        "updates belongs into a module's buffer."
    )


def parameter_error(function: Any, expected: int, found: int) -> RerunMismatchError:
    """Word a parameter that was changed in place between forward and rerun."""
    return RerunMismatchError(
        f"A parameter of {messages.name_of(function)} was changed in place after its forward, and backward has to run "
        "it again (one of the variables needed for gradient computation has been modified by an inplace operation): "
        f"the versions of its parameters add up to {expected} in forward, {found} now.\n"
        'Run backward before the optimizer step that changes the parameter, or pass determinism_check="none" if the '
        "change does no harm."
    )


def _place_of(held: object, args: Sequence[Any], kwargs: dict[str, Any], function: Any) -> str:
    named = [(f"Argument {i}", value) for i, value in enumerate(args)]
    named += [(f"Keyword argument {name!r}", value) for name, value in kwargs.items()]
    for place, value in [*named, ("The function", function)]:
        for inner, tensor in _walk(value, place):
            if tensor is held:
                return inner
    return "An input"


class _SavedThroughFunction:
    """Hooks for a torch that does not tell which hooks are active: autograd itself applies them."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._node: Any = None

    def hooks(self) -> torch_private.Hooks:
        return self._pack, self._unpack

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
