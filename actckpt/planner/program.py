"""The rows of NOTE [ Formulation ] as a linear program, with whole actions or shares of them. HiGHS solves it.

NOTE [ Formulation ]

A cycle is a list of segments s. In each, an entry of the stack runs forward, or backward, or none does; others are
alive, between their forward and their backward. Of a value v of an entry j it is decided whether it is kept (k_v),
offloaded (o_v) or computed again (r_v), and of j whether it is run again as a whole (a_j). K_j and O_j are the bytes
that j keeps and offloads, H_s the offloaded bytes of entries whose forward ended before s, C_s of those whose backward
has begun, D_s what was copied out and B_s what was copied back by the end of s:

    needed       k_v + o_v + r_v + a_j >= 1 where backward needs v
    inputs       k_u + o_u + r_u >= r_v for each input u of v, and >= a_j for the input u of the block
    memory       base_s + sum of K_j alive in s + (H_s - D_s) + (B_s - C_s) + own_s <= what there is
    copies out   D_s <= H_s, D_s <= D_(s-1) + d2h (seconds_s + wait_s), D = H where a backward begins
    copies back  B_s <= B_(s-1) + h2d (seconds_s + recompute_s + wait_s), C_s <= B_s, nothing is back before it is out
    host         all O_j <= host bytes; with a disk, W <= D of them go on to it and R <= W come back, on links of its
                 own, so that 0 <= D - W - B + R <= host bytes at any time

base_s is one of three: the entry that runs keeps all that backward needs, is replayed, or runs again. own_s is what it
holds itself, up to a limit, in its forward; in its backward that is in the base. What drains while a forward runs
counts for segments of forwards alone: a backward begins once all is out. The step takes its plain seconds, those of
r_v and a_j, of recording and of offloading, and the waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass
from actckpt.planner.links import Links, Terms
from actckpt.planner.problem import Actions, Array, Choice, Problem
from actckpt.planner.quiet import stdout_as_stderr

__all__ = ["Program", "Solution"]

_KEEP, _RECOMPUTE, _OFFLOAD = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD
#: A share that differs from a whole action by less is one.
_WHOLE = 1e-6

#: The entry that runs in a segment, whether it runs forward, and what is alive.
_Row = tuple[int, bool, tuple[int, ...]]


class Solution(NamedTuple):
    """What HiGHS found."""

    #: The value of each variable. None: nothing was found.
    variables: Array | None
    #: No plan has less of what was minimised; infinite where there is no plan.
    bound: float


class _Entry(NamedTuple):
    """The variables of one entry of the stack."""

    #: By the name of a value that may be wanted.
    ways: dict[str, dict[Action, int]]
    again: int | None
    #: Something is replayed.
    recorded: int | None
    #: Sums of bytes.
    kept: int
    gone: int


class Program:
    """Variables, their bounds and costs, and rows over them.

    Args:
        problem: what to plan.
        minimise: `"seconds"` over plain training, or `"budget"`: the bytes that any plan needs.
    """

    def __init__(self, problem: Problem, *, minimise: str = "seconds") -> None:
        self._problem, self._costs_table = problem, problem.costs
        self._lower: list[float] = []
        self.upper: list[float] = []
        self._costs: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[float, float]] = []
        self._elements: list[tuple[int, int, float]] = []
        # HiGHS compares with absolute tolerances of 1e-7 to 1e-6: the budget is one unit, and so is the step.
        bases = [nbytes for moment in problem.moments for nbytes in moment.segment.bases]
        held = sum(value.nbytes for block in problem.costs.blocks for value in block.values)
        self._base = min(bases)  # there at all times, so it need not be told
        room = min(max(problem.budget_bytes - self._base, 0.0), held + max(bases) - self._base)
        self.per_byte: float = 1.0 / (room or 1.0)
        self.per_second: float = 1.0 / problem.scale_s
        self._entries = [self._entry(index, block) for index, block in enumerate(problem.costs.blocks)]
        self._alive: dict[tuple[int, ...], Terms] = {(): []}
        self._budget: int | None = None
        self._unit = self.per_second
        if minimise == "budget":
            self._unit, self._costs = self.per_byte, [0.0] * len(self._costs)
            self._budget = self.variable(cost=1.0, lower=-numpy.inf)
            self._on_disk()
            self._memory()
        elif min(problem.costs.d2h_bytes_per_s, problem.costs.h2d_bytes_per_s) > 0:
            self._copies()
        else:
            self._memory()

    @property
    def num_whole(self) -> int:
        """The number of decisions."""
        return sum(self._whole)

    # What is below makes variables and rows. A variable is its number.

    def variable(self, upper: float = numpy.inf, cost: float = 0.0, lower: float = 0.0, whole: bool = False) -> int:
        self._lower.append(lower)
        self.upper.append(upper)
        self._costs.append(cost)
        self._whole.append(int(whole))
        return len(self._costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float = -numpy.inf, upper: float = numpy.inf) -> None:
        self._elements.extend((len(self._rows), variable, factor) for variable, factor in terms)
        self._rows.append((lower, upper))

    def _sum(self, terms: Iterable[tuple[int, float]]) -> int:
        """Add a variable that is a sum, which is no less than nothing."""
        found = self.variable()
        self.row([(found, 1.0), *((variable, -factor) for variable, factor in terms)], 0.0, 0.0)
        return found

    def _entry(self, index: int, block: BlockClass) -> _Entry:
        """Add the decisions of an entry; a value that nobody can want has none."""
        allowed = self._problem.allowed[index]
        can_gain = any(v.needed and may != (_KEEP,) for v, may in zip(block.values, allowed, strict=True))
        again = None
        if block.rerun and can_gain:
            again = self.variable(1.0, block.rerun_seconds * self.per_second, whole=True)
        users = {name for value in block.values for name in value.inputs}
        if block.rerun:
            users.add(BLOCK_INPUT)
        ways = {
            value.name: self._ways(value, may, again)
            for value, may in zip(block.values, allowed, strict=True)
            if value.needed or value.name in users or Action.RECOMPUTE not in may
        }
        self._closure(block, ways, again)
        sizes = {value.name: value.nbytes * self.per_byte for value in block.values}
        kept, gone = (
            self._sum((each[action], sizes[name]) for name, each in ways.items() if action in each and sizes[name])
            for action in (_KEEP, _OFFLOAD)
        )
        return _Entry(ways, again, self._recorded(index, block, ways, again), kept, gone)

    def _ways(self, value: Any, allowed: Actions, again: int | None) -> dict[Action, int]:
        ways: dict[Action, int] = {}
        if _KEEP in allowed:
            ways[_KEEP] = self.variable(1.0, whole=True)
        if _OFFLOAD in allowed:
            ways[_OFFLOAD] = self.variable(1.0, value.offload_s * self.per_second, whole=True)
        if len(ways) == 2:
            self.row([(variable, 1.0) for variable in ways.values()], upper=1.0)
        if _RECOMPUTE not in allowed:
            self.row([(variable, 1.0) for variable in ways.values()], lower=1.0)
            return ways
        if value.replayable:  # whole by itself, but HiGHS finds some programs infeasible where that is not said
            ways[_RECOMPUTE] = self.variable(1.0, value.recompute_s * self.per_second, whole=True)
        if value.needed:
            covered = [] if again is None or value.name == BLOCK_INPUT else [again]
            self.row([(variable, 1.0) for variable in (*ways.values(), *covered)], lower=1.0)
        return ways

    def _closure(self, block: BlockClass, ways: dict[str, dict[Action, int]], again: int | None) -> None:
        """What is computed again needs its inputs, and a block that is run again needs its own."""
        reads = [(ways.get(value.name, {}).get(_RECOMPUTE), name) for value in block.values for name in value.inputs]
        for reader, name in [*reads, (again, BLOCK_INPUT)]:
            if reader is not None and name in ways:
                self.row([*((variable, 1.0) for variable in ways[name].values()), (reader, -1.0)], lower=0.0)

    def _recorded(
        self, index: int, block: BlockClass, ways: dict[str, dict[Action, int]], again: int | None
    ) -> int | None:
        """Add that an entry is recorded, where that costs something: what backward needs is not kept, and not rerun."""
        own = [moment.segment.bases for moment in self._problem.moments if moment.segment.running == index]
        if not block.recording_s and all(replay == plain for plain, replay, _ in own):
            return None
        found = self.variable(1.0, block.recording_s * self.per_second, whole=True)
        needed = [ways[value.name].get(_KEEP) for value in block.values if value.needed]
        beside = [(found, 1.0), *([] if again is None else [(again, 1.0)])]
        for kept in needed:
            self.row([*beside, *([] if kept is None else [(kept, 1.0)])], lower=1.0)
        if any(replay < plain for plain, replay, _ in own):  # it must not be said of an entry that is not
            self.row(beside, upper=1.0)
            kept_terms = [(kept, 1.0) for kept in needed if kept is not None]
            self.row([(found, 1.0), *kept_terms], upper=float(len(needed)))
        return found

    # Memory.

    def _memory(self) -> None:
        """Add a row for each segment that can be the worst, without copies."""
        worst: dict[_Row, tuple[float, ...]] = {}
        for segment in (moment.segment for moment in self._problem.moments):
            key = segment.running, segment.is_forward, tuple(sorted(segment.alive))
            figures = *segment.bases, segment.kept_limit_bytes
            worst[key] = tuple(map(max, worst.get(key, figures), figures))
        sets = {key: frozenset(key[2]) for key in worst}
        for key, (plain, replay, rerun, most) in worst.items():
            is_outdone = key[0] < 0 and any(
                key != other and sets[key] <= sets[other] and min(bases) >= plain
                for other, (*bases, _) in worst.items()
            )
            if not is_outdone:
                self._memory_row(key, (plain, replay, rerun), most, [])

    def _memory_row(
        self,
        key: _Row,
        bases: tuple[float, float, float],
        most: float,
        moving: Terms,
    ) -> None:
        index, is_forward, alive = key
        terms = [*self._held_by(alive), *moving]
        if index >= 0:
            entry = self._entries[index]
            modes = zip((entry.recorded, entry.again), bases[1:], strict=True)
            terms += [
                (variable, (nbytes - bases[0]) * self.per_byte)
                for variable, nbytes in modes
                if variable is not None and nbytes != bases[0]
            ]
            if is_forward and most > 0:
                terms.append((self._in_forward(index, most), 1.0))
        base = (bases[0] - self._base) * self.per_byte
        if self._budget is not None:
            self.row([(self._budget, -1.0), *terms], upper=-base)
        elif self._problem.budget_bytes < numpy.inf:
            self.row(terms, upper=(self._problem.budget_bytes - self._base) * self.per_byte - base)

    def _held_by(self, alive: tuple[int, ...]) -> Terms:
        """Return the sum of what entries keep; sums of others that differ little are part of it."""
        alive = tuple(sorted(alive))
        if alive not in self._alive:
            before = next(reversed(self._alive))
            added, gone = set(alive) - set(before), set(before) - set(alive)
            near = len(added) + len(gone) < len(alive)
            terms = [*self._alive[before], *((self._entries[j].kept, -1.0) for j in gone)] if near else []
            terms += [(self._entries[j].kept, 1.0) for j in sorted(added if near else alive)]
            self._alive[alive] = [(self._sum(terms), 1.0)]
        return self._alive[alive]

    def _in_forward(self, index: int, most: float) -> int:
        """Add what an entry holds in its own forward, up to a limit."""
        entry, most = self._entries[index], most * self.per_byte
        held = sum(value.nbytes for value in self._costs_table.blocks[index].values) * self.per_byte
        if held <= most:
            return self._sum([(entry.kept, 1.0), (entry.gone, 1.0)])
        found, is_most = self.variable(), self.variable(1.0, whole=True)
        self.row([(found, 1.0), (is_most, held - most), (entry.kept, -1.0), (entry.gone, -1.0)], lower=0.0)
        self.row([(found, 1.0), (is_most, -most)], lower=0.0)
        return found

    # Copies.

    def rate(self, bytes_per_s: float) -> float:
        return bytes_per_s * self.per_byte / self.per_second

    def _on_disk(self) -> int:
        """Add the bytes that go on to the disk, and what host memory and disk have room for."""
        costs = self._costs_table
        has_disk = min(costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s) > 0 and costs.host_bytes is not None
        found = self.variable(costs.disk_bytes * self.per_byte if has_disk else 0.0)
        if costs.host_bytes is not None:
            gone = [(entry.gone, 1.0) for entry in self._entries]
            self.row([*gone, (found, -1.0)], upper=costs.host_bytes * self.per_byte)
        return found

    def _copies(self) -> None:
        """Add memory, waits, and what the links have moved by the end of each segment."""
        links = Links(self, self._problem.costs, self._on_disk())
        order = [index for moment in self._problem.moments for index in moment.consumed]
        handed: set[int] = set()
        for before, moment in itertools.pairwise([None, *self._problem.moments]):
            assert moment is not None
            links.handed = self._longer(links.handed, moment.handed)
            handed.update(moment.handed)
            links.consumed = self._longer(links.consumed, moment.consumed)
            segment = moment.segment
            if not moment.is_backward:
                links.forward(moment.seconds)
            else:
                if before is None or not before.is_backward:  # all is out
                    self.row([(links.out, 1.0), (links.handed, -1.0)], lower=0.0)
                there = list(itertools.takewhile(handed.__contains__, order))
                reach = None if len(there) == len(order) else [(self._entries[j].gone, 1.0) for j in there]
                links.backward(moment.seconds, self._recompute(moment.consumed), reach)
            moving = [(links.handed, 1.0), (links.out, -1.0), (links.back, 1.0), (links.consumed, -1.0)]
            key = segment.running, segment.is_forward, segment.alive
            self._memory_row(key, segment.bases, segment.kept_limit_bytes, moving)
        if links.has_disk:
            self.row([(links.written, 1.0), (links.on_disk, -1.0)], 0.0, 0.0)

    def _longer(self, total: int, entries: tuple[int, ...]) -> int:
        more = [(self._entries[index].gone, 1.0) for index in entries]
        return self._sum([(total, 1.0), *more]) if more else total

    def _recompute(self, entries: tuple[int, ...]) -> Terms:
        """Return the seconds that entries take longer for what they do."""
        found = []
        for entry in (self._entries[index] for index in entries):
            variables = [variable for ways in entry.ways.values() for variable in ways.values()]
            found += [each for each in (*variables, entry.again, entry.recorded) if each is not None]
        return [(variable, self._costs[variable]) for variable in found if self._costs[variable]]

    # What is below solves it.

    def relax(self) -> Solution:
        """Allow shares of actions. Its bound is one for whole actions too."""
        return self._solve(whole=False, options={})

    def solve(self, *, time_limit_s: float, gap: float, near: Solution | None = None) -> Solution:
        """Find whole actions.

        Args:
            time_limit_s: how long HiGHS may search.
            gap: search ends once what was found is worse than the bound by at most this share, of the step or bytes.
            near: shares: entries all of whose actions are whole there keep them.
        """
        options = {"time_limit": time_limit_s, "mip_rel_gap": gap}
        lower, upper = numpy.array(self._lower), numpy.array(self.upper)
        if near is not None and near.variables is not None:
            for fixed in self._whole_in(near.variables):
                lower[fixed] = upper[fixed] = numpy.rint(near.variables[fixed])
        return self._solve(whole=True, options=options, bounds=(lower, upper))

    def _whole_in(self, shares: Array) -> Iterable[list[int]]:
        """Yield the decisions of entries all of whose actions are whole."""
        for entry in self._entries:
            decided = [variable for ways in entry.ways.values() for variable in ways.values() if self._whole[variable]]
            decided += [] if entry.again is None else [entry.again]
            if decided and numpy.abs(shares[decided] - numpy.rint(shares[decided])).max() < _WHOLE:
                yield decided

    def _solve(self, *, whole: bool, options: dict[str, float], bounds: tuple[Array, Array] | None = None) -> Solution:
        from scipy import optimize, sparse  # takes half a second to import

        rows, columns, factors = zip(*self._elements, strict=True)
        num = len(self._costs) + 1  # the last variable is what is the same for all plans
        plain = 0.0 if self._budget is not None else self._costs_table.plain_seconds * self.per_second
        matrix = sparse.csr_matrix((factors, (rows, columns)), (len(self._rows), num))
        row_lower, row_upper = numpy.array(self._rows).T
        lower, upper = bounds or (numpy.array(self._lower), numpy.array(self.upper))
        with stdout_as_stderr():
            result = optimize.milp(
                numpy.append(self._costs, 1.0),
                integrality=numpy.append(self._whole, 0) * whole,
                bounds=optimize.Bounds(numpy.append(lower, plain), numpy.append(upper, plain)),
                constraints=optimize.LinearConstraint(matrix, row_lower, row_upper),
                options=options,
            )
        if result.status == 2:
            return Solution(None, numpy.inf)
        bound = result.mip_dual_bound if whole else result.fun
        bound = (bound if bound is not None else 0.0) - plain
        return Solution(result.x, bound / self._unit)

    def choice(self, found: Solution) -> Choice | None:
        """Return the actions of the largest shares."""
        if found.variables is None:
            return None
        values, actions, rerun = found.variables, [], []
        for block, allowed, entry in zip(self._costs_table.blocks, self._problem.allowed, self._entries, strict=True):
            again = entry.again is not None and bool(values[entry.again] > 0.5)
            chosen = []
            for value, may in zip(block.values, allowed, strict=True):
                ways = entry.ways.get(value.name, {})
                held = [action for action in (_KEEP, _OFFLOAD) if action in ways and values[ways[action]] > 0.5]
                in_vain = again and value.name != BLOCK_INPUT and _RECOMPUTE in may
                chosen.append(held[0] if held and not in_vain else _RECOMPUTE if _RECOMPUTE in may else may[0])
            actions.append(tuple(chosen))
            rerun.append(again)
        return Choice(tuple(actions), tuple(rerun))
