"""Ladders: ways to treat an entry of the stack, from what holds least to what takes least time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass
from actckpt.planner.pins import Allowed

__all__ = ["Way", "all_ways", "ladder", "slope"]

#: With more values than these left, a step keeps several, so that steps grow with the logarithm of the number.
_FEW = 64


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
        saved = _saved_seconds(block, actions, rerun=rerun)
        if rerun and not any(saved.values()):
            break  # a rerun computes the rest, whatever is kept
        more.sort(key=lambda value: -saved.get(value.name, 0.0) / (value.nbytes or 1.0))
        actions = actions | {value.name: allowed[value.name][0] for value in more[: len(more) // _FEW or 1]}
        ways.append(_way(block, actions, rerun=rerun))
    return ways


def _way(block: BlockClass, actions: Mapping[str, Action], *, rerun: bool) -> Way:
    held_bytes = sum(value.nbytes for value in block.values if actions[value.name] is not Action.RECOMPUTE)
    return Way(held_bytes, block.added_seconds(actions, rerun=rerun), actions, rerun)


def _saved_seconds(block: BlockClass, actions: Mapping[str, Action], *, rerun: bool) -> dict[str | None, float]:
    """Return the seconds that keeping a value would save, by name; a value that saves none may be missing.

    These are its own seconds and those of values that only it needs: the ones that it dominates in the graph of
    recomputed values and their inputs, whose root (None) is backward.
    """
    again = block.recomputed(actions, rerun=rerun)
    wanted = {BLOCK_INPUT} if rerun else {value.name for value in block.values if value.needed}
    above: dict[str, str | None] = dict.fromkeys(wanted)
    depths: dict[str | None, int] = {None: 0}
    for value in again:
        depths[value.name] = depths[above[value.name]] + 1
        for name in value.inputs:
            above[name] = _dominator(above[name], value.name, above, depths) if name in above else value.name
    saved: dict[str | None, float] = {value.name: value.recompute_s for value in again}
    for value in reversed(again):
        dominator = above[value.name]
        saved[dominator] = saved.get(dominator, 0.0) + saved[value.name]
    unkept = [value.name for value in block.values if value.needed and actions[value.name] is not Action.KEEP]
    if len(unkept) == 1 and not rerun:
        saved[unkept[0]] = saved.get(unkept[0], 0.0) + block.recording_s
    return saved


def _dominator(
    one: str | None, other: str | None, above: Mapping[str, str | None], depths: Mapping[str | None, int]
) -> str | None:
    """Return the nearest value that dominates both."""
    while one != other:
        if depths[one] < depths[other]:
            one, other = other, one
        assert one is not None
        one = above[one]
    return one
