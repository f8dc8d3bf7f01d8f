"""The rows of NOTE [ Formulation ] as a linear program, with whole actions or shares of them. HiGHS solves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass
from actckpt.planner.problem import Actions, Problem, droppable
from actckpt.planner.quiet import stdout_as_stderr

__all__ = ["DECIDED", "Program", "Solution"]

#: The order of shares.
DECIDED = (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class Solution:
    """What HiGHS found."""

    #: Per block and value: shares of its actions, in the order of `DECIDED`. None: nothing was found.
    shares: list[list[tuple[float, ...]]] | None
    #: No plan has less of what was minimised; infinite where there is no plan.
    bound: float

    def actions(self) -> tuple[Actions, ...] | None:
        """Return the actions of the largest shares."""
        if self.shares is None:
            return None
        return tuple(tuple(DECIDED[max(range(3), key=share.__getitem__)] for share in shares) for shares in self.shares)


class Program:
    """Variables, their bounds and costs, and rows over them.

    Args:
        problem: what to plan.
        minimise: `"seconds"` over plain training, or `"budget"`: the bytes that any plan needs.
    """

    def __init__(self, problem: Problem, *, minimise: str = "seconds") -> None:
        self._problem = problem
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._costs: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[float, float]] = []
        self._entries: list[tuple[int, int, float]] = []
        # HiGHS compares with absolute tolerances of 1e-7 to 1e-6: the budget is one unit, and so is the step. With more
        # units, some versions print a line of their own where a solution is beyond tolerance after presolving.
        base = numpy.maximum(problem.forward_base, problem.backward_base)
        held = sum(value.nbytes for block in problem.blocks for value in block.values)
        base += max(max(block.recompute_bytes, block.rerun_bytes) for block in problem.blocks)
        self._per_byte = 1.0 / (min(problem.budget_bytes, held + base.max()) or 1.0)
        self._per_second = 1.0 / problem.scale_s
        #: Per block, the variable that says that it is recorded: something is not kept, and it is not run again.
        self._recorded: list[int | None] = []
        self._decided = [self._block(index, block) for index, block in enumerate(problem.blocks)]
        self._kept, self._offloaded = self._sums(Action.KEEP), self._sums(Action.OFFLOAD)
        if minimise == "seconds":
            self._unit = self._per_second
            self._timed()
        else:
            self._unit = self._per_byte
            self._sized()

    # What is below makes variables and rows. A variable is its number.

    def _variable(self, upper: float = numpy.inf, cost: float = 0.0, lower: float = 0.0, whole: bool = False) -> int:
        self._lower.append(lower)
        self._upper.append(upper)
        self._costs.append(cost)
        self._whole.append(int(whole))
        return len(self._costs) - 1

    def _row(self, terms: Iterable[tuple[int, float]], lower: float = -numpy.inf, upper: float = numpy.inf) -> None:
        self._entries.extend((len(self._rows), variable, factor) for variable, factor in terms)
        self._rows.append((lower, upper))

    def _block(self, index: int, block: BlockClass) -> dict[str, dict[Action, int]]:
        """Add the decisions of a block; a value that nobody can want has none."""
        users = {name for value in block.values for name in value.inputs} | ({BLOCK_INPUT} if block.rerun else set())
        again = self._variable(1.0, block.rerun_seconds * self._per_second, whole=True) if block.rerun else None
        marks = block.recording_s or block.recompute_bytes
        recorded = self._variable(1.0, block.recording_s * self._per_second) if marks else None
        self._recorded.append(recorded)
        decided: dict[str, dict[Action, int]] = {}
        for value, allowed in zip(block.values, self._problem.allowed[index], strict=True):
            if not value.needed and value.name not in users and Action.RECOMPUTE in allowed:
                continue
            most = {action: float(action in allowed) for action in DECIDED}
            most[Action.RECOMPUTE] *= value.replayable
            seconds = {Action.RECOMPUTE: value.recompute_s, Action.OFFLOAD: value.offload_s}
            cost = {action: seconds.get(action, 0.0) * self._per_second for action in DECIDED}
            decided[value.name] = {a: self._variable(most[a], cost[a], whole=True) for a in DECIDED}
            terms = [(variable, 1.0) for variable in decided[value.name].values()]
            self._row(terms, upper=1.0)
            if Action.RECOMPUTE not in allowed:
                self._row(terms, lower=1.0)
            elif value.needed:
                covered = [(again, 1.0)] if again is not None and value.name != BLOCK_INPUT else []
                self._row([*terms, *covered], lower=1.0)
            if value.needed and recorded is not None:
                ways = [recorded, decided[value.name][Action.KEEP], *([] if again is None else [again])]
                self._row([(way, 1.0) for way in ways], lower=1.0)
        self._closure(block, decided, again)
        if again is not None:
            self._in_vain(index, decided, again)
            decided[""] = {Action.RECOMPUTE: again}
        return decided

    def _closure(self, block: BlockClass, decided: dict[str, dict[Action, int]], again: int | None) -> None:
        """What is computed again needs its inputs, and a block that is run again needs its own."""
        for value in block.values:
            for name in value.inputs:
                if value.name in decided:
                    there = [(variable, 1.0) for variable in decided[name].values()]
                    self._row([*there, (decided[value.name][Action.RECOMPUTE], -1.0)], lower=0.0)
        if again is not None and BLOCK_INPUT in decided:
            self._row([*((variable, 1.0) for variable in decided[BLOCK_INPUT].values()), (again, -1.0)], lower=0.0)

    def _in_vain(self, index: int, decided: dict[str, dict[Action, int]], again: int) -> None:
        """What is held beside a rerun is held in vain, and where nothing is, a block runs again if that is its way."""
        block, allowed = self._problem.blocks[index], self._problem.allowed[index]
        found = [block.values[position] for position in droppable(block, allowed)]
        if not any(value.needed for value in found):  # nothing is to be got back
            self._row([(again, 1.0)], upper=0.0)
        names = [value.name for value in found]
        held = {name: [(decided[name][action], 1.0) for action in (Action.KEEP, Action.OFFLOAD)] for name in names}
        for terms in held.values():
            self._row([*terms, (again, 1.0)], upper=1.0)
        nothing = tuple(
            Action.RECOMPUTE if value.name in held else may[0] for value, may in zip(block.values, allowed, strict=True)
        )
        come_to = self._problem.footprint(index, nothing)
        if come_to is not None and come_to.rerun:
            ways = [(again, 1.0), *(term for terms in held.values() for term in terms)]
            source = next((value for value in block.values if value.name == BLOCK_INPUT), None)
            if source is None or source.replayable or BLOCK_INPUT not in decided:
                self._row(ways, lower=1.0)
            else:  # without its input it cannot run again
                kept = (decided[BLOCK_INPUT][action] for action in (Action.KEEP, Action.OFFLOAD))
                self._row([*ways, *((variable, -1.0) for variable in kept)], lower=0.0)

    def _sums(self, action: Action) -> list[int]:
        """Add the bytes of an action in the blocks before each, and in all."""
        sums = [self._variable(0.0)]
        for block, decided in zip(self._problem.blocks, self._decided, strict=True):
            sizes = {value.name: value.nbytes * self._per_byte for value in block.values}
            sums.append(self._variable())
            terms = [(decided[name][action], -size) for name, size in sizes.items() if name in decided]
            self._row([(sums[-1], 1.0), (sums[-2], -1.0), *terms], 0.0, 0.0)
        return sums

    def _rate(self, bytes_per_s: float) -> float:
        return bytes_per_s * self._per_byte / self._per_second

    def _timed(self) -> None:
        """Add waits and what the links have moved by the end of each block."""
        on_disk = self._disk_total()
        self._forward(on_disk)
        self._backward(on_disk)

    def _disk_total(self) -> int:
        """Add the bytes that go on to the disk, and what host memory and disk have room for."""
        costs = self._problem.costs
        with_disk = min(costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s) > 0
        on_disk = self._variable(costs.disk_bytes * self._per_byte if with_disk else 0.0)
        if costs.host_bytes is not None:
            self._row([(self._offloaded[-1], 1.0), (on_disk, -1.0)], upper=costs.host_bytes * self._per_byte)
        return on_disk

    def _forward(self, on_disk: int) -> None:
        problem, costs = self._problem, self._problem.costs
        out, disk = self._variable(0.0), self._variable(0.0)
        rates = self._rate(costs.d2h_bytes_per_s), self._rate(costs.disk_write_bytes_per_s)
        for index, block in enumerate(problem.blocks):
            last_out, out, last_disk, disk = out, self._variable(), disk, self._variable()
            wait = self._variable(cost=1.0)
            ran = block.forward_s * self._per_second
            self._row([(out, 1.0), (self._offloaded[index], -1.0)], upper=0.0)
            self._row([(out, 1.0), (last_out, -1.0), (wait, -rates[0])], upper=rates[0] * ran)
            room = (problem.forward_capacity - problem.forward_base)[index] * self._per_byte
            self._row([(self._kept[index], 1.0), (self._offloaded[index], 1.0), (out, -1.0)], upper=room)
            if self._upper[on_disk] > 0 and costs.host_bytes is not None:
                self._row([(disk, 1.0), (last_disk, -1.0), (wait, -rates[1])], upper=rates[1] * ran)
                self._row([(out, 1.0), (disk, -1.0)], 0.0, costs.host_bytes * self._per_byte)
        self._row([(out, 1.0), (self._offloaded[-2], -1.0)], lower=0.0)
        if self._upper[on_disk] > 0:
            self._row([(disk, 1.0), (on_disk, -1.0)], 0.0, 0.0)

    def _backward(self, on_disk: int) -> None:
        problem, costs, total = self._problem, self._problem.costs, self._offloaded[-1]
        back, disk = self._variable(0.0), self._variable(0.0)
        rates = self._rate(costs.h2d_bytes_per_s), self._rate(costs.disk_read_bytes_per_s)
        for index in reversed(range(len(problem.blocks))):
            block, before = problem.blocks[index], self._offloaded[index]
            wait, start, end = self._variable(cost=1.0), self._variable(), self._variable()
            self._row([(start, 1.0), (back, -1.0), (wait, -rates[0])], upper=0.0)
            self._row([(start, 1.0), (total, -1.0), (before, 1.0)], lower=0.0)
            self._row([(end, 1.0), (start, -1.0)], lower=0.0)
            self._row(
                [(end, 1.0), (start, -1.0), *self._recompute(index, -rates[0])],
                upper=rates[0] * block.backward_s * self._per_second,
            )
            room = (problem.backward_capacity - problem.backward_base)[index] * self._per_byte
            held = [(self._kept[index], 1.0), (end, 1.0), (total, -1.0), (before, 1.0)]
            self._row([*held, *self._recompute_bytes(index)], upper=room)
            if self._upper[on_disk] > 0 and costs.host_bytes is not None:
                disk = self._from_disk(index, (on_disk, disk, wait, start, end), rates[1])
            back = end

    def _from_disk(self, index: int, variables: tuple[int, ...], rate: float) -> int:
        """Add what was read from the disk when a block's backward begins and ends."""
        on_disk, disk, wait, start, end = variables
        total, first, then = self._offloaded[-1], self._variable(), self._variable()
        self._row([(first, 1.0), (disk, -1.0), (wait, -rate)], upper=0.0)
        ran = self._problem.blocks[index].backward_s * self._per_second
        self._row([(then, 1.0), (first, -1.0), *self._recompute(index, -rate)], upper=rate * ran)
        self._row([(then, 1.0), (first, -1.0)], lower=0.0)
        self._row([(first, 1.0), (disk, -1.0)], lower=0.0)
        self._row([(then, 1.0), (on_disk, -1.0)], upper=0.0)
        host_bytes = self._problem.costs.host_bytes
        assert host_bytes is not None
        for back, read in ((start, first), (end, then)):
            in_host = [(total, 1.0), (on_disk, -1.0), (read, 1.0), (back, -1.0)]
            self._row(in_host, 0.0, host_bytes * self._per_byte)
        return then

    def _recompute(self, index: int, factor: float) -> list[tuple[int, float]]:
        """Return the seconds that a block takes longer for its actions, times a factor."""
        variables = [variable for decided in self._decided[index].values() for variable in decided.values()]
        if (recorded := self._recorded[index]) is not None:
            variables.append(recorded)
        return [(variable, self._costs[variable] * factor) for variable in variables if self._costs[variable]]

    def _recompute_bytes(self, index: int) -> list[tuple[int, float]]:
        """Return the bytes that a block needs in backward for what is computed again."""
        block, again = self._problem.blocks[index], self._decided[index].get("")
        ways = [
            (self._recorded[index], block.recompute_bytes),
            (None if again is None else again[Action.RECOMPUTE], block.rerun_bytes),
        ]
        return [(variable, nbytes * self._per_byte) for variable, nbytes in ways if nbytes and variable is not None]

    def _sized(self) -> None:
        """Minimise the budget: what it must hold, and nothing about time."""
        problem = self._problem
        self._costs = [0.0] * len(self._costs)
        self._disk_total()
        budget = self._variable(cost=1.0)
        ends = (problem.forward_base, problem.forward_capacity), (problem.backward_base, problem.backward_capacity)
        for index, kept in enumerate(self._kept[:-1]):
            again = self._recompute_bytes(index)
            for terms, (base, capacity) in zip(([(kept, 1.0)], [(kept, 1.0), *again]), ends, strict=True):
                below = [(each, -nbytes) for each, nbytes in terms]
                self._row([(budget, 1.0), *below], lower=base[index] * self._per_byte)
                self._row(terms, upper=(capacity - base)[index] * self._per_byte)

    # What is below solves it.

    def relax(self) -> Solution:
        """Allow shares of actions. Its bound is one for whole actions too."""
        return self._solve(whole=False, options={})

    def solve(self, *, time_limit_s: float, gap: float, plain: float = 0.0) -> Solution:
        """Find whole actions.

        Args:
            time_limit_s: how long HiGHS may search.
            gap: search ends once what was found is worse than the bound by at most this share.
            plain: what to add to what is minimised before that share is taken, in its unit.
        """
        options = {"time_limit": time_limit_s, "mip_rel_gap": gap}
        return self._solve(whole=True, options=options, plain=plain * self._unit)

    def _solve(self, *, whole: bool, options: dict[str, float], plain: float = 0.0) -> Solution:
        from scipy import optimize, sparse  # takes half a second to import

        rows, columns, factors = zip(*self._entries, strict=True)
        num = len(self._costs) + 1  # the last variable is what is the same for all plans
        matrix = sparse.csr_matrix((factors, (rows, columns)), (len(self._rows), num))
        lower, upper = numpy.array(self._rows).T
        with stdout_as_stderr():
            result = optimize.milp(
                numpy.append(self._costs, 1.0),
                integrality=numpy.append(self._whole, 0) * whole,
                bounds=optimize.Bounds(numpy.append(self._lower, plain), numpy.append(self._upper, plain)),
                constraints=optimize.LinearConstraint(matrix, lower, upper),
                options=options,
            )
        if result.status == 2:
            return Solution(None, numpy.inf)
        bound = result.mip_dual_bound if whole else result.fun
        bound = max((bound if bound is not None else 0.0) - plain, 0.0) / self._unit
        return Solution(None if result.x is None else self._shares(result.x), bound)

    def _shares(self, found: Any) -> list[list[tuple[float, ...]]]:
        dropped = (0.0, 0.0, 1.0)
        shares: list[list[tuple[float, ...]]] = []
        for block, decided in zip(self._problem.blocks, self._decided, strict=True):
            shares.append([])
            for value in block.values:
                if value.name in decided:
                    kept, offloaded = (found[decided[value.name][a]] for a in DECIDED[:2])
                    shares[-1].append((kept, offloaded, 1.0 - kept - offloaded))
                else:
                    shares[-1].append(dropped)
        return shares
