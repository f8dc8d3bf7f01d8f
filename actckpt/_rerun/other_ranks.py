"""Collectives of functions that run again in backward: ranks compare them before they run.

NOTE [ Collectives in reruns ]

A rerun runs the collectives of its function again, on all ranks of their group or on none; nobody recorded the forward.

Rule 1. In the first backward that reruns a function, its reruns are watched by a dispatch mode. Before the first
        collective of a group runs in one, this rank compares it with the other ranks (`agreement`): its operator, the
        function, and the module that runs it. So a rank that reruns what others keep raises, and does not pair its
        collectives with others. Those that follow in the function are not compared, nor later steps.
Rule 2. Whenever ranks have agreed on something else than before, functions are watched once more: a function may
        be rerun, replayed, and rerun again.
Rule 3. Operators that send to or receive from one rank are no collectives: ranks differ in them.
Rule 4. In backward the stack does not tell the outermost module, by which names of modules go: the forward takes it
        down.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._core import agreement, torch_private
from actckpt._core.sites import modules_on_stack, qualified_name

__all__ = ["is_watched", "note_forward", "watched"]

#: Beginnings of the names of operators between two ranks (Rule 3).
_BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_p2p")


class _Known:
    """What is known of a function that reruns call."""

    __slots__ = ("generation", "root", "task")

    def __init__(self, root: torch.nn.Module | None) -> None:
        #: The outermost module around it in forward.
        self.root = None if root is None else weakref.ref(root)
        #: When it was watched last: `agreement.generation`, and the backward.
        self.generation = -1
        self.task = -1


_known: "weakref.WeakKeyDictionary[Any, _Known]" = weakref.WeakKeyDictionary()


def note_forward(function: Callable[..., Any]) -> None:
    """Take down where the forward of a function runs that may run again (Rule 4)."""
    if agreement.has_others() and (owner := _owner_of(function)) not in _known:
        modules = list(modules_on_stack())
        _known[owner] = _Known(modules[-1] if modules else None)


def is_watched(function: Callable[..., Any]) -> bool:
    """Whether the rerun of a function that is about to begin is to be watched (Rules 1 and 2)."""
    if not agreement.has_others() or agreement.is_alone():
        return False
    known = _known.get(_owner_of(function))
    if known is None:
        return False
    now = agreement.generation(), torch_private.current_graph_task_id()
    if known.generation != now[0]:
        known.generation, known.task = now
    return known.task == now[1]


@contextmanager
def watched(function: Callable[..., Any]) -> Iterator[None]:
    """Run the body, which calls a function again, so that ranks compare what it repeats where they must."""
    if is_watched(function):
        with _Watch(function, _known[_owner_of(function)]):
            yield
    else:
        yield


class _Watch(TorchDispatchMode):
    """Has ranks compare the first collective of each group."""

    supports_higher_order_operators = True

    def __init__(self, function: Callable[..., Any], known: _Known) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = _where(function)
        self._root = None if known.root is None else known.root()
        self._seen: set[Any] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: a rerun must save what its forward saved."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operators inside of it come here
        group = _group_of(func, args, kwargs or {})
        if group is not None and group not in self._seen:
            self._seen.add(group)
            name = str(func)
            agreement.agree(group, agreement.Repeated(self._where, self._module(), None, ((0, name),), is_rerun=True))
        return func(*args, **(kwargs or {}))

    def _module(self) -> str | None:
        innermost = next(modules_on_stack(), None)
        return None if innermost is None or self._root is None else qualified_name(self._root, innermost)


def _group_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the process group of a collective, None for all other operators."""
    if getattr(func, "namespace", "") not in agreement.COLLECTIVE_NAMESPACES:
        return None
    schema = func._schema
    if schema.name.partition("::")[2].startswith(_BETWEEN_TWO):
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.name in ("group_name", "process_group"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            return agreement.resolved(given)
    return None


def _owner_of(function: Any) -> Any:
    """Return what stands for a function that may be made anew at each call: its module, or its code."""
    function = _without_arguments(function)
    if isinstance(function, torch.nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else getattr(function, "__code__", type(function))


def _where(function: Any) -> str:
    """Return what the site of a region around a function is called: file and line, which all ranks have."""
    function = _without_arguments(function)
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _without_arguments(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
