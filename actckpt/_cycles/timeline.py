"""The timeline of a training cycle: events at blocks, and the segments between them.

A cycle starts at a forward of the model while no other forward is alive, and ends when no forward is alive any more. It
may contain several forwards and backwards. Events are the start and end of a block's forward, backward reaching the
output or the input of a block, the end of the model's forward, autocast releasing casts after that, and the end of a
backward. A segment lies between two events.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from actckpt._blocks.outside import MadeOutside
from actckpt._core import devices
from actckpt._cycles.allocator_meter import RisenPeak
from actckpt._cycles.meter import Meter

__all__ = ["Call", "Cycle", "Event", "Segment", "SegmentKey", "is_larger", "most_given", "total_given"]

#: A block's forward starts or ends, its backward starts or ends, the model's forward or a backward ends, autocast has
#: released its cache.
EventKind = Literal[
    "begin",
    "forward begins",
    "forward ends",
    "backward begins",
    "backward ends",
    "forward",
    "casts released",
    "backward",
]
#: The event before the segment: its kind, the block call (-1: none), and how often this has happened before.
SegmentKey = tuple[str, int, int]


#: A forward whose results are below this share of its arguments does nothing.
_IDLE = 1 / 16


class Event(NamedTuple):
    """A point in time of a cycle."""

    kind: EventKind
    #: Number of the block call in the cycle, -1: none.
    call: int
    live_bytes: int
    #: Peak since the previous event.
    peak_bytes: int
    #: For a backward that reaches a block: it retains the graph.
    retains_graph: bool = False
    #: Its time on a device; None on a CPU, where the meter slows down operators.
    moment: devices.Moment | None = None
    #: Whether autocast's cache holds the casts of parameters that blocks made so far.
    holds_casts: bool = False


class Call(NamedTuple):
    """One call of a block in a cycle."""

    block: str
    #: Number of the model's forward in the cycle.
    forward: int
    #: Bytes of each tensor passed to it.
    given: tuple[float, ...] = ()

    def is_same(self, other: Call) -> bool:
        return (self.block, self.forward) == (other.block, other.forward)


def _most(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(max(pair) for pair in itertools.zip_longest(one, other, fillvalue=0.0))


def most_given(calls: Iterable[Call]) -> dict[tuple[int, str], tuple[float, ...]]:
    """Return, per forward and block, the maximum bytes of each tensor passed to it."""
    most: dict[tuple[int, str], tuple[float, ...]] = {}
    for call in calls:
        key = call.forward, call.block
        most[key] = _most(most.get(key, ()), call.given)
    return most


def total_given(calls: Iterable[Call]) -> float:
    return sum(sum(call.given) for call in calls)


def is_larger(calls: Iterable[Call], before: Iterable[Call]) -> bool:
    """Return whether a block gets more bytes in some calls than in earlier ones."""
    known = most_given(before)
    pairs = ((sizes, known.get(key, ())) for key, sizes in most_given(calls).items())
    return any(now > then for sizes, past in pairs for now, then in zip(sizes, past, strict=False))


@dataclasses.dataclass(frozen=True)
class Segment:
    """The interval between two events."""

    key: SegmentKey
    #: The block call whose forward or backward runs, -1: none.
    running: int
    is_forward: bool
    live_bytes: int
    peak_bytes: int
    #: Block calls between their forward and their last backward, without the running one.
    alive: frozenset[int]
    #: Whether autocast's cache holds the casts of parameters that blocks read.
    holds_casts: bool = False
    #: Duration; 0: unknown.
    seconds: float = 0.0


class Cycle:
    """The events of one cycle.

    Args:
        device: of the model.
        static_bytes: bytes from before the cycle that count toward the budget.

    Attributes:
        meter: counts bytes; None: only calls are recorded. Setting it records the event "begin".
        watch: detects a rising peak without a meter.
    """

    meter: Meter | None = None
    watch: RisenPeak | None = None

    def __init__(self, device: torch.device, static_bytes: int) -> None:
        self.device, self.static_bytes, self.risen_bytes = device, static_bytes, 0
        self._is_timed = devices.counting(device) is not None
        self.thread = threading.get_ident()
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.num_forwards = self.num_backwards = 0
        #: The order in which forwards started and backwards reached them: (number of the forward, number of the
        #: backward, whether that retains the graph); backward number 0 stands for the start of the forward.
        self.order: list[tuple[int, int, bool]] = []
        self._tasks: list[int] = []
        #: Casts of parameters that blocks made, and that autocast's cache held then.
        self.casts: list[weakref.ref[torch.UntypedStorage]] = []
        #: What modules outside of the blocks hold when the model's first forward ends.
        self.made_outside: tuple[MadeOutside, ...] = ()
        #: The cycle is not usable: a forward failed, another thread took part, or other calls ran than planned.
        self.is_void = False
        self.began = devices.moment(device)
        self._running = -1

    def note(self, kind: EventKind, call: int = -1, *, retains_graph: bool = False) -> None:
        if self.meter is None or not self.meter.is_counting:
            return
        if kind == "backward ends" and self._running != call:  # the next block's backward starts at the same time
            return
        self._running = call if kind == "backward begins" else -1
        moment = devices.moment(self.device) if self._is_timed else None
        holds_casts = bool(self.casts) and all(storage() is not None for storage in self.casts)
        self.events.append(Event(kind, call, *self.meter.take(), retains_graph, moment, holds_casts))

    def casts_released(self) -> None:
        """Autocast has released casts of parameters. An event only between the forward and its backward."""
        if self.events and self.events[-1].kind == "forward":
            self.note("casts released")

    def forward_ends(self) -> None:
        self.note("forward")
        if self.watch is not None:
            self.watch.see()

    def forward_begins(self) -> int:
        """Count a forward of the model; return its number."""
        number = self.num_forwards
        self.num_forwards += 1
        self.order.append((number, 0, False))
        return number

    def backward_reaches(self, number: int, task: int, *, retains_graph: bool) -> None:
        """Count a backward that reaches an output of a forward; `task` identifies the backward."""
        self.num_backwards += 1
        if task not in self._tasks[-1:]:
            self._tasks.append(task)
        reached = number, len(self._tasks), retains_graph
        if self.order[-1] != reached:  # models may have several outputs
            self.order.append(reached)

    def end(self) -> None:
        self.note("backward")
        if self.meter is not None:
            self.meter.end()
        elif self.watch is not None and (more := self.watch.end()):
            self.risen_bytes = self.static_bytes + more

    @property
    def peak_bytes(self) -> int:
        """The peak in bytes, including static ones."""
        return self.static_bytes + max((event.peak_bytes for event in self.events), default=0)

    def idle_calls(self) -> frozenset[int]:
        """Return the block calls whose forward made next to nothing: they may do more another time."""
        made = {
            event.call: after.peak_bytes - event.live_bytes
            for event, after in zip(self.events, self.events[1:], strict=False)
            if event.kind == "forward begins"
        }
        return frozenset(call for call, nbytes in made.items() if nbytes <= _IDLE * sum(self.calls[call].given))

    def segments(self) -> list[Segment]:
        """Return the segments in time order, with the live block calls of each. Waits for a device."""
        running, begins, ends = self._owners()
        occurrences = Counter[tuple[str, int]]()
        segments = list[Segment]()
        for at, (event, after) in enumerate(zip(self.events, self.events[1:], strict=False)):
            call, is_forward = running[at]
            alive = frozenset(
                other
                for other, begin in begins.items()
                if begin <= at < ends.get(other, len(self.events)) and other != call
            )
            key = (event.kind, event.call, occurrences[event.kind, event.call])
            occurrences[event.kind, event.call] += 1
            is_timed = event.moment is not None and after.moment is not None
            seconds = devices.seconds_between(event.moment, after.moment) if is_timed else 0.0  # type: ignore[arg-type]
            figures = event.live_bytes, after.peak_bytes, alive, event.holds_casts, seconds
            segments.append(Segment(key, call, is_forward, *figures))
        return segments

    def _owners(self) -> tuple[list[tuple[int, bool]], dict[int, int], dict[int, int]]:
        """Return per event the call that runs after it, and per call the events where it becomes alive and dies.

        A call is alive up to its last backward; if that retains the graph, up to the end of the cycle.
        """
        running: list[tuple[int, bool]] = []
        now, begins, ends = (-1, False), dict[int, int](), dict[int, int]()
        last: dict[int, Event] = {}
        for at, event in enumerate(self.events):
            in_backward = now[0] >= 0 and not now[1]
            if event.kind == "forward begins":
                now = event.call, True
            elif event.kind == "forward ends":
                now, begins[event.call] = (-1, False), at
            elif event.kind == "backward begins":
                if in_backward:  # no input gradient showed where it ended
                    ends[now[0]] = at
                now, last[event.call] = (event.call, False), event
                ends[event.call] = len(self.events)  # unless its end is recorded
            elif event.kind in ("backward ends", "backward") and in_backward and event.call in (now[0], -1):
                ends[now[0]] = at
                now = (-1, False)
            running.append(now)
        ends.update((call, len(self.events)) for call, event in last.items() if event.retains_graph)
        return running, begins, ends
