"""Sizes inside a model that its arguments do not show: the bytes passed to blocks in a cycle."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from actckpt._cycles.timeline import Call

__all__ = ["is_larger", "most_given", "total_given"]


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
    return sum(sum(call.given) for call in calls)


def is_larger(calls: Iterable[Call], before: Iterable[Call]) -> bool:
    """Return whether a block gets more bytes in some calls than in earlier ones."""
    known = most_given(before)
    pairs = ((sizes, known.get(key, ())) for key, sizes in most_given(calls).items())
    return any(now > then for sizes, past in pairs for now, then in zip(sizes, past, strict=False))
