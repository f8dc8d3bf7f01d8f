"""The inputs of reruns: function and arguments as they were in the forward.

NOTE [ Inputs of a region ]

Rule 1. A rerun gets the same objects as the forward: tensors, containers, functions. Every tensor among args, kwargs
and their containers, and in the function's closure cells, defaults and `partial` arguments, is watched, and so is one
in a global variable that the function names, unless the forward itself changes it. If it was changed in place, or given
other memory (`.data`, `swap_tensors`), the rerun raises. torch's checkpoint watches positional tensors only, and
computes wrong gradients for the others.
Rule 2. During a rerun, lists, dicts, sets and deques of the call, and closure variables, hold what they held when the
forward began. Afterwards they hold again what they held before the rerun. So it does not matter whether the forward or
code after it changed them, and nothing is appended twice. Such reruns run one at a time, as those that restore random
state do. Objects, their attributes and global variables are not restored: a function that changes them is not pure,
which the audit finds (NOTE [ Audit of reruns ]).
Rule 3. A region holds references to the objects that containers held when the forward began, not copies. It holds no
object that the forward added: that may lead to the region's saved tensors, which own the region, and Python's collector
does not see cycles through autograd nodes. Of a tensor that the forward removed it holds an alias without the graph,
since the graph of the previous call would own that call's region. A tensor that only objects hold may change if no
rerun reads it: after a change, reruns run under a mode that raises at a read.
Rule 4. Parameters of the called module (or of the module whose `forward` is called) must be unchanged in a rerun
(csrc/rerun/parameters.h). Buffers may change: NOTE [ Buffers ]. Modules are found in objects and global variables, too.
Rule 5. If saved-tensor hooks were active at opening (an outer checkpoint, `save_on_cpu`), tensors among the arguments
go through them. The region holds only the packed objects, so an outer checkpoint frees the inner one's inputs. See
packed.py.
Rule 6. Inference tensors have no version counter. A rerun gets a copy of such a module argument, and of such a tensor
under Rule 5. If it gets the object itself, or if a parameter is one, it is compared with a copy.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import messages
from actckpt._core.functions import assigned_variables, contents_of
from actckpt._core.reachable import Contents, Reached, is_container, reachable
from actckpt._core.tensor_changes import Watched
from actckpt._rerun.buffers import Stale

__all__ = [
    "Inputs",
    "Restored",
    "Survey",
]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Survey:
    """Everything reachable from a region's function and arguments, each object once.

    Args:
        excluded: objects that reruns find as they are, with all that they lead to.
    """

    def __init__(self, call: Call, excluded: Sequence[Any] = ()) -> None:
        function, args, kwargs = call
        roots = [Reached(f"Argument {i}", value) for i, value in enumerate(args)]
        roots += [Reached(f"Keyword argument {name!r}", value) for name, value in kwargs.items()]
        found = list(reachable([*roots, Reached("The function", function)], excluded))
        inside = [reached for reached in found if not reached.is_outside]
        tensors = _of(Tensor, found)
        #: Tensors of the call, where they were found, and whether in a global variable.
        self.tensors = [
            (each.place, each.value, each.is_global) for each in tensors if each.is_global or not each.is_outside
        ]
        #: Tensors that only objects lead to, and where.
        self.outside = [(each.place, each.value) for each in tensors if each.is_outside and not each.is_global]
        #: Non-CPU devices of all tensors found, without repeats, including packed ones.
        self.devices = list(dict.fromkeys(each.value.device for each in tensors if not each.value.is_cpu))
        self.generators = [each.value for each in _of(torch.Generator, found)]
        self.modules = [each.value for each in _of(torch.nn.Module, found)]
        self.functions = [each.value for each in _of(types.FunctionType, inside)]
        #: Containers of the call that can be changed.
        self.containers = [each.value for each in inside if is_container(each.value)]


def _of(kind: type, found: list[Reached]) -> list[Reached]:
    return [reached for reached in found if issubclass(type(reached.value), kind)]


@dataclasses.dataclass(slots=True)
class Restored:
    """The inputs of one rerun."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The tensors among them.
    tensors: Sequence[Tensor] = ()
    #: Cells and the values that they hold when the rerun begins (Rule 2).
    cells: Sequence[tuple[types.CellType, Any]] = ()
    #: Tensors of objects that were changed since, which the rerun must not read (Rule 3).
    stale: Sequence[Stale] = ()
    #: Whether the function can be called as it is (csrc/rerun/region.cpp).
    is_plain: bool = False


@dataclasses.dataclass(slots=True)
class _WatchedInput:
    place: str
    is_global: bool
    watched: Watched


class Inputs:
    """The function and arguments of one region, held for reruns. See NOTE [ Inputs of a region ]."""

    def __init__(self, call: Call, survey: Survey) -> None:
        self.devices, self.generators, self.modules = survey.devices, survey.generators, survey.modules
        self._call = call
        self._argument_ids = set(map(id, call[1])) | set(map(id, call[2].values()))
        self._tensors = [_WatchedInput(place, is_global, Watched(t)) for place, t, is_global in survey.tensors]
        self._outside = [(place, Watched(tensor)) for place, tensor in survey.outside]
        self._contents = Contents(survey.containers)
        cells = {id(cell): cell for function in survey.functions for cell in function.__closure__ or ()}
        self._cells = [(cell, contents_of(cell)) for cell in cells.values()]
        self._rebound: list[tuple[types.CellType, Any]] = []
        #: id() of the cells that a function assigns: a rerun that stops early may leave them changed.
        self._assigned_ids = {
            id(cell)
            for function in survey.functions
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            if name in assigned_variables(function.__code__)
        }

    @property
    def has_containers(self) -> bool:
        """Whether reruns put back what containers held (Rule 2)."""
        return not self._contents.is_empty

    def forward_done(self) -> None:
        """Record what the forward itself rebound, or changed in containers or a global tensor."""
        aliases: dict[int, Tensor] = {}  # of the tensors that the forward displaced, by id

        def without_graph(value: Any) -> Any:
            if id(value) in self._argument_ids or not isinstance(value, Tensor):
                return value
            alias = _C.without_graph(value)
            return value if alias is value else aliases.setdefault(id(value), alias)

        self._contents.replace_displaced(without_graph)
        rebound = [(cell, value) for cell, value in self._cells if contents_of(cell) is not value]
        kept = aliases | {id(value): _C.without_graph(value) for _, value in rebound if isinstance(value, Tensor)}
        self._rebound = [(cell, kept.get(id(value), value)) for cell, value in rebound]
        self._cells = [(cell, value) for cell, value in self._cells if contents_of(cell) is value]
        self._tensors = [item for item in self._tensors if not item.is_global or not item.watched.is_changed()]
        for item in self._tensors if kept else ():
            item.watched.hold_instead(kept.get(id(item.watched.tensor), item.watched.tensor))
        for _, watched in self._outside:  # the forward may have displaced it
            if (alias := _C.without_graph(watched.tensor)) is not watched.tensor:
                watched.hold_instead(alias)

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
        put_back = [(cell, value) for cell, value in unchanged if id(cell) in self._assigned_ids]
        changed = [it for it in self._outside if it[1].is_changed() or it[1].has_other_memory()]
        stale = [Stale(watched.tensor, watched.version, place, _ADVICE) for place, watched in changed]
        return Restored(*call, self.tensors, [*self._rebound, *put_back], stale)

    def with_containers(self) -> AbstractContextManager[None]:
        """Run the body, of a rerun, with containers as the forward found them."""
        return self._contents.restored()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among function and arguments that are held as they are."""
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


_ADVICE = (
    "Change a clone instead, or run backward before changing it. What the function itself changes in place belongs "
    'into a module\'s buffer. Or pass a policy, or determinism_check="none" if the change does no harm.'
)
