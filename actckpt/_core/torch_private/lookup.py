"""Looks up private names of torch: a missing one raises where it is used, and never at import.

All names that this package touches go through here, as text: `tests/test_layers.py`. What is looked up at import is
noted in `LOOKED_UP`, and `tests/contract/test_torch_versions.py` takes each of these names away in turn.
"""

import importlib
from functools import partial
from typing import Any

import torch

from actckpt._error_base import TorchVersionError

#: The paths that were looked up at import, and whether each torch has them.
LOOKED_UP: dict[str, bool] = {}


def lookup(path: str) -> Any:
    """Return what a dotted path leads to; where torch has no such name, what raises `TorchVersionError` when used.

    It raises when it is called, asked for an attribute, or taken for a class in `isinstance`. It can be a base class,
    and be named in `except`, where it catches nothing.
    """
    LOOKED_UP[path] = True
    try:
        return needed(path)
    except TorchVersionError as error:
        return _Missing(path, (Exception,), {"error": error})


def optional(path: str) -> Any:
    """Return what a dotted path leads to, None where torch has no such name."""
    LOOKED_UP[path] = False
    try:
        return needed(path)
    except TorchVersionError:
        return None


def reader(path: str) -> Any:
    """Return what reads a variable of torch; what raises, where torch has no such name."""
    found = lookup(path)
    owner, _, name = path.rpartition(".")
    return found if isinstance(found, _Missing) else partial(getattr, needed(owner), name)


def needed(path: str) -> Any:
    """Return what a dotted path leads to now; raises where torch has no such name."""
    found: Any = torch
    known, *names = path.split(".")
    for name in names:
        known += f".{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(known)
            except ImportError:
                raise _error(known) from None
    return found


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of an object of torch."""
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
    """The class of what stands for a missing name."""

    error: TorchVersionError

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TorchVersionError(*cls.error.args)

    def __getattr__(cls, name: str) -> Any:
        raise TorchVersionError(*cls.error.args)

    def __instancecheck__(cls, instance: object) -> bool:
        raise TorchVersionError(*cls.error.args)
