"""The timeline of a training cycle: events at blocks, and the segments between them.

A cycle begins at a forward of the model while no other forward is alive, and ends when no forward is alive any more. It
may hold several forwards and backwards. An event is a moment at which a block's forward begins or ends, backward
reaches the output or the input of a block, the forward of the model ends, or a backward ends. A segment lies between
two events.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import Literal, NamedTuple

import torch

from actckpt._blocks.outside import MadeOutside
from actckpt._core import devices
from actckpt._cycles.allocator_meter import RisenPeak
from actckpt._cycles.meter import Meter

__all__ = ["Call", "Cycle", "Event", "Segment", "SegmentKey"]

#: What happened: a block's forward begins or ends, its backward begins or ends, the model's forward or a backward ends.
EventKind = Literal[
    "begin", "forward begins", "forward ends", "backward begins", "backward ends", "forward", "backward"
]
#: The event before the segment: its kind, the call of a block (-1: none), and how often this has happened before.
SegmentKey = tuple[str, int, int]


#: A forward that makes less than this share of its arguments does nothing.
_IDLE = 1 / 16


class Event(NamedTuple):
    """A moment of a cycle."""

    kind: EventKind
    #: Number of the block call in the cycle, -1: none.
    call: int
    live_bytes: int
    #: Peak since the event before.
    peak_bytes: int
    #: Of a backward that reaches a block: it retains the graph.
    retains_graph: bool = False
    #: When, on a device; None: on a CPU, where the meter takes a part of the time.
    moment: devices.Moment | None = None


class Call(NamedTuple):
    """One call of a block in a cycle."""

    block: str
    #: Number of the model's forward in the cycle.
    forward: int
    #: Bytes of each tensor that it was given.
    given: tuple[float, ...] = ()

    def is_same(self, other: Call) -> bool:
        """Return whether another call is of the same block in the same forward."""
        return (self.block, self.forward) == (other.block, other.forward)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch between two events."""

    key: SegmentKey
    #: The block call whose forward or backward runs, -1: none.
    running: int
    is_forward: bool
    live_bytes: int
    peak_bytes: int
    #: Block calls between their forward and their last backward, without the one that runs.
    alive: frozenset[int]
    #: Casts of parameters in the cache of autocast, which blocks would hold themselves once that is left.
    cached_bytes: int = 0
    #: How long it took; 0: not known.
    seconds: float = 0.0


class Cycle:
    """The events of one cycle.

    Args:
        device: of the model.
        static_bytes: what counts toward the budget and existed before the cycle.

    Attributes:
        meter: counts bytes; None: only calls are noted. The event "begin" is noted once it is set.
        watch: tells of a peak that rises without a meter.
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
        #: In which order forwards began and backwards reached them: (number of the forward, number of the backward,
        #: whether that retains the graph); number 0 of a backward stands for the begin of the forward.
        self.order: list[tuple[int, int, bool]] = []
        self._tasks: list[int] = []
        #: By number of the event, the bytes of casts that are in the cache of autocast then.
        self.cached_bytes: dict[int, int] = {}
        #: What modules outside of the blocks hold when the model's first forward ends.
        self.made_outside: tuple[MadeOutside, ...] = ()
        #: Why it tells nothing: a forward failed, another thread took part, other calls ran than were planned for.
        self.is_void = False
        self.began = devices.moment(device)
        self._running = -1

    def note(self, kind: EventKind, call: int = -1, *, retains_graph: bool = False) -> None:
        """Note an event."""
        if self.meter is None or not self.meter.is_counting:
            return
        if kind == "backward ends" and self._running != call:  # the next block's backward begins at the same moment
            return
        self._running = call if kind == "backward begins" else -1
        moment = devices.moment(self.device) if self._is_timed else None
        self.events.append(Event(kind, call, *self.meter.take(), retains_graph, moment))

    def forward_ends(self) -> None:
        """Note that a forward of the model has ended."""
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
        """Count a backward that reaches an output of a forward; `task` tells backwards apart."""
        self.num_backwards += 1
        if task not in self._tasks[-1:]:
            self._tasks.append(task)
        reached = number, len(self._tasks), retains_graph
        if self.order[-1] != reached:  # models may have several outputs
            self.order.append(reached)

    def end(self) -> None:
        """End the cycle."""
        self.note("backward")
        if self.meter is not None:
            self.meter.end()
        elif self.watch is not None and (more := self.watch.end()):
            self.risen_bytes = self.static_bytes + more

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once, static ones included."""
        return self.static_bytes + max((event.peak_bytes for event in self.events), default=0)

    def idle_calls(self) -> frozenset[int]:
        """Return the block calls whose forward made next to nothing of its arguments: they may do more another time."""
        made = {
            event.call: after.peak_bytes - event.live_bytes
            for event, after in zip(self.events, self.events[1:], strict=False)
            if event.kind == "forward begins"
        }
        return frozenset(call for call, nbytes in made.items() if nbytes <= _IDLE * sum(self.calls[call].given))

    def segments(self) -> list[Segment]:
        """Return the segments in time order, with the block calls that are alive in each. Waits for a device."""
        running, begins, ends = self._owners()
        occurrences = Counter[tuple[str, int]]()
        found, cached_bytes = list[Segment](), 0
        for at, (event, after) in enumerate(zip(self.events, self.events[1:], strict=False)):
            call, is_forward = running[at]
            alive = frozenset(
                other
                for other, begin in begins.items()
                if begin <= at < ends.get(other, len(self.events)) and other != call
            )
            key = (event.kind, event.call, occurrences[event.kind, event.call])
            occurrences[event.kind, event.call] += 1
            cached_bytes = self.cached_bytes.get(at, cached_bytes if is_forward else 0)
            is_timed = event.moment is not None and after.moment is not None
            seconds = devices.seconds_between(event.moment, after.moment) if is_timed else 0.0  # type: ignore[arg-type]
            figures = event.live_bytes, after.peak_bytes, alive, cached_bytes, seconds
            found.append(Segment(key, call, is_forward, *figures))
        return found

    def _owners(self) -> tuple[list[tuple[int, bool]], dict[int, int], dict[int, int]]:
        """Return per event the call that runs after it, and per call where it begins and ends to be alive.

        A call is alive up to its last backward; where that retains the graph, up to the end of the cycle.
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
                if in_backward:  # no gradient of an input showed where it ended
                    ends[now[0]] = at
                now, last[event.call] = (event.call, False), event
                ends[event.call] = len(self.events)  # unless its end shows
            elif event.kind in ("backward ends", "backward") and in_backward and event.call in (now[0], -1):
                ends[now[0]] = at
                now = (-1, False)
            running.append(now)
        ends.update((call, len(self.events)) for call, event in last.items() if event.retains_graph)
        return running, begins, ends
