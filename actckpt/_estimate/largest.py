"""The largest size at which something fits, with few evaluations."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_that_fits"]

#: Upper bound if growth shows no limit.
_MOST = 1 << 30
#: Maximum ratio of a size to the largest that is known to fit.
_LARGEST_STEP = 1024

#: A size, and its peak.
_Point = tuple[int, int]


def largest_that_fits(peak: Callable[[int], int], limit: int, *, tolerance: float = 0.0) -> int:
    """Return the largest whole number whose peak is within a limit; 0 if not even 1 is.

    Args:
        peak: grows with its argument.
        tolerance: accepted distance, as a share, to the smallest number known not to fit.

    Cost: five evaluations if the peak is linear, else up to two per halving of the interval.
    """
    peaks: dict[int, int] = {1: peak(1)}
    if peaks[1] > limit:
        return 0
    size, gap, num_slow = 2, _MOST, 0
    while True:
        peaks[size] = peak(size)
        fitting = sorted((size, nbytes) for size, nbytes in peaks.items() if nbytes <= limit)
        fits = fitting[-1]
        fails = min(((size, nbytes) for size, nbytes in peaks.items() if nbytes > limit), default=None)
        step = max(1, int(tolerance * fits[0]))
        if fits[0] == _MOST or (fails is not None and fails[0] - fits[0] <= step):
            return fits[0]
        if fails is None:
            size = _along(fitting[-2], fits, limit, step, min(_LARGEST_STEP * fits[0], _MOST))
            continue
        num_slow = num_slow + 1 if fails[0] - fits[0] > gap // 2 else 0
        gap = fails[0] - fits[0]
        size = (fits[0] + fails[0]) // 2 if num_slow % 2 else _along(fits, fails, limit, step, fails[0] - 1)


def _along(one: _Point, other: _Point, limit: int, step: int, most: int) -> int:
    """Return where the line through two points meets the limit, at least a step beyond the larger one that fits."""
    fits = other if other[1] <= limit else one
    slope = (other[1] - one[1]) / (other[0] - one[0])
    guess = fits[0] + int((limit - fits[1]) / slope) if slope > 0 else most
    return min(max(fits[0] + step, guess), most)
