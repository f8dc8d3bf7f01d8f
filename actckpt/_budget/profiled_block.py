"""The profiled costs of one block call: its class in a cost table, and the places of its values."""

from __future__ import annotations

import dataclasses
import weakref
from typing import NamedTuple

import torch

from actckpt._budget.block_bytes import BlockPeaks
from actckpt.planner.costs import BlockClass

__all__ = ["OTHER", "Cast", "ProfiledBlock"]

#: Name of the value for all other bytes that a block holds (see `profiling`).
OTHER = "(other)"


class Cast(NamedTuple):
    """A copy of a parameter in another dtype, which autocast caches."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    #: Its name in the cost table.
    name: str


@dataclasses.dataclass(frozen=True)
class ProfiledBlock:
    """One call of a block."""

    costs: BlockClass
    #: The place of each value in the model, by its name in the cost table.
    places: dict[str, str]
    #: By phase and mode.
    peaks: BlockPeaks
    #: The storage of its input, and that storage's bytes.
    input: weakref.ref[torch.UntypedStorage] | None
    input_bytes: int
    #: The storages of values that it returned, by name in the cost table.
    returned: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    #: Casts of its parameters in autocast's cache: they do not count as values.
    casts: tuple[Cast, ...] = ()
    #: The storages of values by name in the cost table; and the storages of its arguments, with their bytes.
    made: dict[str, weakref.ref[torch.UntypedStorage]] = dataclasses.field(default_factory=dict)
    arguments: tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...] = ()
    #: The storages of its results.
    results: tuple[weakref.ref[torch.UntypedStorage], ...] = ()
