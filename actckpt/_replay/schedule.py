"""In which order steps are executed again: a pure function of a small graph, and its adapter to a tape.

NOTE [ Order ]

Steps run by need: only those that lead to the target. Between subtrees that do not depend on each other, the one
with the larger excess of peak over result goes first (Sethi and Ullman 1970), which is the best order of a tree that
finishes one subtree before the next; a value is freed after its last use. Where steps share inputs the rule is a
heuristic. csrc/replay/depth_first.cpp has the code.
"""

import bisect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from actckpt import _C
from actckpt._C import FEW_VALUES, evict_leftovers, has_room, is_asked, is_pending
from actckpt._replay import windows
from actckpt._replay.lineage import Step, Value
from actckpt._replay.replay_graph import ReplayGraph

__all__ = ["ReplayGraph", "default_order", "order", "peak_bytes"]


def peak_bytes(graph: ReplayGraph, order: Sequence[int]) -> int:
    """Return the most bytes that an order holds at once: values made, until their last use."""
    last_use = {value: position for position, step in enumerate(order) for value in graph.reads[step]}
    live = peak = 0
    makers = graph.maker()
    for position, step in enumerate(order):
        live += sum(graph.nbytes[value] for value in graph.makes[step])
        peak = max(peak, live)
        for value in {*graph.reads[step], *graph.makes[step]}:
            stays = value == graph.target or value in graph.retained
            if value in makers and not stays and last_use.get(value, position) == position:
                live -= graph.nbytes[value]
    return peak


def default_order(graph: ReplayGraph) -> list[int]:
    """Return the steps in the order of NOTE [ Order ]; that of the forward where it needs less."""
    return _C.default_order(graph.reads, graph.makes, graph.nbytes, graph.target, graph.retained)


#: What `configure(replay_order=...)` takes.
Order = Callable[[ReplayGraph], Sequence[int]]


def order(tape: Any, target: Value, task: int, clock: int) -> tuple[list[Step], set[Value]]:
    """Return the steps that lead to `target`, in the order in which to execute them, and what stays of what they make.

    Asked where a function was plugged in, or not all that is asked for again may stay (csrc/replay/order.h).

    Args:
        task: the backward that asks for it.
        clock: when the saved tensor that it asks for was saved.
    """
    steps = _steps_of(target)
    graph, values = _graph_of(steps, target, task)
    plugged: Order | None = tape.replay_order
    if plugged is None:
        chosen = default_order(graph)
    else:
        chosen = _checked(graph, plugged(graph))
    stay = _retained(tape, graph, chosen, task, clock)
    return [steps[number] for number in chosen], {values[number] for number in stay}


def _retained(tape: Any, graph: ReplayGraph, order: list[int], task: int, clock: int) -> Collection[int]:
    """Return the values that stay of those that an order makes: all, or those that the window has room for."""
    asked = [graph.nbytes[value] for value in graph.retained if value != graph.target]
    asked_bytes = sum(asked)
    if not tape.has_windows:
        return graph.retained
    if tape.window_bytes < 0:
        if asked_bytes <= windows.SMALL_BYTES or len(asked) < FEW_VALUES:
            return graph.retained
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
    if stay is None:  # the window was that of a smaller replay
        smallest = windows.smallest_window(graph, order)
        tape.window_bytes += max(smallest - room, 0)
        stay = windows.retained(graph, order, smallest)
        assert stay is not None
    return stay | ({graph.target} & graph.retained if has_room(tape) else set())


def _steps_of(target: Value) -> list[Step]:
    """Return the steps between the values that are available and `target`, in the order of the forward."""
    found: dict[int, tuple[int, Step]] = {}
    pending = [target]
    while pending:
        value = pending.pop()
        step = value.step
        if (value is not target and value.is_available()) or step is None or id(step) in found:
            continue
        found[id(step)] = (value.ordinal, step)
        pending.extend(step.inputs)
    return [step for _, step in sorted(found.values(), key=lambda entry: entry[0])]


def _graph_of(steps: list[Step], target: Value, task: int) -> tuple[ReplayGraph, list[Value]]:
    numbers: dict[Value, int] = {}
    makes: list[tuple[int, ...]] = []
    ordinals: list[int] = []
    reads_here: Counter[Value] = Counter()
    for step in steps:
        made = [value for value in (reference() for reference in step.outputs) if value is not None]
        makes.append(tuple(numbers.setdefault(value, len(numbers)) for value in made))
        ordinals.append(made[-1].ordinal)
        for value in made:
            if value.is_reading(task):
                reads_here.update(step.inputs)
    made_here = list(numbers)
    again = [value for value in made_here if is_asked(value, task)]
    stay = [value for value in again if is_pending(value, task) or value.num_readers(task) > reads_here[value]]
    reads = tuple(
        tuple(dict.fromkeys(numbers.setdefault(value, len(numbers)) for value in step.inputs)) for step in steps
    )
    graph = ReplayGraph(
        operators=tuple(step.operator.name for step in steps),
        reads=reads,
        makes=tuple(makes),
        nbytes=tuple(value.nbytes if number < len(made_here) else 0 for value, number in numbers.items()),
        target=numbers[target],
        retained=frozenset(numbers[value] for value in stay),
        again=frozenset(numbers[value] for value in again),
        until={numbers[value]: bisect.bisect_left(ordinals, value.last_use) for value in stay},
    )
    return graph, list(numbers)


def _checked(graph: ReplayGraph, answer: Any) -> list[int]:
    """Return what a plugged function answered; raises unless it is an order in which the target can be computed."""
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
