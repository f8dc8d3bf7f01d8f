"""The rows of NOTE [ Formulation ] as a linear program, with whole actions or shares of them.

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

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy

from actckpt.action import Action
from actckpt.planner.bandwidth import Links, has_disk
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, Segment, Value
from actckpt.planner.linear_program import Array, LinearProgram, Solution, Terms
from actckpt.planner.pins import Allowed
from actckpt.planner.problem import Choice, Problem

__all__ = ["Program"]

_KEEP, _RECOMPUTE, _OFFLOAD = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD
#: A share that differs from a whole action by less is one.
_WHOLE = 1e-6

#: Of each value that may be wanted, by name, the variables of its actions.
_Ways = dict[str, dict[Action, int]]


class _Entry(NamedTuple):
    """The variables of one entry of the stack."""

    ways: _Ways
    again: int | None
    #: Something is replayed.
    recorded: int | None
    #: Sums of bytes; of the values that are kept also without those that autocast's cache holds, too.
    kept: int
    gone: int
    kept_beside_casts: int

    def decisions(self) -> list[int]:
        """Return the variables of its actions."""
        actions = [variable for ways in self.ways.values() for variable in ways.values()]
        return actions if self.again is None else [*actions, self.again]


class Program:
    """The rows for a problem.

    Args:
        problem: what to plan.
        minimise: `"seconds"`, or `"budget"`: the bytes that any plan needs, for which no copies are laid out.
    """

    def __init__(self, problem: Problem, *, minimise: str = "seconds") -> None:
        self._problem, self._costs, self._program = problem, problem.costs, LinearProgram()
        is_for_seconds = minimise == "seconds"
        # HiGHS compares with absolute tolerances of 1e-7 to 1e-6: the budget is one unit, and so is the step.
        bases = [nbytes for moment in problem.moments for nbytes in moment.segment.bases]
        held = sum(value.nbytes for block in self._costs.blocks for value in block.values)
        self._base = min(bases)  # there at all times, so it need not be told
        room = min(problem.budget_bytes - self._base, held + max(bases) - self._base)
        self._per_byte = 1.0 / (max(room, 0.0) or 1.0)
        self._per_second = is_for_seconds / problem.scale_s
        self._plain = self._costs.plain_seconds * self._per_second
        # The same for all plans: gaps are shares of the step.
        self._program.variable(self._plain, cost=1.0, lower=self._plain)
        most = room * self._per_byte if is_for_seconds else math.inf
        self._most = self._program.variable(most, cost=float(not is_for_seconds), lower=-math.inf)
        self._entries = [self._entry(index, block) for index, block in enumerate(self._costs.blocks)]
        #: Bytes that these entries keep together; for segments without and with casts in autocast's cache.
        self._alive: tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]] = ({}, {})
        self._memory(has_links=is_for_seconds and self._costs.d2h_bytes_per_s > 0)

    @property
    def num_whole(self) -> int:
        """The number of decisions."""
        return sum(self._program.whole)

    def _entry(self, index: int, block: BlockClass) -> _Entry:
        """Add the decisions of an entry; a value that nobody can want has none."""
        allowed = self._problem.allowed[index]
        again = None
        if block.rerun and any(value.needed and allowed[value.name] != (_KEEP,) for value in block.values):
            again = self._program.variable(1.0, block.rerun_seconds * self._per_second, whole=True)
        users = {name for value in block.values for name in value.inputs}
        if block.rerun:
            users.add(BLOCK_INPUT)
        ways = {
            value.name: self._ways(value, allowed, again)
            for value in block.values
            if value.needed or value.name in users or _RECOMPUTE not in allowed[value.name]
        }
        self._closure(block, ways, again)
        sizes = {value.name: value.nbytes * self._per_byte for value in block.values}
        kept, gone = (
            self._program.total((each[action], sizes[name]) for name, each in ways.items() if action in each)
            for action in (_KEEP, _OFFLOAD)
        )
        cached = {value.name for value in block.values if value.cached}
        beside = ((each[_KEEP], sizes[name]) for name, each in ways.items() if _KEEP in each and name not in cached)
        kept_beside_casts = self._program.total(beside) if cached else kept
        return _Entry(ways, again, self._recorded(index, block, ways, again), kept, gone, kept_beside_casts)

    def _ways(self, value: Value, allowed: Allowed, again: int | None) -> dict[Action, int]:
        seconds = {_KEEP: 0.0, _OFFLOAD: value.offload_s, _RECOMPUTE: value.recompute_s}
        ways: dict[Action, int] = {}
        for action in (_KEEP, _OFFLOAD, _RECOMPUTE):
            if action in allowed[value.name] and (action is not _RECOMPUTE or value.replayable):
                ways[action] = self._program.variable(1.0, seconds[action] * self._per_second, whole=True)
        held = [(variable, 1.0) for action, variable in ways.items() if action is not _RECOMPUTE]
        if _RECOMPUTE not in allowed[value.name]:
            self._program.row(held, lower=1.0, upper=1.0)
            return ways
        if len(held) == 2:
            self._program.row(held, upper=1.0)
        if value.needed:
            covered = [] if again is None or value.name == BLOCK_INPUT else [again]
            self._program.row([(variable, 1.0) for variable in (*ways.values(), *covered)], lower=1.0)
        return ways

    def _closure(self, block: BlockClass, ways: _Ways, again: int | None) -> None:
        """What is computed again needs its inputs, and a block that is run again needs its own."""
        reads = [(ways.get(value.name, {}).get(_RECOMPUTE), name) for value in block.values for name in value.inputs]
        for reader, name in [*reads, (again, BLOCK_INPUT)]:
            if reader is not None and name in ways:
                self._program.row([*((way, 1.0) for way in ways[name].values()), (reader, -1.0)], lower=0.0)

    def _recorded(self, index: int, block: BlockClass, ways: _Ways, again: int | None) -> int | None:
        """Add that an entry is recorded, where that costs something: what backward needs is not kept, and not rerun."""
        own = [moment.segment.bases for moment in self._problem.moments if moment.segment.running == index]
        if not block.recording_s and all(replay == plain for plain, replay, _ in own):
            return None
        found = self._program.variable(1.0, block.recording_s * self._per_second, whole=True)
        needed = [ways[value.name].get(_KEEP) for value in block.values if value.needed]
        beside = [(found, 1.0), *([] if again is None else [(again, 1.0)])]
        for kept in needed:
            self._program.row([*beside, *([] if kept is None else [(kept, 1.0)])], lower=1.0)
        if any(replay < plain for plain, replay, _ in own):  # it must not be said of an entry that is not
            self._program.row(beside, upper=1.0)
            kept_terms = [(kept, 1.0) for kept in needed if kept is not None]
            self._program.row([(found, 1.0), *kept_terms], upper=float(len(needed)))
        return found

    def _memory(self, *, has_links: bool) -> None:
        """Add a row for each segment, with what is on its way."""
        on_disk = self._on_disk()
        gone = [entry.gone for entry in self._entries]
        links = None
        if has_links:
            links = Links(self._program, self._costs, self._per_byte, self._per_second, gone, on_disk)
        for moment in self._problem.moments:
            moving = [] if links is None else links.run(moment, self._longer(moment.consumed))
            self._memory_row(moment.segment, moving)
        if links is not None:
            links.end()

    def _on_disk(self) -> int:
        """Add the bytes that go on to the disk, and what host memory and disk have room for."""
        costs = self._costs
        found = self._program.variable(costs.disk_bytes * self._per_byte if has_disk(costs) else 0.0)
        if costs.host_bytes is not None:
            gone = [(entry.gone, 1.0) for entry in self._entries]
            self._program.row([*gone, (found, -1.0)], upper=costs.host_bytes * self._per_byte)
        return found

    def _longer(self, entries: tuple[int, ...]) -> Terms:
        """Return the seconds that entries take longer for what they do."""
        variables = [variable for index in entries for variable in self._entries[index].decisions()]
        variables += [recorded for index in entries if (recorded := self._entries[index].recorded) is not None]
        costs = self._program.costs
        return [(variable, costs[variable]) for variable in variables if costs[variable]]

    def _memory_row(self, segment: Segment, moving: Terms) -> None:
        plain, replay, rerun = ((nbytes - self._base) * self._per_byte for nbytes in segment.bases)
        terms = [*self._held_by(segment), *moving, (self._most, -1.0)]
        if segment.running >= 0:
            entry = self._entries[segment.running]
            modes = (entry.recorded, replay - plain), (entry.again, rerun - plain)
            terms += [(variable, more) for variable, more in modes if variable is not None and more]
            if segment.is_forward and segment.kept_limit_bytes > 0:
                terms.append((self._in_forward(segment.running, segment.kept_limit_bytes), 1.0))
        self._program.row(terms, upper=-plain)

    def _held_by(self, segment: Segment) -> Terms:
        """Return the bytes that entries keep: the latest sum with its differences, where these are few."""
        alive, sums = tuple(sorted(segment.alive)), self._alive[segment.holds_casts]
        kept = [entry.kept_beside_casts if segment.holds_casts else entry.kept for entry in self._entries]
        if alive not in sums:
            before = next(reversed(sums), ())
            added, gone = set(alive) - set(before), set(before) - set(alive)
            terms = [(kept[index], 1.0) for index in alive]
            if before and len(added) + len(gone) < len(alive):
                terms = [(sums[before], 1.0), *((kept[index], -1.0) for index in sorted(gone))]
                terms += [(kept[index], 1.0) for index in sorted(added)]
            sums[alive] = self._program.total(terms)
        return [(sums[alive], 1.0)]

    def _in_forward(self, index: int, limit_bytes: float) -> int:
        """Add what an entry holds in its own forward, up to a limit."""
        entry, most = self._entries[index], limit_bytes * self._per_byte
        held = sum(value.nbytes for value in self._costs.blocks[index].values) * self._per_byte
        if held <= most:
            return self._program.total([(entry.kept, 1.0), (entry.gone, 1.0)])
        found, is_most = self._program.variable(), self._program.variable(1.0, whole=True)
        own = [(found, 1.0), (entry.kept, -1.0), (entry.gone, -1.0)]
        self._program.row([*own, (is_most, held - most)], lower=0.0)
        self._program.row([(found, 1.0), (is_most, -most)], lower=0.0)
        return found

    # What is below solves it.

    def relax(self) -> Solution:
        """Allow shares of actions. Its bound is one for whole actions too."""
        return self._in_seconds(self._program.solve(whole=False, options={}, fixed={}))

    def solve(self, *, time_limit_s: float, gap: float, near: Solution | None = None) -> Solution:
        """Find whole actions.

        Args:
            time_limit_s: how long HiGHS may search.
            gap: search ends once what was found is worse than the bound by at most this share, of the step or bytes.
            near: shares: entries all of whose actions are whole there keep them.
        """
        options = {"time_limit": time_limit_s, "mip_rel_gap": gap}
        fixed = {} if near is None or near.variables is None else dict(self._whole_in(near.variables))
        return self._in_seconds(self._program.solve(whole=True, options=options, fixed=fixed))

    def _in_seconds(self, found: Solution) -> Solution:
        """Return a solution with its bound in seconds over plain training."""
        return found._replace(bound=(found.bound - self._plain) / (self._per_second or 1.0))

    def _whole_in(self, shares: Array) -> Iterator[tuple[int, float]]:
        """Yield the decisions of entries all of whose actions are whole."""
        for entry in self._entries:
            decided = entry.decisions()
            if decided and numpy.abs(shares[decided] - numpy.rint(shares[decided])).max() < _WHOLE:
                yield from ((variable, float(numpy.rint(shares[variable]))) for variable in decided)

    def choice(self, found: Solution) -> Choice | None:
        """Return the actions of the largest shares."""
        if found.variables is None:
            return None
        values, actions, rerun = found.variables, [], []
        for block, allowed, entry in zip(self._costs.blocks, self._problem.allowed, self._entries, strict=True):
            again = entry.again is not None and bool(values[entry.again] > 0.5)
            chosen = {}
            for value in block.values:
                may, ways = allowed[value.name], entry.ways.get(value.name, {})
                held = [action for action in (_KEEP, _OFFLOAD) if action in ways and values[ways[action]] > 0.5]
                in_vain = again and value.name != BLOCK_INPUT and _RECOMPUTE in may
                chosen[value.name] = held[0] if held and not in_vain else _RECOMPUTE if _RECOMPUTE in may else may[0]
            actions.append(chosen)
            rerun.append(again)
        return Choice(tuple(actions), tuple(rerun))
