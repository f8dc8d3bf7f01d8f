"""What both links and the disk have moved by the end of each segment, as variables of a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from actckpt.planner.costs import CostTable
from actckpt.planner.cycle import Moment
from actckpt.planner.linear_program import LinearProgram, Terms

__all__ = ["Links", "has_disk"]


def has_disk(costs: CostTable) -> bool:
    """Return whether what host memory has no room for goes on to a disk."""
    return min(costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s) > 0 and costs.host_bytes is not None


class Links:
    """What was handed over, copied out, copied back and needed again by the end of the last segment so far.

    Args:
        per_byte, per_second: units of the program.
        gone: per entry, the variable of the bytes that it offloads.
        on_disk: the variable of the bytes that go on to the disk.
    """

    def __init__(
        self,
        program: LinearProgram,
        costs: CostTable,
        per_byte: float,
        per_second: float,
        gone: Sequence[int],
        on_disk: int,
    ) -> None:
        self._row, self._variable, self._total = program.row, program.variable, program.total
        self._costs, self._per_byte, self._per_second = costs, per_byte, per_second
        self._has_disk, self._gone, self._on_disk = has_disk(costs), gone, on_disk
        self._host = numpy.inf if costs.host_bytes is None else costs.host_bytes * per_byte
        self._is_backward = False
        zero = self._variable(0.0)
        self._handed = self._consumed = self._out = self._back = self._written = self._read = zero

    def run(self, moment: Moment, recompute: Terms) -> Terms:
        """Add what is moved in a segment; return the bytes that are on their way at its peak.

        Args:
            recompute: seconds that what begins there takes longer.
        """
        self._handed = self._more(self._handed, moment.handed)
        self._consumed = self._more(self._consumed, moment.consumed)
        if moment.is_backward:
            if not self._is_backward:  # all is out
                self._row([(self._out, 1.0), (self._handed, -1.0)], lower=0.0)
            self._backward(moment, recompute)
        else:
            self._forward(moment.seconds)
        self._is_backward = moment.is_backward
        return [(self._handed, 1.0), (self._out, -1.0), (self._back, 1.0), (self._consumed, -1.0)]

    def end(self) -> None:
        """Add that the disk takes what it is to take."""
        if self._has_disk:
            self._row([(self._written, 1.0), (self._on_disk, -1.0)], 0.0, 0.0)

    def _more(self, total: int, entries: Sequence[int]) -> int:
        return self._total([(total, 1.0), *((self._gone[index], 1.0) for index in entries)]) if entries else total

    def _forward(self, seconds: float) -> None:
        """Copy out while a segment lasts."""
        wait: Terms = [(self._variable(cost=1.0), 1.0)]
        self._out = self._moved(self._out, self._costs.d2h_bytes_per_s, seconds, wait)
        self._row([(self._out, 1.0), (self._handed, -1.0)], upper=0.0)
        if self._has_disk:
            self._written = self._moved(self._written, self._costs.disk_write_bytes_per_s, seconds, wait)
            self._in_host()

    def _backward(self, moment: Moment, recompute: Terms) -> None:
        """Wait, then copy back while a segment lasts: what a backward needs is back when it begins."""
        self._read_back(0.0, [(self._variable(cost=1.0), 1.0)])
        self._row([(self._back, 1.0), (self._consumed, -1.0)], lower=0.0)
        self._read_back(moment.seconds, recompute)
        if len(moment.readable) < len(self._gone):
            reach = [(self._gone[index], -1.0) for index in moment.readable]
            self._row([(self._back, 1.0), *reach], upper=0.0)

    def _read_back(self, seconds: float, longer: Terms) -> None:
        self._back = self._moved(self._back, self._costs.h2d_bytes_per_s, seconds, longer)
        if self._has_disk:
            self._read = self._moved(self._read, self._costs.disk_read_bytes_per_s, seconds, longer)
            self._in_host()

    def _moved(self, before: int, bytes_per_s: float, seconds: float, longer: Terms) -> int:
        """Add what a link has moved after some seconds, and longer by these terms."""
        rate = bytes_per_s * self._per_byte / self._per_second
        after = self._variable()
        slower = [(variable, -rate * factor) for variable, factor in longer]
        self._row([(after, 1.0), (before, -1.0), *slower], upper=rate * seconds * self._per_second)
        self._row([(after, 1.0), (before, -1.0)], lower=0.0)
        return after

    def _in_host(self) -> None:
        self._row([(self._written, 1.0), (self._read, -1.0)], lower=0.0)
        there = [(self._out, 1.0), (self._written, -1.0), (self._back, -1.0), (self._read, 1.0)]
        self._row(there, 0.0, self._host)
