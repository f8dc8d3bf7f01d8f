"""Sizes inside a model that its arguments do not show: the bytes passed to blocks in a cycle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from actckpt._cycles.timeline import Call

__all__ = ["LargestCalls", "is_larger", "most_given", "total_given"]

#: A cycle whose block inputs reach this share of the largest is measured. Until one comes, at most this many smaller
#: ones recompute everything; and the maximum number of such waits.
_NEARLY, _MOST_SMALLER, _MOST_WAITS = 0.9, 20, 3


def _most(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(max(pair) for pair in itertools.zip_longest(one, other, fillvalue=0.0))


def most_given(calls: Iterable[Call]) -> dict[tuple[int, str], tuple[float, ...]]:
    """Return, per forward and block, the maximum bytes of each tensor passed to it."""
    most: dict[tuple[int, str], tuple[float, ...]] = {}
    for call in calls:
        key = call.forward, call.block
        most[key] = _most(most.get(key, ()), call.given)
    return most


def total_given(calls: Iterable[Call]) -> float:
    """Return the total bytes passed to all calls."""
    return sum(sum(call.given) for call in calls)


def is_larger(calls: Iterable[Call], before: Iterable[Call]) -> bool:
    """Return whether a block gets more bytes in some calls than in earlier ones."""
    known = most_given(before)
    pairs = ((sizes, known.get(key, ())) for key, sizes in most_given(calls).items())
    return any(now > then for sizes, past in pairs for now, then in zip(sizes, past, strict=False))


class LargestCalls:
    """The largest calls that exceeded the measured ones, and for how long no cycle of that size has come."""

    def __init__(self) -> None:
        #: Per forward and block, the bytes of each tensor.
        self._largest: dict[tuple[int, str], tuple[float, ...]] = {}
        self._num_smaller = self._num_waits = 0

    def measured(self) -> None:
        """A cycle was measured: nothing is larger yet."""
        self._largest, self._num_smaller = {}, 0

    def grew(self, call: Call, *, is_measuring: bool) -> bool:
        """A call exceeded the measured ones; return whether to wait for a cycle of that size."""
        key = call.forward, call.block
        self._largest[key] = _most(self._largest.get(key, ()), call.given)
        if not is_measuring:
            if self._num_waits >= _MOST_WAITS:
                return False
            self._num_smaller = 0
        return True

    def is_smaller(self, call: Call, calls: Iterable[Call]) -> bool:
        """Return whether a call gets less than the largest one, if that exceeds the measured ones.

        Args:
            calls: the measured ones.
        """
        key = call.forward, call.block
        if key not in self._largest:
            return False
        measured = most_given(calls).get(key, ())
        rows = itertools.zip_longest(self._largest[key], measured, call.given, fillvalue=0.0)
        return not all(now >= _NEARLY * most or most <= then for most, then, now in rows)

    def is_given_up(self) -> bool:
        """Count a smaller cycle; return whether there were so many that the largest one is not waited for."""
        self._num_smaller += 1
        if self._num_smaller < _MOST_SMALLER:
            return False
        self._num_waits += 1
        return True
