"""Orders of replay, against all orders that there are, and what stays within a window."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from actckpt import _C
from actckpt._replay.replay_graph import ReplayGraph
from actckpt._replay.windows import retained, smallest_window


def default_order(graph: ReplayGraph) -> list[int]:
    return _C.default_order(graph.reads, graph.makes, graph.nbytes, graph.target, graph.retained)


def _graph(rng: random.Random, num_steps: int, *, is_tree: bool) -> ReplayGraph:
    """Return a random graph whose last step makes the target; value 0 is at hand."""
    nbytes = [0] + [rng.randint(1, 9) for _ in range(num_steps)]
    reads: list[tuple[int, ...]] = []
    unused = set(range(1, num_steps))
    for step in range(num_steps):
        earlier = sorted(v for v in range(1, step + 1) if not is_tree or v in unused)
        is_last = step == num_steps - 1
        chosen = sorted(unused) if is_tree and is_last else rng.sample(earlier, min(len(earlier), rng.randint(0, 2)))
        unused -= set(chosen)
        reads.append((0, *(v for v in chosen if v != step + 1)))
    return ReplayGraph(
        operators=tuple(f"op{step}" for step in range(num_steps)),
        reads=tuple(reads),
        makes=tuple((step + 1,) for step in range(num_steps)),
        nbytes=tuple(nbytes),
        target=num_steps,
        retained=frozenset(),
    )


def _needed(graph: ReplayGraph) -> set[int]:
    makers = graph.maker()
    needed: set[int] = set()
    pending = [makers[graph.target]]
    while pending:
        step = pending.pop()
        needed.add(step)
        pending += [makers[v] for v in graph.reads[step] if v in makers]
    return needed


def _orders(graph: ReplayGraph) -> Iterator[tuple[int, ...]]:
    needed = sorted(_needed(graph))
    for order in itertools.permutations(needed):
        if _is_valid(graph, order):
            yield order


def _is_valid(graph: ReplayGraph, order: tuple[int, ...] | list[int]) -> bool:
    made: set[int] = set()
    makers = graph.maker()
    for step in order:
        if any(v in makers and v not in made for v in graph.reads[step]):
            return False
        made |= set(graph.makes[step])
    return graph.target in made


def _peak(graph: ReplayGraph, order: tuple[int, ...] | list[int]) -> int:
    """Return the peak of an order, counted in the most direct way."""
    held: set[int] = set()
    peak = 0
    for position, step in enumerate(order):
        held |= set(graph.makes[step])
        peak = max(peak, sum(graph.nbytes[v] for v in held))
        later = {v for other in order[position + 1 :] for v in graph.reads[other]}
        held = {v for v in held if v in later or v == graph.target or v in graph.retained}
    return peak


def _branching_graph(rng: random.Random, num_steps: int) -> ReplayGraph:
    """Return a random graph of steps that make several values, of which some stay, and which share what they read."""
    nbytes, unused = [0, 0], [0, 1]
    reads: list[tuple[int, ...]] = []
    makes: list[tuple[int, ...]] = []
    for _ in range(num_steps):
        is_last = len(reads) == num_steps - 1
        chosen = unused if is_last else rng.sample(unused, min(len(unused), rng.choice((0, 0, 1, 1, 2))))
        reads.append((*dict.fromkeys([*chosen, *rng.sample(range(len(nbytes)), rng.randint(0, 1))]),))
        makes.append(tuple(range(len(nbytes), len(nbytes) + rng.choice((1, 1, 2)))))
        nbytes += [rng.choice((0, 1, 5, 2**40)) for _ in makes[-1]]
        unused = [value for value in (*unused, makes[-1][0]) if value not in chosen]
    made = range(2, len(nbytes))
    return ReplayGraph(
        operators=("op",) * num_steps,
        reads=tuple(reads),
        makes=tuple(makes),
        nbytes=tuple(nbytes),
        target=rng.choice((*makes[-1], rng.choice(made))),
        retained=frozenset(value for value in made if rng.random() < 0.2),
    )


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), num_steps=st.integers(1, 9))
def test_the_order_is_valid_and_never_above_that_of_the_forward(seed: int, num_steps: int) -> None:
    graph = _branching_graph(random.Random(seed), num_steps)
    order = default_order(graph)
    assert sorted(order) == sorted(_needed(graph)) and _is_valid(graph, order)
    assert _peak(graph, order) <= _peak(graph, sorted(order))


def _mean_excess(is_tree: bool) -> float:
    """Return how far above the optimum the default order is, on average over random graphs."""
    rng = random.Random(1)
    excess = []
    for _ in range(300):
        graph = _graph(rng, rng.randint(3, 7), is_tree=is_tree)
        best = min(_peak(graph, order) for order in _orders(graph))
        excess.append(_peak(graph, default_order(graph)) / best - 1)
    return sum(excess) / len(excess)


@pytest.mark.parametrize(("is_tree", "most"), [(True, 0.0), (False, 0.05)])
def test_the_peak_is_the_optimum_on_trees_and_close_to_it_on_random_graphs(is_tree: bool, most: float) -> None:
    assert _mean_excess(is_tree) <= most


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
