"""In which order steps are executed again: a pure function of a small graph, and its adapter to a tape.

NOTE [ Order ]

Steps run by need: only those that lead to the target. Between subtrees that do not depend on each other, the one
with the larger excess of peak over result goes first (Sethi and Ullman 1970), which is the best order of a tree that
finishes one subtree before the next; a value is freed after its last use. Where steps share inputs the rule is a
heuristic.
"""

import bisect
import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from actckpt.runtime.replay.lineage import Step, Value

__all__ = ["ReplayGraph", "default_order", "order", "peak_bytes", "retained"]


@dataclasses.dataclass(frozen=True)
class ReplayGraph:
    """What a replay must compute. Steps and values are numbers."""

    #: Names of the operators of the steps, for orders that look at them. In the order of the forward.
    operators: tuple[str, ...]
    #: For each step, the values that it reads, each once, and the values that it makes.
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    #: Bytes of each value; 0 for values at hand.
    nbytes: tuple[int, ...]
    #: The value that is asked for.
    target: int
    #: Values that stay once they are made, since backward asks for them too.
    retained: frozenset[int]

    def maker(self) -> dict[int, int]:
        """Return the step that makes each value that is not at hand."""
        return {value: step for step, made in enumerate(self.makes) for value in made}


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
    needed = _needed_steps(graph)
    forward = sorted(needed)
    chosen = _depth_first(graph, needed)
    return chosen if peak_bytes(graph, chosen) < peak_bytes(graph, forward) else forward


def _needed_steps(graph: ReplayGraph) -> set[int]:
    makers = graph.maker()
    needed: set[int] = set()
    pending = [makers[graph.target]]
    while pending:
        step = pending.pop()
        if step not in needed:
            needed.add(step)
            pending.extend(makers[value] for value in graph.reads[step] if value in makers)
    return needed


def _depth_first(graph: ReplayGraph, needed: set[int]) -> list[int]:
    makers = graph.maker()
    before = {step: tuple(dict.fromkeys(makers[v] for v in graph.reads[step] if v in makers)) for step in needed}
    result = {step: sum(graph.nbytes[value] for value in graph.makes[step]) for step in needed}
    peak: dict[int, int] = {}
    for step in sorted(needed):  # what a step reads was made by earlier steps
        held = most = 0
        for child in sorted(before[step], key=lambda child: result[child] - peak[child]):
            most = max(most, held + peak[child])
            held += result[child]
        peak[step] = max(most, held + result[step])
    order: dict[int, None] = {}
    pending = [(makers[graph.target], False)]
    while pending:
        step, is_ready = pending.pop()
        if is_ready:
            order.setdefault(step)
        elif step not in order:
            pending.append((step, True))
            children = sorted(before[step], key=lambda child: result[child] - peak[child])
            pending.extend((child, False) for child in reversed(children))
    return list(order)


def retained(graph: ReplayGraph, order: Sequence[int], window_bytes: int) -> set[int]:
    """Return the values that stay for later, at most about `window_bytes` of them.

    All that backward will ask for, if they fit. Else the last of them, and before those the few values that lead on
    from some points of the order: what comes between is computed again from there when its turn comes. The
    stretches grow from the last to the first, as more of the window becomes free (Griewank and Walther 2000, with at
    most one repetition of each step).
    """
    asked = graph.retained - {graph.target}
    if sum(graph.nbytes[value] for value in asked) <= window_bytes:
        return set(asked)
    made_at = {value: position for position, step in enumerate(order) for value in graph.makes[step]}
    last_use = {value: position for position, step in enumerate(order) for value in graph.reads[step]}
    crossing = [0] * len(order)
    for value, made in made_at.items():
        for position in range(made, last_use.get(value, made)):
            crossing[position] += graph.nbytes[value]
    asked_bytes = [sum(graph.nbytes[v] for v in graph.makes[step] if v in asked) for step in order]
    cuts, start = _cuts(crossing, asked_bytes, window_bytes)
    found = {value for value in asked if made_at.get(value, -1) > (cuts[0] if cuts else start)}
    cuts.reverse()
    for value, made in made_at.items():
        first = bisect.bisect_left(cuts, made)
        if first < len(cuts) and cuts[first] < last_use.get(value, made):
            found.add(value)
    return found - {graph.target}


def _cuts(crossing: list[int], asked_bytes: list[int], window_bytes: int) -> tuple[list[int], int]:
    """Return positions after which to keep what leads on, last first; as few as reach the start.

    And the position after which all that backward asks for fits, -1: the start.
    """
    cost = min((size for size in crossing if size), default=1)
    best: list[int] = []
    best_start = len(crossing)
    for number in range(min(window_bytes // cost, len(crossing)) + 1):
        cuts: list[int] = []
        start = end = len(crossing) - 1
        for cut in range(number + 1):
            room = window_bytes - (number - cut) * cost
            while start >= 0 and room >= asked_bytes[start]:
                room -= asked_bytes[start]
                start -= 1
            if start < 0 or cut == number or start >= end:
                break
            span = range(start, start + max(1, (end - start) // 4))
            start = end = min(span, key=lambda position: (crossing[position], position))
            cuts.append(start)
        if start >= best_start:  # one more does not lead any further
            break
        best, best_start = cuts, start
        if start < 0:
            break
    return best, best_start


#: What `configure(replay_order=...)` takes.
Order = Callable[[ReplayGraph], Sequence[int]]


def order(tape: Any, target: Value) -> tuple[list[Step], set[Value] | None]:
    """Return the steps that lead to `target`, in the order in which to execute them, and what to retain.

    None: all that backward will ask for.
    """
    steps = _steps_of(target)
    graph, values = _graph_of(steps, target)
    plugged: Order | None = tape.replay_order
    if plugged is None:
        chosen = default_order(graph)
    else:
        chosen = _checked(graph, plugged(graph))
    stay = None
    if tape.replay_window is not None:
        asks_more = bool(graph.retained - {graph.target})
        room = max(tape.replay_window - tape.cached_bytes(), 0) if asks_more else 0
        stay = {values[number] for number in retained(graph, chosen, room)}
    return [steps[number] for number in chosen], stay


def _steps_of(target: Value) -> list[Step]:
    """Return the steps between the values at hand and `target`, in the order of the forward."""
    found: dict[int, tuple[int, Step]] = {}
    pending = [target]
    while pending:
        value = pending.pop()
        step = value.step
        if (value is not target and value.is_at_hand()) or step is None or id(step) in found:
            continue
        found[id(step)] = (value.ordinal, step)
        pending.extend(step.inputs)
    return [step for _, step in sorted(found.values(), key=lambda entry: entry[0])]


def _graph_of(steps: list[Step], target: Value) -> tuple[ReplayGraph, list[Value]]:
    numbers: dict[Value, int] = {}
    makes: list[tuple[int, ...]] = []
    asked: set[int] = set()
    for step in steps:
        made = [value for value in (reference() for reference in step.outputs) if value is not None]
        makes.append(tuple(numbers.setdefault(value, len(numbers)) for value in made))
        asked.update(numbers[value] for value in made if value.is_wanted())
    made_here = set(numbers.values())
    reads = tuple(
        tuple(dict.fromkeys(numbers.setdefault(value, len(numbers)) for value in step.inputs)) for step in steps
    )
    graph = ReplayGraph(
        operators=tuple(step.operator.name for step in steps),
        reads=reads,
        makes=tuple(makes),
        nbytes=tuple(value.nbytes if number in made_here else 0 for value, number in numbers.items()),
        target=numbers[target],
        retained=frozenset(asked),
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
