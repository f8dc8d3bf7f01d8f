"""Properties of functions: their module, closure cells, global names, and whether their body runs when called."""

import dis
import inspect
import types
from functools import lru_cache
from typing import Any

import torch

from actckpt._core import messages

__all__ = ["EMPTY_CELL", "assigned_variables", "check_runs_when_called", "contents_of", "global_names", "is_of_module"]

EMPTY_CELL = object()


def is_of_module(function: object) -> bool:
    """Whether this is a module or a module's method; of those only parameters are watched."""
    if type(function) is types.MethodType:
        function = function.__self__
    return isinstance(function, torch.nn.Module)


def contents_of(cell: types.CellType) -> Any:
    """Return the contents of a closure cell, `EMPTY_CELL` if unbound."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL


def check_runs_when_called(function: object, who: str) -> None:
    """Raise if the decorated object is no function, or its body runs after the call (a generator or coroutine)."""
    if not callable(function):
        raise TypeError(f"{who}: {function!r} is not a function to decorate. Put @actckpt.{who}(...) above a def.")
    kinds = {
        "generator": inspect.isgeneratorfunction,
        "coroutine": inspect.iscoroutinefunction,
        "asynchronous generator": inspect.isasyncgenfunction,
    }
    for kind, is_kind in kinds.items():
        if is_kind(function):
            raise TypeError(
                f"{who}: {messages.name_of(function)} is a {kind} function. Its call returns before its body runs, so "
                "that nothing of the body would be inside. Decorate the functions that it calls."
            )


@lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that `code`, or a function inside it, reads."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(global_names(constant))
    return tuple(sorted(names))


@lru_cache(maxsize=4096)
def assigned_variables(code: types.CodeType) -> frozenset[str]:
    """Return the variables of its closure that `code`, or a function inside it, assigns."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = [assigned_variables(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_freevars) & names.union(*inner)
