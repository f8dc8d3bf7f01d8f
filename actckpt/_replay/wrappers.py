"""Tensor subclasses that a region saw: they count what is done to them, and the tensors that they are made of do not.

Operators are recorded on the inner tensors (Rule 4 of NOTE [ Replay ]). An operator in place on a DTensor moves the
version of the DTensor alone. So the subclasses that operators got are noted, and once the region is closed, bytes that
they are made of are watched through them (Rule 7).
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

__all__ = ["note", "witnesses"]


def note(tape: Tape, arguments: Any) -> None:
    """Note the subclasses among the arguments of an operator."""
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


def witnesses(tape: Tape) -> dict[Value, list[VersionCheck]]:
    """Return, for values whose bytes subclasses are made of as the region closes, what tells of changes."""
    found: dict[Value, list[VersionCheck]] = {}
    for seen in (tape.wrappers or {}).values():
        root = seen.root()
        for reference in seen.storages if root is not None else ():
            storage = reference()
            known = tape.storages.get(id(storage))
            if known is not None and known.storage() is storage:
                found.setdefault(known.value, []).append((seen.root, version_of(root)))
    tape.wrappers = None
    return found
