"""Linear programs over variables some of which are integers. HiGHS solves them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

__all__ = ["Array", "LinearProgram", "Terms", "stdout_as_stderr"]

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
#: Variables and their factors. A variable is its number.
Terms = list[tuple[int, float]]

#: The descriptor of the standard output is one for all threads.
_lock = threading.Lock()
#: Statuses of `scipy.optimize.milp`: the search has ended, or its time; there is no solution.
_ENDED, _INFEASIBLE = (0, 1), 2
#: HiGHS ends a search at a gap of 1e-6 of a unit, whatever is asked of it: units of costs are so much smaller for it.
_PER_UNIT = 1024


class LinearProgram:
    """Variables, their bounds and costs, and rows over them."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[bool] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._rows: list[tuple[float, float]] = []
        self._elements: list[tuple[int, int, float]] = []

    def variable(self, upper: float = numpy.inf, cost: float = 0.0, lower: float = 0.0, whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float = -numpy.inf, upper: float = numpy.inf) -> None:
        self._elements.extend((len(self._rows), variable, factor) for variable, factor in terms)
        self._rows.append((lower, upper))

    def total(self, terms: Iterable[tuple[int, float]]) -> int:
        """Add a variable that is a sum, which is no less than nothing."""
        found = self.variable()
        self.row([(found, 1.0), *((variable, -factor) for variable, factor in terms)], 0.0, 0.0)
        return found

    def solve(self, *, time_limit_s: float, gap: float) -> tuple[Array | None, float]:
        """Minimise the costs; return the value of each variable, None if none were found, and a bound of the costs.

        The bound is infinite where there is no solution.

        Args:
            time_limit_s: how long HiGHS may search.
            gap: the search ends once the relative difference to the bound is at most this.
        """
        from scipy import optimize, sparse  # takes half a second to import

        rows, columns, factors = zip(*self._elements, strict=True)
        matrix = sparse.csr_matrix((factors, (rows, columns)), (len(self._rows), len(self.costs)))
        # With presolve, HiGHS 1.12 may take feasible programs for infeasible, or give up.
        for presolve in (True, False):
            with stdout_as_stderr():
                result = optimize.milp(
                    _PER_UNIT * numpy.array(self.costs),
                    integrality=numpy.array(self.whole),
                    bounds=optimize.Bounds(numpy.array(self._lower), numpy.array(self._upper)),
                    constraints=optimize.LinearConstraint(matrix, *numpy.array(self._rows).T),
                    options={"time_limit": time_limit_s, "mip_rel_gap": gap, "presolve": presolve},
                )
            if result.status in _ENDED:
                break
        if result.status == _INFEASIBLE:
            return None, numpy.inf
        return result.x, 0.0 if result.mip_dual_bound is None else result.mip_dual_bound / _PER_UNIT


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Send what the body and other threads print to the standard error stream, so that no JSON of a command is spoiled.

    HiGHS 1.12 prints a line whatever its options say (https://github.com/ERGO-Code/HiGHS/issues/2783). Delete this once
    the oldest supported scipy has a newer one.
    """
    with _lock, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a process may have no such streams
            stdout = os.dup(1)
            stack.callback(os.close, stdout)
            flush = ctypes.CDLL(None).fflush
            flush(None)
            os.dup2(2, 1)
            stack.callback(os.dup2, stdout, 1)
            stack.callback(flush, None)
        yield
