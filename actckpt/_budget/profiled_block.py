"""The profiled costs of one block call, measured or scaled from a profile at another size."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from actckpt._budget.block_bytes import BlockPeaks
from actckpt.planner.costs import BlockClass, Value

__all__ = ["OTHER", "BlockProfile", "Cast", "ProfiledBlock", "at_other_size", "without_sizes"]

#: Name of the value for all other bytes that a block holds (see `profiling`).
OTHER = "(other)"
#: Beyond this factor, seconds per byte differ too much: small operators are dominated by launch time.
_MOST_TIMES_LARGER = 4.0


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


class BlockProfile(NamedTuple):
    """Measured costs and peaks of a block at one size."""

    costs: BlockClass
    peaks: BlockPeaks


def without_sizes(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return values that are equal for calls of a block that differ only in sizes."""
    return tuple(dataclasses.replace(value, nbytes=float(value.nbytes > 0), offloadable=False) for value in values)


def at_other_size(profiles: Sequence[BlockProfile], values: Sequence[Value]) -> BlockProfile | None:
    """Return the profile of a call, scaled from the nearest measured size; None if none is near enough.

    Bytes of values are those of the call. Peaks are scaled so that the first cycle under a plan needs at most the
    predicted memory. Seconds grow with the bytes; trials correct them.

    Args:
        profiles: of calls that differ from this one only in sizes.
        values: of the call, without `OTHER`.
    """
    nbytes = _total(values)
    ratios = [nbytes / total if (total := _total(profile.costs.values[:-1])) else 1.0 for profile in profiles]
    near = [(max(ratio, 1 / ratio), number) for number, ratio in enumerate(ratios)]
    times_larger, nearest = min(near, default=(math.inf, 0))
    if times_larger > _MOST_TIMES_LARGER:
        return None
    ratio, (costs, peaks) = ratios[nearest], profiles[nearest]
    *known, other = costs.values
    factors = [new.nbytes / old.nbytes if old.nbytes else ratio for new, old in zip(values, known, strict=True)]
    offload_s = max(value.offload_s for value in known)
    scaled = [
        dataclasses.replace(
            new,
            recompute_s=factor * old.recompute_s,
            offload_s=offload_s * new.offloadable,
            needed=old.needed,
        )
        for new, old, factor in zip(values, known, factors, strict=True)
    ]
    costs = dataclasses.replace(
        costs,
        forward_s=ratio * costs.forward_s,
        backward_s=ratio * costs.backward_s,
        rerun_s=None if costs.rerun_s is None else ratio * costs.rerun_s,
        values=(*scaled, dataclasses.replace(other, nbytes=ratio * other.nbytes)),
    )
    return BlockProfile(costs, _scaled(peaks, min(factors), max(factors)))


def _scaled(peaks: BlockPeaks, least: float, most: float) -> BlockPeaks:
    """Return scaled peaks, as upper bounds: differences to `replayed` grow by `most` if positive, else by `least`."""

    def scaled(nbytes: int) -> int:
        difference = nbytes - peaks.replayed
        return round(most * peaks.replayed + (most if difference > 0 else least) * difference)

    return BlockPeaks(round(most * peaks.forward), *map(scaled, peaks[1:]))


def _total(values: Iterable[Value]) -> float:
    return sum(value.nbytes for value in values)
