"""What stays within a window: chains."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from actckpt._replay.schedule import ReplayGraph
from actckpt._replay.windows import retained, smallest_window


def _chain(nbytes: list[int], asked: set[int], first: int, last: int) -> ReplayGraph:
    """Return the replay of value `last` of a chain, from value `first - 1` on."""
    size = last - first + 1
    return ReplayGraph(
        operators=("op",) * size,
        reads=tuple((step - 1,) if step else (size,) for step in range(size)),
        makes=tuple((step,) for step in range(size)),
        nbytes=(*nbytes[first : last + 1], 0),
        target=size - 1,
        retained=frozenset(value - first for value in asked if first <= value < last),
        again=frozenset(range(size - 1)),
        until={value - first: value - first for value in asked if first <= value < last},
    )


def _reverse(nbytes: list[int], asked: set[int], window: int) -> tuple[int, int]:
    """Ask for the values of a chain from the last to the first; return the steps executed and the most bytes held."""
    cached: set[int] = set()
    executed = most = 0
    for value in sorted(asked, reverse=True):
        cached = {other for other in cached if other <= value}
        if value not in cached:
            first = max(cached, default=-1) + 1
            graph = _chain(nbytes, asked, first, value)
            room = window - sum(nbytes[other] for other in cached)
            stay = graph.retained
            if sum(graph.nbytes[other] for other in stay) > room:
                found = retained(graph, range(value - first + 1), room)
                assert found is not None
                stay = frozenset(found)
            assert stay <= graph.again
            executed += value - first + 1
            cached |= {other + first for other in stay}
        most = max(most, sum(nbytes[other] for other in cached if other != value))
    return executed, most


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 120), share=st.floats(0.02, 1))
def test_what_stays_fits_whatever_the_sizes_are(seed: int, size: int, share: float) -> None:
    rng = random.Random(seed)
    nbytes = [rng.choice([1, 2, 4, 50]) for _ in range(size)]
    asked = {value for value in range(size) if rng.random() < 0.7} | {size - 1}
    graph = _chain(nbytes, asked, 0, size - 1)
    smallest = smallest_window(graph, range(size))
    assert retained(graph, range(size), smallest) is not None
    room = int(sum(nbytes) * share)
    stay = retained(graph, range(size), room)
    assert stay is not None or room < smallest
    assert stay is None or sum(nbytes[value] for value in stay) <= room


@pytest.mark.parametrize("size", [30, 100, 300])
def test_the_smallest_window_runs_no_step_more_than_twice_and_grows_with_the_root(size: int) -> None:
    every = set(range(size))
    window = smallest_window(_chain([1000] * size, every, 0, size - 1), range(size))
    executed, most = _reverse([1000] * size, every, window)
    assert executed <= 2 * size
    assert most <= window <= 1000 * (1.1 * (2 * size) ** 0.5 + 1)


@pytest.mark.parametrize("num_blocks", [4, 12, 48])
def test_cuts_lie_where_little_leads_on(num_blocks: int) -> None:
    """Between blocks one value leads on; inside of them there are some four and eight times as large."""
    block = [100, 300, 100, 100, 100, 100, 400, 400, 100, 100]
    nbytes = block * num_blocks
    asked = {value for value in range(len(nbytes)) if value % 10 not in (3, 8)}
    window = smallest_window(_chain(nbytes, asked, 0, len(nbytes) - 1), range(len(nbytes)))
    executed, most = _reverse(nbytes, asked, window)
    assert executed <= 2 * len(nbytes)
    assert most <= window <= 1000 + 1.5 * (2 * num_blocks * 1600 * 100) ** 0.5
