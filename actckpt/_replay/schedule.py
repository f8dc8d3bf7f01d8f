"""The order in which steps are replayed, and which results stay: pure functions of a small graph.

Only the steps that the target depends on run. Between independent subtrees, the one with the larger excess of peak over
result goes first (Sethi and Ullman 1970). This is optimal for a tree if each subtree finishes before the next one
starts; a value is freed after its last use. Where steps share inputs, the rule is a heuristic. The code is in
csrc/replay/depth_first.cpp. csrc/replay/order.cpp finds the steps. It calls Python for a custom order, and where a
window limits what stays.
"""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from actckpt._C import evict_leftovers, has_room
from actckpt._replay import windows
from actckpt._replay.replay_graph import ReplayGraph

__all__ = ["ReplayGraph", "choose"]

#: Type of `configure(replay_order=...)`.
Order = Callable[[ReplayGraph], Sequence[int]]


def choose(
    tape: Any, fields: tuple[Any, ...], order: list[int], all_stay: bool, task: int, clock: int
) -> tuple[list[int], Collection[int]]:
    """Return an order of steps, and which of the values that they make stay, as numbers in the graph.

    Args:
        fields: of a `ReplayGraph`.
        order: the built-in one; empty if there is a custom order.
        all_stay: no window limits what stays.
        task: the backward that needs the target.
        clock: when the saved tensor that needs it was saved.
    """
    operators, reads, makes, nbytes, target, retained, again, until = fields
    graph = ReplayGraph(
        operators=tuple(operators),
        reads=tuple(map(tuple, reads)),
        makes=tuple(map(tuple, makes)),
        nbytes=tuple(nbytes),
        target=target,
        retained=frozenset(retained),
        again=frozenset(again),
        until=until,
    )
    plugged: Order | None = tape.replay_order
    if plugged is not None:
        order = _checked(graph, plugged(graph))
    return order, graph.retained if all_stay else _retained(tape, graph, order, task, clock)


def _retained(tape: Any, graph: ReplayGraph, order: list[int], task: int, clock: int) -> Collection[int]:
    """Return the values that are needed again and fit in the window."""
    asked_bytes = sum(graph.nbytes[value] for value in graph.retained if value != graph.target)
    if tape.window_bytes < 0:
        window_bytes = windows.smallest_window(graph, order)
        if window_bytes * windows.LEAST_GAIN > asked_bytes:
            return graph.retained
        tape.window_bytes = max(window_bytes, windows.SMALL_BYTES)
    if asked_bytes + tape.cached_bytes > tape.window_bytes:
        evict_leftovers(tape, task, clock)
    room = max(tape.window_bytes - tape.cached_bytes, 0)
    if asked_bytes <= room:
        return graph.retained
    stay = windows.retained(graph, order, room)
    if stay is None:  # the window is that of a smaller replay
        smallest = windows.smallest_window(graph, order)
        tape.window_bytes += max(smallest - room, 0)
        stay = windows.retained(graph, order, smallest)
        assert stay is not None
    return stay | ({graph.target} & graph.retained if has_room(tape) else set())


def _checked(graph: ReplayGraph, answer: Any) -> list[int]:
    """Return the order from a custom function; raises unless it computes the target."""
    count = len(graph.operators)
    try:
        chosen = [operator.index(step) for step in answer]
    except TypeError as error:
        raise ValueError(
            f"replay_order: the function returned {answer!r}, a {type(answer).__name__}. Return the numbers of the "
            f"{count} steps (range({count})) in the order of execution."
        ) from error
    unknown = [step for step in chosen if not 0 <= step < count]
    if unknown:
        raise ValueError(f"replay_order: {unknown[0]!r} is not one of the {count} steps.")
    twice = [step for step, times in Counter(chosen).items() if times > 1]
    if twice:
        raise ValueError(f"replay_order: step {twice[0]} ({graph.operators[twice[0]]}) is there twice. Return it once.")
    makers = graph.maker()
    done: set[int] = set()
    for step in chosen:
        missing = [v for v in graph.reads[step] if v in makers and makers[v] not in done]
        if missing:
            first = makers[missing[0]]
            raise ValueError(
                f"replay_order: step {step} ({graph.operators[step]}) reads what step {first} "
                f"({graph.operators[first]}) makes, which comes later or never. Return the steps so that each comes "
                "after those that it reads from."
            )
        done.add(step)
    if makers[graph.target] not in done:
        raise ValueError(
            f"replay_order: step {makers[graph.target]}, which makes the target, is missing among the {len(chosen)} "
            "steps returned."
        )
    return chosen
