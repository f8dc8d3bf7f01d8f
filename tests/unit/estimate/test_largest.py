"""The search for the largest size that fits."""

import math
from collections.abc import Callable

import pytest

from actckpt._estimate.largest import largest_that_fits

CURVES: dict[str, Callable[[int], int]] = {
    "line": lambda n: 100 + 7 * n,
    "square": lambda n: 50 + 3 * n * n,
    "root": lambda n: 10 + math.isqrt(900 * n),
    "steps": lambda n: 100 * (n // 16 + 1),
    "kink": lambda n: max(1000, 12 * n),
}


@pytest.mark.parametrize("limit", [200, 1003, 10_000, 123_457])
@pytest.mark.parametrize("name", CURVES)
def test_it_finds_the_largest_in_few_evaluations(name: str, limit: int) -> None:
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return CURVES[name](size)

    found = largest_that_fits(peak, limit)
    assert found == 0 or CURVES[name](found) <= limit
    assert CURVES[name](found + 1) > limit
    assert len(tried) == len(set(tried)) <= (5 if name == "line" else 70)


def test_nothing_fits() -> None:
    assert largest_that_fits(lambda size: 10 * size, 9) == 0


def test_what_never_grows_ends() -> None:
    assert largest_that_fits(lambda _: 5, 10) >= 1 << 29


def test_a_tolerance_ends_the_search_earlier() -> None:
    tried: list[int] = []

    def peak(size: int) -> int:
        tried.append(size)
        return size * size

    found = largest_that_fits(peak, 10**10, tolerance=0.01)
    assert 0.98 * 10**5 < found <= 10**5
    near = len(tried)
    largest_that_fits(peak, 10**10)
    assert near < len(tried) - near
