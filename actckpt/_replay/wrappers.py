"""Tensor subclasses that a region saw: they have version counters that their inner tensors do not share.

Operators are recorded on the inner tensors (NOTE [ Replay ], Rule 4). An in-place operator on a DTensor increments only
the version of the DTensor. So the subclass instances that operators got are recorded. Once the region is closed, the
bytes behind their inner tensors are watched through them (Rule 6).
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from actckpt._C import strided_storage_of
from actckpt._core.subclasses import parts_of
from actckpt._core.tensor_changes import version_of
from actckpt._replay.aliases import Seen, VersionCheck
from actckpt._replay.lineage import Value
from actckpt._replay.tape import Tape

__all__ = ["note", "version_checks"]


def note(tape: Tape, arguments: Any) -> None:
    """Record the subclass instances among the arguments of an operator."""
    if isinstance(arguments, Tensor):
        if hasattr(type(arguments), "__tensor_flatten__"):
            _note_wrapper(tape, arguments)
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            note(tape, argument)
    elif isinstance(arguments, dict):
        note(tape, list(arguments.values()))


def _note_wrapper(tape: Tape, wrapper: Tensor) -> None:
    if tape.wrappers is None:
        tape.wrappers = {}
    known = tape.wrappers.get(id(wrapper))
    if known is not None and known.wrapper() is wrapper:
        return
    root = wrapper if wrapper._base is None else wrapper._base
    storages = [weakref.ref(storage) for storage in _storages(tape, wrapper)]
    tape.wrappers[id(wrapper)] = Seen(weakref.ref(wrapper), weakref.ref(root), storages)


def _storages(tape: Tape, tensor: object) -> Iterator[torch.UntypedStorage]:
    if not isinstance(tensor, Tensor):
        return
    if hasattr(type(tensor), "__tensor_flatten__"):
        for part in parts_of(tensor)[0].values():
            yield from _storages(tape, part)
        return
    storage = strided_storage_of(tensor)
    if storage is not None:
        yield storage


def version_checks(tape: Tape) -> dict[Value, list[VersionCheck]]:
    """Return subclass version checks for values that back live subclass instances when the region closes."""
    checks: dict[Value, list[VersionCheck]] = {}
    for seen in (tape.wrappers or {}).values():
        root = seen.root()
        for reference in seen.storages if root is not None else ():
            storage = reference()
            known = tape.storages.get(id(storage))
            if known is not None and known.storage() is storage:
                checks.setdefault(known.value, []).append((seen.root, version_of(root)))
    tape.wrappers = None
    return checks
