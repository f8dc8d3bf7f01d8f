"""What both links and the disk have moved by the end of each segment, as variables of a program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy

from actckpt.planner.costs import CostTable

__all__ = ["Links", "Rows", "Terms"]

#: Variables and their factors.
Terms = list[tuple[int, float]]


class Rows(Protocol):
    """Where variables and rows are added. A variable is its number."""

    per_byte: float
    per_second: float
    upper: list[float]

    def variable(self, upper: float = ..., cost: float = ..., lower: float = ..., whole: bool = ...) -> int:
        """Add a variable."""

    def row(self, terms: Iterable[tuple[int, float]], lower: float = ..., upper: float = ...) -> None:
        """Add a row."""

    def rate(self, bytes_per_s: float) -> float:
        """Return a rate in the units of the program."""


class Links:
    """What was handed over, copied out, copied back and needed again by the end of the last segment so far."""

    def __init__(self, program: Rows, costs: CostTable, on_disk: int) -> None:
        self._row, self._variable = program.row, program.variable
        self._rates = program.rate(costs.d2h_bytes_per_s), program.rate(costs.h2d_bytes_per_s)
        self._disk_rates = program.rate(costs.disk_write_bytes_per_s), program.rate(costs.disk_read_bytes_per_s)
        self._per_second = program.per_second
        self.on_disk: int = on_disk
        self.has_disk: bool = program.upper[on_disk] > 0
        self._host = numpy.inf if costs.host_bytes is None else costs.host_bytes * program.per_byte
        zero = self._variable(0.0)
        self.handed: int = zero
        self.consumed: int = zero
        self.out: int = zero
        self.back: int = zero
        self.written: int = zero
        self.read: int = zero

    def forward(self, seconds: float) -> None:
        """Copy out while a segment lasts."""
        wait = self._variable(cost=1.0)
        self.out = self._moved(self.out, self._rates[0], seconds, wait, [])
        self._row([(self.out, 1.0), (self.handed, -1.0)], upper=0.0)
        if self.has_disk:
            self.written = self._moved(self.written, self._disk_rates[0], seconds, wait, [])
            self._in_host()

    def backward(self, seconds: float, recompute: Terms, reach: Terms | None) -> None:
        """Wait, then copy back while a segment lasts: what a backward needs is back when it begins."""
        wait = self._variable(cost=1.0)
        self.back = self._moved(self.back, self._rates[1], 0.0, wait, [])
        if self.has_disk:
            self.read = self._moved(self.read, self._disk_rates[1], 0.0, wait, [])
            self._in_host()
        self._row([(self.back, 1.0), (self.consumed, -1.0)], lower=0.0)
        self.back = self._moved(self.back, self._rates[1], seconds, None, recompute)
        if reach is not None:
            self._row([(self.back, 1.0), *((variable, -factor) for variable, factor in reach)], upper=0.0)
        if self.has_disk:
            self.read = self._moved(self.read, self._disk_rates[1], seconds, None, recompute)
            self._in_host()

    def _moved(self, before: int, rate: float, seconds: float, wait: int | None, recompute: Terms) -> int:
        """Add what a link has moved after some seconds, those of a wait, and those of what is computed again."""
        after = self._variable()
        slower = [(variable, -rate * factor) for variable, factor in recompute]
        slower += [] if wait is None else [(wait, -rate)]
        self._row([(after, 1.0), (before, -1.0), *slower], upper=rate * seconds * self._per_second)
        self._row([(after, 1.0), (before, -1.0)], lower=0.0)
        return after

    def _in_host(self) -> None:
        self._row([(self.written, 1.0), (self.read, -1.0)], lower=0.0)
        there = [(self.out, 1.0), (self.written, -1.0), (self.back, -1.0), (self.read, 1.0)]
        self._row(there, 0.0, self._host)
