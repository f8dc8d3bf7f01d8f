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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actckpt._C import evict_leftovers, is_asked, is_pending
from actckpt._replay import windows
from actckpt._replay.lineage import Step, Value

__all__ = ["ReplayGraph", "default_order", "order", "peak_bytes"]


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
    #: Values that stay once they are made, since backward asks for them too, or others than these steps read them.
    retained: frozenset[int]
    #: These, and those that only these steps read on the way to them: all that backward would have to make again.
    again: frozenset[int] = frozenset()
    #: For values that others read, the step before which they do so last.
    until: Mapping[int, int] = dataclasses.field(default_factory=dict)

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


#: What `configure(replay_order=...)` takes.
Order = Callable[[ReplayGraph], Sequence[int]]


def order(tape: Any, target: Value, task: int, clock: int) -> tuple[list[Step], set[Value]]:
    """Return the steps that lead to `target`, in the order in which to execute them, and what stays of what they make.

    Args:
        task: the backward that asks for it.
        clock: when the saved tensor that it asks for was saved.
    """
    step = target.step
    if step is not None and all(value.is_at_hand() for value in step.inputs):
        made = [value for value in (reference() for reference in step.outputs) if value is not None]
        return [step], {value for value in made if tape.has_room() and is_asked(value, task)}
    steps = _steps_of(target)
    graph, values = _graph_of(steps, target, task)
    plugged: Order | None = tape.replay_order
    if plugged is None:
        chosen = default_order(graph)
    else:
        chosen = _checked(graph, plugged(graph))
    stay = set(graph.retained)
    asked_bytes = sum(graph.nbytes[value] for value in stay if value != graph.target)
    room = _room(tape, graph, chosen, asked_bytes, task, clock)
    if room is not None and asked_bytes > room:
        stay = windows.retained(graph, chosen, room) | ({graph.target} & graph.retained if tape.has_room() else set())
    return [steps[number] for number in chosen], {values[number] for number in stay}


def _room(tape: Any, graph: ReplayGraph, order: list[int], asked_bytes: int, task: int, clock: int) -> int | None:
    """Return how many bytes of what backward asks for again may stay, None: all."""
    if tape.window_bytes < 0:
        if not tape.window_follows or asked_bytes <= windows.SMALL_BYTES:
            return None
        found = windows.smallest_window(graph, order)
        if found * windows.LEAST_GAIN > asked_bytes:
            return None
        tape.window_bytes = max(found, windows.SMALL_BYTES)
    if asked_bytes + tape.cached_bytes > tape.window_bytes:
        evict_leftovers(tape, task, clock)
    room: int = max(tape.window_bytes - tape.cached_bytes, 0)
    if tape.window_follows and asked_bytes > room:
        found = windows.smallest_window(graph, order)
        tape.window_bytes += max(found - room, 0)
        room = max(found, room)
    return room


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
