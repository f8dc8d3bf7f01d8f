"""Ladders: ways to treat an entry of the stack, from what holds least to what takes least time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BlockClass
from actckpt.planner.pins import Allowed

__all__ = ["Way", "all_ways", "ladder", "slope"]

#: With more values than these left, a step keeps several, so that steps grow with the logarithm of the number.
_FEW = 64
#: Number of values of which a step tries what keeping them would save.
_MOST_TRIED = 16


class Way(NamedTuple):
    """Actions of an entry of the stack, the bytes that it holds with them, and the seconds that they add."""

    held_bytes: float
    seconds: float
    actions: Mapping[str, Action]
    rerun: bool


def slope(below: Way, above: Way) -> float:
    """Return the seconds that each byte adds from one way to another."""
    return (above.seconds - below.seconds) / ((above.held_bytes - below.held_bytes) or 1.0)


def ladder(block: BlockClass, allowed: Allowed) -> list[Way]:
    """Return ways of an entry, fewest bytes first, each of which saves more seconds per byte than the next one."""
    ways = [way for rerun in (False, True)[: 1 + block.rerun] for way in all_ways(block, allowed, rerun=rerun)]
    found: list[Way] = []
    for new in sorted(ways, key=lambda way: (way.held_bytes, way.seconds)):
        if not found or new.seconds < found[-1].seconds:
            while len(found) > 1 and slope(*found[-2:]) >= slope(found[-1], new):
                found.pop()
            found.append(new)
    return found


def all_ways(block: BlockClass, allowed: Allowed, *, rerun: bool) -> list[Way]:
    """Return ways from the one that holds least; each keeps what saves most seconds per byte beside the one before."""
    actions = {name: Action.RECOMPUTE if Action.RECOMPUTE in may else may[0] for name, may in allowed.items()}
    while (lost := block.lost(actions, rerun=rerun)) and len(allowed[lost]) > 1:
        actions[lost] = allowed[lost][0]
    if lost:
        return []
    ways = [_way(block, actions, rerun=rerun)]
    while more := [value for value in block.values if actions[value.name] is not allowed[value.name][0]]:
        more.sort(key=lambda value: -value.recompute_s / (value.nbytes or 1.0))
        kept = {value: {**actions, value.name: allowed[value.name][0]} for value in more[:_MOST_TRIED]}
        saved = {value: ways[-1].seconds - block.added_seconds(kept[value], rerun=rerun) for value in kept}
        if rerun and not any(saved.values()):
            break  # a rerun computes the rest, whatever is kept
        best = sorted(saved, key=lambda value: -saved[value] / (value.nbytes or 1.0))
        actions = actions | {value.name: allowed[value.name][0] for value in best[: len(more) // _FEW or 1]}
        ways.append(_way(block, actions, rerun=rerun))
    return ways


def _way(block: BlockClass, actions: Mapping[str, Action], *, rerun: bool) -> Way:
    held_bytes = sum(value.nbytes for value in block.values if actions[value.name] is not Action.RECOMPUTE)
    return Way(held_bytes, block.added_seconds(actions, rerun=rerun), actions, rerun)
