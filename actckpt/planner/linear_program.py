"""Linear programs over variables some of which are whole numbers. HiGHS solves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy

from actckpt.planner.stdout_redirect import stdout_as_stderr

__all__ = ["Array", "LinearProgram", "Solution", "Terms"]

Array = numpy.ndarray[Any, numpy.dtype[numpy.float64]]
#: Variables and their factors. A variable is its number.
Terms = list[tuple[int, float]]


class Solution(NamedTuple):
    """What HiGHS found."""

    #: The value of each variable. None: nothing was found.
    variables: Array | None
    #: Lower bound of the objective; infinite where there is no solution.
    bound: float


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
        """Add a variable."""
        self._lower.append(lower)
        self._upper.append(upper)
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float = -numpy.inf, upper: float = numpy.inf) -> None:
        """Add limits of a sum."""
        self._elements.extend((len(self._rows), variable, factor) for variable, factor in terms)
        self._rows.append((lower, upper))

    def total(self, terms: Iterable[tuple[int, float]]) -> int:
        """Add a variable that is a sum, which is no less than nothing."""
        found = self.variable()
        self.row([(found, 1.0), *((variable, -factor) for variable, factor in terms)], 0.0, 0.0)
        return found

    def solve(self, *, whole: bool, options: Mapping[str, float], fixed: Mapping[int, float]) -> Solution:
        """Find the least costs.

        Args:
            whole: variables that are whole numbers must be; else they may be shares.
            options: of `scipy.optimize.milp`.
            fixed: values that variables must have.
        """
        from scipy import optimize, sparse  # takes half a second to import

        rows, columns, factors = zip(*self._elements, strict=True)
        matrix = sparse.csr_matrix((factors, (rows, columns)), (len(self._rows), len(self.costs)))
        lower, upper = numpy.array(self._lower), numpy.array(self._upper)
        for variable, number in fixed.items():
            lower[variable] = upper[variable] = number
        with stdout_as_stderr():
            result = optimize.milp(
                numpy.array(self.costs),
                integrality=numpy.array(self.whole) * whole,
                bounds=optimize.Bounds(lower, upper),
                constraints=optimize.LinearConstraint(matrix, *numpy.array(self._rows).T),
                options=dict(options),
            )
        if result.status == 2:
            return Solution(None, numpy.inf)
        bound = result.mip_dual_bound if whole else result.fun
        return Solution(result.x, 0.0 if bound is None else bound)
