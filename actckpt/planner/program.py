"""The rows of NOTE [ Formulation ] as a linear program over binary decisions.

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
    host         all O_j <= host bytes

base_s is one of three: the entry that runs keeps all that backward needs, is replayed, or runs again. own_s is what it
holds itself, up to a limit, in its forward; in its backward that is in the base. What drains while a forward runs
counts for segments of forwards alone: a backward begins once all is out. The step takes its plain seconds, those of
r_v and a_j, of recording and of offloading, and the waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, Moment, Segment, Value
from actckpt.planner.linear_program import Array, LinearProgram, Terms
from actckpt.planner.pins import Allowed
from actckpt.planner.problem import Choice, Problem

__all__ = ["Program"]

_KEEP, _RECOMPUTE, _OFFLOAD = Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD

_FEW = 150
#: Room that there is not, of a unit of bytes: HiGHS 1.12 may lose plans that fill a budget to less than its tolerance.
#: What does not fit is excluded.
_SLACK = 1e-6
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
        # HiGHS compares with absolute tolerances of 1e-7 to 1e-6. So the budget or the largest value is about one unit,
        # and so is the step. Units are powers of two, so that no number is rounded.
        bases = [nbytes for moment in problem.costs.moments for nbytes in moment.segment.bases]
        sizes = [value.nbytes for block in self._costs.blocks for value in block.values]
        self._base = min(bases)  # there at all times, so it need not be told
        room = min(problem.budget_bytes - self._base, sum(sizes) + max(bases) - self._base)
        self._per_byte = 0.5 ** math.frexp(max(room, *sizes, 0.0))[1]
        self._per_second = is_for_seconds * 0.5 ** math.frexp(problem.scale_s)[1]
        self._plain = self._costs.plain_seconds * self._per_second
        # The same for all plans: gaps are shares of the step.
        self._program.variable(self._plain, cost=1.0, lower=self._plain)
        most = room * self._per_byte + _SLACK
        self._most = self._program.variable(most, float(not is_for_seconds), lower=-math.inf)
        self._entries = [self._entry(index, block) for index, block in enumerate(self._costs.blocks)]
        #: Bytes that these entries keep together; for segments without and with casts in autocast's cache.
        nothing = self._program.variable(0.0)
        self._alive: tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]] = ({(): nothing}, {(): nothing})
        self._memory(has_links=is_for_seconds and self._costs.d2h_bytes_per_s > 0)
        #: Of the variables, as the last search found them.
        self._values: Array | None = None

    @property
    def is_small(self) -> bool:
        """Whether it has so few decisions that the best one, to the byte, is found quickly."""
        return sum(self._program.whole) <= _FEW

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
        own = [moment.segment.bases for moment in self._costs.moments if moment.segment.running == index]
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
        costs, gone = self._costs, [entry.gone for entry in self._entries]
        links = _Links(self._program, costs, self._per_byte, self._per_second, gone) if has_links else None
        for moment in costs.moments:
            moving = [] if links is None else links.run(moment, self._longer(moment.consumed))
            self._memory_row(moment.segment, moving)
        if costs.host_bytes is not None:
            self._program.row([(each, 1.0) for each in gone], upper=costs.host_bytes * self._per_byte + _SLACK)

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
        """Return the bytes that entries keep: the latest sum, with its differences."""
        alive, sums = tuple(sorted(segment.alive)), self._alive[segment.holds_casts]
        kept = [entry.kept_beside_casts if segment.holds_casts else entry.kept for entry in self._entries]
        if alive not in sums:
            before = next(reversed(sums))
            changes = [(kept[index], 1.0) for index in alive if index not in before]
            changes += [(kept[index], -1.0) for index in before if index not in alive]
            sums[alive] = self._program.total([(sums[before], 1.0), *changes])
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

    def solve(self, *, time_limit_s: float, gap: float) -> tuple[Choice | None, float]:
        """Choose an action for each value; return the choice, if one was found, and seconds that none can beat.

        Args:
            time_limit_s: how long HiGHS may search.
            gap: the search ends once its plan is worse than the bound by at most this share, of the step or bytes.
        """
        self._values, bound = self._program.solve(time_limit_s=time_limit_s, gap=gap)
        bound_s = (bound - self._plain) / (self._per_second or 1.0)
        return None if self._values is None else self._choice(self._values), bound_s

    def exclude(self) -> bool:
        """Rule out the choice of the last search wherever it needs more bytes than there are; return whether it does.

        That is by less than `_SLACK` and the tolerance of HiGHS.
        """
        return any([*map(self._exclude_in, self._costs.timeline), self._exclude_in_host()])

    def _exclude_in(self, segment: Segment) -> bool:
        sizes = {
            ways[_KEEP]: value.nbytes
            for index in segment.alive
            for value in self._costs.blocks[index].values
            if _KEEP in (ways := self._entries[index].ways.get(value.name, {}))
            if not (segment.holds_casts and value.cached)
        }
        own, own_bytes = ([], 0.0) if segment.running < 0 else self._own(segment)
        return self._cover(sizes, self._problem.budget_bytes - segment.plain_bytes - own_bytes, own)

    def _exclude_in_host(self) -> bool:
        sizes = {
            ways[_OFFLOAD]: value.nbytes
            for block, entry in zip(self._costs.blocks, self._entries, strict=True)
            for value in block.values
            if _OFFLOAD in (ways := entry.ways.get(value.name, {}))
        }
        return self._cover(sizes, math.inf if self._costs.host_bytes is None else self._costs.host_bytes, [])

    def _own(self, segment: Segment) -> tuple[list[int], float]:
        """Return what decides how many bytes the entry that runs adds to a segment, and these bytes."""
        entry, block = self._entries[segment.running], self._costs.blocks[segment.running]
        plain, replay, rerun = segment.bases
        modes = {entry.recorded: replay - plain, entry.again: rerun - plain}
        own = [variable for variable in modes if variable is not None]
        own_bytes = sum(modes[variable] for variable in own if self._is_chosen(variable))
        if segment.is_forward and segment.kept_limit_bytes > 0:
            ways = [
                (entry.ways.get(v.name, {}).get(action), v.nbytes) for v in block.values for action in (_KEEP, _OFFLOAD)
            ]
            held = {way: nbytes for way, nbytes in ways if way is not None}
            own_bytes += min(sum(held[way] for way in held if self._is_chosen(way)), segment.kept_limit_bytes)
            own += held
        return own, own_bytes

    def _cover(self, sizes: Mapping[int, float], room_bytes: float, others: Sequence[int]) -> bool:
        """Add a row if what is chosen has no room: with these others as they are, fewer values must be chosen.

        As few values as have no room together, and all that are as large, make a cover inequality.
        """
        chosen = sorted(filter(self._is_chosen, sizes), key=lambda way: sizes[way])
        more_bytes = math.fsum(sizes[way] for way in chosen) - room_bytes
        if more_bytes <= 0.0:
            return False
        while chosen and sizes[chosen[0]] < more_bytes:
            more_bytes -= sizes[chosen.pop(0)]
        largest = max((sizes[way] for way in chosen), default=math.inf)
        together = {*chosen, *(way for way, nbytes in sizes.items() if nbytes >= largest)}
        slack = len(together) - len(chosen) + 1
        changes = [(variable, slack if self._is_chosen(variable) else -slack) for variable in others]
        upper = len(chosen) - 1 + slack * sum(map(self._is_chosen, others))
        self._program.row([*((way, 1.0) for way in together), *changes], upper=upper)
        return True

    def _is_chosen(self, variable: int) -> bool:
        assert self._values is not None
        return bool(self._values[variable] > 0.5)

    def _choice(self, values: Array) -> Choice:
        actions, rerun = [], []
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


class _Links:
    """What was handed over, copied out, copied back and needed again by the end of the last segment so far.

    Args:
        per_byte, per_second: units of the program.
        gone: per entry, the variable of the bytes that it offloads.
    """

    def __init__(
        self, program: LinearProgram, costs: CostTable, per_byte: float, per_second: float, gone: Sequence[int]
    ) -> None:
        self._program, self._costs, self._gone = program, costs, gone
        self._per_byte, self._per_second = per_byte, per_second
        self._is_backward = False
        self._handed = self._consumed = self._out = self._back = program.variable(0.0)

    def run(self, moment: Moment, recompute: Terms) -> Terms:
        """Add what is moved in a segment; return the bytes that are on their way at its peak.

        Args:
            recompute: seconds that what begins there takes longer.
        """
        row, costs = self._program.row, self._costs
        self._handed, self._consumed = (
            self._program.total([(total, 1.0), *((self._gone[index], 1.0) for index in entries)]) if entries else total
            for total, entries in ((self._handed, moment.handed), (self._consumed, moment.consumed))
        )
        wait: Terms = [(self._program.variable(cost=1.0), 1.0)]
        if not moment.is_backward:
            self._out = self._moved(self._out, costs.d2h_bytes_per_s, moment.seconds, wait)
            row([(self._out, 1.0), (self._handed, -1.0)], upper=0.0)
        else:
            if not self._is_backward:  # all is out
                row([(self._out, 1.0), (self._handed, -1.0)], lower=0.0)
            self._back = self._moved(self._back, costs.h2d_bytes_per_s, 0.0, wait)  # what it needs is back at its begin
            row([(self._back, 1.0), (self._consumed, -1.0)], lower=0.0)
            self._back = self._moved(self._back, costs.h2d_bytes_per_s, moment.seconds, recompute)
            if len(moment.readable) < len(self._gone):
                row([(self._back, 1.0), *((self._gone[index], -1.0) for index in moment.readable)], upper=0.0)
        self._is_backward = moment.is_backward
        return [(self._handed, 1.0), (self._out, -1.0), (self._back, 1.0), (self._consumed, -1.0)]

    def _moved(self, before: int, bytes_per_s: float, seconds: float, longer: Terms) -> int:
        """Add what a link has moved after some seconds, and longer by these terms."""
        rate = bytes_per_s * self._per_byte / self._per_second
        after = self._program.variable()
        slower = [(variable, -rate * factor) for variable, factor in longer]
        self._program.row([(after, 1.0), (before, -1.0), *slower], upper=rate * seconds * self._per_second)
        self._program.row([(after, 1.0), (before, -1.0)], lower=0.0)
        return after
