"""Looks up private names of torch: a missing one raises when it is used, never at import.

All names that this package uses go through here, as text: `tests/test_layers.py`. Lookups at import are listed in
`LOOKED_UP`; `tests/unit/core/test_torch_versions.py` removes each of these names in turn.
"""

import importlib
from functools import partial
from typing import Any

import torch

from actckpt._error_base import TorchVersionError

#: Paths looked up at import, and whether each torch has them.
LOOKED_UP: dict[str, bool] = {}


def lookup(path: str) -> Any:
    """Return the object at a dotted path; if torch has no such name, a stand-in that raises `TorchVersionError` when
    used.

    The stand-in raises when it is called, asked for an attribute, or used as a class in `isinstance`. It can be a base
    class, or be named in `except`, where it catches nothing.
    """
    LOOKED_UP[path] = True
    try:
        return needed(path)
    except TorchVersionError as error:
        return _Missing(path, (Exception,), {"error": error})


def optional(path: str) -> Any:
    """Return the object at a dotted path, None if torch has no such name."""
    LOOKED_UP[path] = False
    try:
        return needed(path)
    except TorchVersionError:
        return None


def reader(path: str) -> Any:
    """Return a function that reads a variable of torch; it raises if torch has no such name."""
    variable = lookup(path)
    owner, _, name = path.rpartition(".")
    return variable if isinstance(variable, _Missing) else partial(getattr, needed(owner), name)


def needed(path: str) -> Any:
    """Return the object at a dotted path now; raises if torch has no such name."""
    target: Any = torch
    known, *names = path.split(".")
    for name in names:
        known += f".{name}"
        try:
            target = getattr(target, name)
        except AttributeError:
            try:
                target = importlib.import_module(known)
            except ImportError:
                raise _error(known) from None
    return target


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of a torch object."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _error(f"{type(owner).__name__}.{name}") from None


def _error(path: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {path}, which this part of actckpt needs; the other parts work. "
        "Install another version of actckpt or of torch: the README says which are tested."
    )


class _Missing(type):
    """Metaclass of the stand-in for a missing name."""

    error: TorchVersionError

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TorchVersionError(*cls.error.args)

    def __getattr__(cls, name: str) -> Any:
        raise TorchVersionError(*cls.error.args)

    def __instancecheck__(cls, instance: object) -> bool:
        raise TorchVersionError(*cls.error.args)
