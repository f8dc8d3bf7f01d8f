"""Bytes that flow through two links at even speeds, from one event to the next: for the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Pipe"]


class Pipe:
    """Bytes that flow through two links with a buffer between them: device, host, disk, or the way back.

    Args:
        rates: bytes per second of the first and the second link.
        limits: most bytes that each may move by now.
        buffered: bytes in the buffer at first.
        room: most bytes in the buffer.
    """

    def __init__(self, rates: Sequence[float], limits: Sequence[float], *, buffered: float, room: float) -> None:
        self.rates: Sequence[float] = rates
        self.limits: list[float] = list(limits)
        self.buffered: float = buffered
        self.most_buffered: float = buffered
        self.room: float = max(room, buffered)
        #: By each link, by now.
        self.moved: list[float] = [0.0, 0.0]
        #: Of each link: moments, and what it had moved by then.
        self.traces: list[list[tuple[float, float]]] = [[], []]

    def run(self, now: float, seconds: float) -> float:
        """Move bytes for some time from a moment on; return the moment at its end."""
        end = now + seconds
        while now < end:
            now = self._until_event(now, end, (math.inf, math.inf))
        return end

    def wait(self, now: float, link: int, target: float, rounding: float) -> float:
        """Move bytes until a link has moved so many; return the moment at which it has."""
        goals = (target, math.inf) if link == 0 else (math.inf, target)
        while self.moved[link] < target - rounding:
            now = self._until_event(now, math.inf, goals)
            assert now < math.inf, "nothing moves any more"
        return now

    def _until_event(self, now: float, end: float, goals: tuple[float, float]) -> float:
        """Move bytes at even speeds until one of them changes, and no longer than to `end`."""
        speeds = [rate if self.moved[link] < self.limits[link] else 0.0 for link, rate in enumerate(self.rates)]
        if self.buffered <= 0.0:
            speeds[1] = min(speeds)
        if self.buffered >= self.room:
            speeds[0] = min(speeds)
        stops = [min(goal, limit) for goal, limit in zip(goals, self.limits, strict=True)]
        growth, goal = speeds[0] - speeds[1], self.room if speeds[0] > speeds[1] else 0.0
        ways = [(end - now, "end"), *(((goal - self.buffered) / growth, "buffer") for _ in range(growth != 0.0))]
        ways += [((stops[link] - self.moved[link]) / speed, str(link)) for link, speed in enumerate(speeds) if speed]
        seconds, event = min(ways)
        then = end if event == "end" else now + seconds
        self.buffered = goal if event == "buffer" else min(max(self.buffered + growth * seconds, 0.0), self.room)
        self.most_buffered = max(self.most_buffered, self.buffered)
        for link, speed in enumerate(speeds):
            before = self.moved[link]
            self.moved[link] = stops[link] if event == str(link) else min(before + speed * seconds, stops[link])
            self.traces[link] += [(now, before), (then, self.moved[link])] if speed else []
        return then
