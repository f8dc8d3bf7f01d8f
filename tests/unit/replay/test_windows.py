"""What stays within a window: chains."""

from __future__ import annotations

import random

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
