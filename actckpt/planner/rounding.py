"""Shares of actions made whole, block by block, carrying the error along."""

from __future__ import annotations

import itertools

from actckpt.planner.problem import Actions, Problem
from actckpt.planner.program import DECIDED

__all__ = ["rounded"]

#: A share below this is none.
_NONE = 1e-6
#: Of values of one block with shares, so many are tried in all combinations.
_MOST_SPLIT = 5
#: How much worse a byte too many is than one too few, where what fitted must go on to fit.
_OVER = 1000.0


def rounded(problem: Problem, shares: list[list[tuple[float, ...]]], *, over: bool) -> tuple[Actions, ...]:
    """Return whole actions whose kept and offloaded bytes, summed over the blocks so far, follow those of shares.

    Args:
        shares: per block and value, of keep, offload and recompute.
        over: sums may be larger than those of the shares, so what comes of it may not fit.
    """
    penalty = 1.0 if over else _OVER
    kept_left = offloaded_left = 0.0
    found = []
    for index, block_shares in enumerate(shares):
        sizes = [value.nbytes for value in problem.blocks[index].values]
        kept_left += sum(size * share[0] for size, share in zip(sizes, block_shares, strict=True))
        offloaded_left += sum(size * share[1] for size, share in zip(sizes, block_shares, strict=True))
        best = None
        for actions in _candidates(problem, index, block_shares):
            come_to = problem.footprint(index, actions)
            if come_to is not None:
                errors = kept_left - come_to.kept_bytes, offloaded_left - come_to.offloaded_bytes
                distance = sum(error if error >= 0 else -penalty * error for error in errors)
                if best is None or (distance, come_to.recompute_s) < best[0]:
                    best = (distance, come_to.recompute_s), actions, errors
        if best is None:  # no combination has all that backward needs
            found.append(problem.plain[index])
            continue
        found.append(best[1])
        kept_left, offloaded_left = best[2]
    return tuple(found)


def _candidates(problem: Problem, index: int, shares: list[tuple[float, ...]]) -> itertools.product[Actions]:
    """Return the combinations of the actions that have shares, and of the largest ones only for most values."""
    split = sorted((max(share), position) for position, share in enumerate(shares))[:_MOST_SPLIT]
    ways = []
    for position, share in enumerate(shares):
        least = _NONE if (max(share), position) in split else max(share)
        allowed = problem.allowed[index][position]
        ways.append([a for a, part in zip(DECIDED, share, strict=True) if part >= least and a in allowed])
    return itertools.product(*ways)
