"""One training step under a plan, played through as it happens: `simulate`.

Shares no code with the solver, so that each checks the other: where the solver takes a step block by block, from
formulas, here compute, both links and the disk run side by side, from one event to the next. Copies move bytes one
value after the other and free them as they go: out in the order in which blocks end, back in the order of backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, CostTable, as_cost_table
from actckpt.planner.plans import Plan

__all__ = ["InFlight", "Simulation", "Span", "simulate"]

#: Bytes that differ by less than this share of all are the same.
_ROUNDING = 1e-12
#: A wait that ends this share of memory too late or too early, as moments are rounded, ends in time.
_LATE = 1e-9


class InFlight(NamedTuple):
    """Most bytes of other blocks on their way while a block runs."""

    #: Of blocks before it, on their way out when its forward ends.
    out_bytes: float
    #: Of blocks before it, brought back ahead while it runs backward.
    ahead_bytes: float


class Span(NamedTuple):
    """Something that took a while, in seconds since the step began."""

    start_s: float
    end_s: float
    #: What: `"forward"`, `"wait"`, `"recompute"`, `"backward"`, or the name of the value that was copied.
    what: str
    #: Number of the block in the stack.
    block: int


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a step came to. Times are in seconds, sizes in bytes."""

    #: Of the whole step.
    seconds: float
    #: Over a step in which everything is kept: computing again, with what recording and offloading take, and waiting
    #: for copies out and back.
    overhead_seconds: float
    recompute_seconds: float
    write_wait_seconds: float
    read_wait_seconds: float
    peak_bytes: float
    #: In words: at the end of which block's forward or backward.
    peak_at: str
    #: Bytes beyond the plan's budget, the table's capacity, host memory and disk, at the worst moment; 0: it fits.
    excess_bytes: float
    host_peak_bytes: float
    disk_peak_bytes: float
    #: For each block of the stack.
    inflight: tuple[InFlight, ...]
    #: Moments and bytes in memory at them; straight lines between.
    memory: tuple[tuple[float, float], ...]
    compute: tuple[Span, ...]
    #: Copies from device to host and back, and from host to disk and back.
    d2h: tuple[Span, ...]
    h2d: tuple[Span, ...]
    disk_write: tuple[Span, ...]
    disk_read: tuple[Span, ...]

    @property
    def wait_seconds(self) -> float:
        """Seconds in which nothing was computed."""
        return self.write_wait_seconds + self.read_wait_seconds

    @property
    def fits(self) -> bool:
        """Whether no limit was exceeded."""
        return self.excess_bytes == 0.0


def simulate(costs: CostTable | Mapping[str, Any], plan: Plan) -> Simulation:
    """Play through one step of a plan.

    A block waits where there would be no room at its end, or where values that it needs are not back; copies back begin
    as early as the room up to their use allows, and no more than `plan.max_inflight` bytes ahead.

    Args:
        costs: a cost table, or plain data for `CostTable.from_dict`; it may be another one than the plan was made of.
    Raises:
        ValueError: the plan is one of another stack, or leaves out what backward needs.
    """
    table = as_cost_table(costs)
    step = _Step(table, plan)
    step.run()
    return step.result()


class _Pipe:
    """Bytes that flow through two links with a buffer between them: device, host, disk, or the way back.

    Args:
        rates: bytes per second of the first and the second link.
        limits: most bytes that each may move by now.
        buffered: bytes in the buffer at first.
        room: most bytes in the buffer.
    """

    def __init__(self, rates: Sequence[float], limits: Sequence[float], *, buffered: float, room: float) -> None:
        self.rates, self.limits = rates, list(limits)
        self.buffered = self.most_buffered = buffered
        self.room = max(room, buffered)
        #: By each link, by now.
        self.moved = [0.0, 0.0]
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


def _recompute_seconds(block: BlockClass, actions: Mapping[str, Action], rerun: bool, where: str) -> float:
    """Return how long it takes to get back what was dropped, and to hand over what is offloaded.

    Reads values backward: what uses a value comes first.
    """
    wanted = {value.name for value in block.values if value.needed} if not rerun else {BLOCK_INPUT}
    is_recorded = not rerun and block.is_recorded(actions[value.name] for value in block.values)
    seconds = block.rerun_seconds if rerun else block.recording_s * is_recorded
    for value in reversed(block.values):
        if actions[value.name] is Action.OFFLOAD:
            seconds += value.offload_s
        if value.name in wanted and actions[value.name] is Action.RECOMPUTE:
            if not value.replayable:
                raise ValueError(f"{where} drops {value.name!r}, which backward needs and nothing can compute again.")
            seconds += value.recompute_s
            wanted.update(value.inputs)
    return seconds


class _Block:
    """What a plan does in one block of the stack.

    Args:
        following: what it does with the next input after that of the block, None: there is none.
    """

    def __init__(self, index: int, block: BlockClass, plan: Plan, following: Action | None) -> None:
        actions, where = plan.actions[index], f"Block {index} of the plan"
        names = [value.name for value in block.values]
        if set(actions) != set(names):
            other = sorted(set(actions) ^ set(names))[0]
            side = "the cost table does not know" if other in actions else "the plan leaves out"
            raise ValueError(f"{where} is of another model: {side} its value {other!r}. Make a plan for this table.")
        if plan.rerun[index] and not block.rerun:
            raise ValueError(f"{where} is run again as a whole, which its class does not allow (rerun).")
        self.index, self.costs = index, block
        elsewhere = {value.name for value in block.values if value.next_input and following is Action.KEEP}
        kept = (value for value in block.values if actions[value.name] is Action.KEEP)
        self.kept = sum(value.nbytes for value in kept if value.name not in elsewhere)
        self.offloaded = [(value.name, value.nbytes) for value in block.values if actions[value.name] is Action.OFFLOAD]
        self.recompute_s = _recompute_seconds(block, actions, plan.rerun[index], where)
        is_all_kept = all(actions[value.name] is Action.KEEP for value in block.values if value.needed)
        replay_bytes = 0.0 if is_all_kept else block.recompute_bytes
        self.recompute_bytes = block.rerun_bytes if plan.rerun[index] else replay_bytes


class _Step:
    """The step as it goes."""

    def __init__(self, costs: CostTable, plan: Plan) -> None:
        if len(plan.actions) != len(costs.stack):
            raise ValueError(
                f"The plan has {len(plan.actions)} blocks, the cost table {len(costs.stack)}: it is of another model."
            )
        self.costs, self.plan = costs, plan
        inputs = [actions.get(BLOCK_INPUT) for actions in plan.actions]
        self.blocks = [
            _Block(index, block, plan, next(filter(None, inputs[index + 1 :]), None))
            for index, block in enumerate(costs.blocks)
        ]
        self.queue = [(name, size, block.index) for block in self.blocks for name, size in block.offloaded]
        self.total = sum(size for _, size, _ in self.queue)
        if self.total and not (costs.d2h_bytes_per_s and costs.h2d_bytes_per_s):
            raise ValueError("The plan offloads values, but the cost table has no d2h_bytes_per_s or h2d_bytes_per_s.")
        self.rounding = _ROUNDING * self.total
        self.now = 0.0
        self.compute: list[Span] = []
        self.memory: list[tuple[float, float]] = []
        self.peak, self.peak_at, self.excess = -1.0, "", 0.0
        self.out_bytes: list[float] = []
        self.ahead_bytes: list[float] = []
        self._stores()

    def _stores(self) -> None:
        """Find out what goes on to the disk: what host memory has no room for."""
        costs = self.costs
        host = math.inf if costs.host_bytes is None else costs.host_bytes
        beyond = max(self.total - host, 0.0)
        disk_rates = costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s
        self.on_disk = min(beyond, costs.disk_bytes) if min(disk_rates) > 0.0 else 0.0
        lost = beyond - self.on_disk
        self.excess = lost if lost > self.rounding else 0.0
        self.host = host + lost  # it is put there all the same
        self.out = _Pipe((costs.d2h_bytes_per_s, disk_rates[0]), (0.0, self.on_disk), buffered=0.0, room=self.host)

    def run(self) -> None:
        """Run all blocks forward, then all backward."""
        kept = gone = 0.0
        for block in self.blocks:
            self._forward(block, kept, gone)
            kept += block.kept
            gone += sum(size for _, size in block.offloaded)
        self.turn_s = self.now
        self.back = _Pipe(
            (self.costs.disk_read_bytes_per_s, self.costs.h2d_bytes_per_s),
            (self.on_disk, 0.0),
            buffered=self.total - self.on_disk,
            room=self.host,
        )
        self._backward_all()

    def _capacity(self, index: int, backward: bool) -> float:
        limits = self.costs.capacity_bytes
        if limits is None:
            return self.plan.budget_bytes
        return min(self.plan.budget_bytes, (limits.backward if backward else limits.forward)[index])

    def _span(self, seconds: float, what: str, block: int) -> None:
        if seconds > 0.0:
            self.compute.append(Span(self.now - seconds, self.now, what, block))

    def _remember(self, nbytes: float, capacity: float, room: float, at: str) -> None:
        """Note what is in memory; `room` is what would be left with all copies at their best."""
        if room < -_ROUNDING * capacity:
            self.excess = max(self.excess, -room)
        elif capacity < nbytes < capacity * (1 + _LATE):
            nbytes = capacity
        self.memory.append((self.now, nbytes))
        if nbytes > self.peak:
            self.peak, self.peak_at = nbytes, at

    def _forward(self, block: _Block, kept: float, gone: float) -> None:
        """Run a block forward; then wait until there is room, and at the turn until everything is out."""
        self.out.limits[0] = gone
        self.now = self.out.run(self.now, block.costs.forward_s)
        self._span(block.costs.forward_s, "forward", block.index)
        capacity = self._capacity(block.index, False)
        base = self.costs.fixed_bytes + block.costs.working_set_bytes + kept
        room = capacity - base
        target = gone if block is self.blocks[-1] else min(max(gone - min(room, self.plan.max_inflight), 0.0), gone)
        self.out_bytes.append(gone - target)
        began = self.now
        self.now = self.out.wait(self.now, 0, target, self.rounding)
        self._span(self.now - began, "wait", block.index)
        self._remember(base + gone - self.out.moved[0], capacity, room, f"forward of block {block.index}")

    def _backward_all(self) -> None:
        """Run all blocks backward, reading ahead as far as this and every later moment has room."""
        kept, gone, most, plans = 0.0, 0.0, math.inf, []
        gradients = sum(block.costs.gradient_bytes for block in self.blocks)
        for block in self.blocks:
            base = self.costs.fixed_bytes + block.costs.working_set_bytes + block.recompute_bytes + gradients + kept
            room = self._capacity(block.index, True) - base
            needed = self.total - gone
            most = min(most, needed + max(min(room, self.plan.max_inflight), 0.0))
            self.ahead_bytes.append(most - needed)
            plans.append((block, base, room, needed, most))
            kept += block.kept
            gone += sum(size for _, size in block.offloaded)
            gradients -= block.costs.gradient_bytes
        for block, base, room, needed, most in reversed(plans):
            self.back.limits[1] = min(most, self.total)
            self._backward(block, base, room, needed)

    def _backward(self, block: _Block, base: float, room: float, needed: float) -> None:
        """Wait until what a block needs is back, and run it backward."""
        capacity, at = self._capacity(block.index, True), f"backward of block {block.index}"
        began = self.now
        self.now = self.back.wait(self.now, 1, needed, self.rounding)
        self._span(self.now - began, "wait", block.index)
        self._remember(base + max(self.back.moved[1] - needed, 0.0), capacity, room, at)
        for seconds, what in ((block.recompute_s, "recompute"), (block.costs.backward_s, "backward")):
            self.now = self.back.run(self.now, seconds)
            self._span(seconds, what, block.index)
        self._remember(base + max(self.back.moved[1] - needed, 0.0), capacity, room, at)

    def result(self) -> Simulation:
        """Return what the step came to."""
        waits = [(span.end_s - span.start_s, span.end_s <= self.turn_s) for span in self.compute if span.what == "wait"]
        recompute_s = sum(block.recompute_s for block in self.blocks)
        out, back = self.queue, self.queue[::-1]
        return Simulation(
            seconds=self.now,
            overhead_seconds=recompute_s + sum(seconds for seconds, _ in waits),
            recompute_seconds=recompute_s,
            write_wait_seconds=sum(seconds for seconds, forward in waits if forward),
            read_wait_seconds=sum(seconds for seconds, forward in waits if not forward),
            peak_bytes=self.peak,
            peak_at=self.peak_at,
            excess_bytes=self.excess,
            host_peak_bytes=max(self.out.most_buffered, self.back.most_buffered),
            inflight=tuple(map(InFlight, self.out_bytes, self.ahead_bytes)),
            disk_peak_bytes=self.on_disk,
            memory=tuple(self.memory),
            compute=tuple(self.compute),
            d2h=_copies(self.out.traces[0], out, 0.0),
            h2d=_copies(self.back.traces[1], back, 0.0),
            disk_write=_copies(self.out.traces[1], out, 0.0),
            disk_read=_copies(self.back.traces[0], back, self.total - self.on_disk),
        )


def _copies(
    trace: Sequence[tuple[float, float]], queue: Iterable[tuple[str, float, int]], skipped: float
) -> tuple[Span, ...]:
    """Return when each value was copied, from what a link had moved when.

    Args:
        trace: moments and bytes; bytes only grow.
        queue: name, bytes and block of the values in the order in which they are copied.
        skipped: bytes at the front of the queue that do not go over this link.
    """
    spans: list[Span] = []
    moved, begin = -skipped, 0
    for name, size, block in queue:
        first, moved = max(moved, 0.0), moved + size
        while begin + 1 < len(trace) and trace[begin + 1][1] <= first:
            begin += 1
        if moved <= 0.0 or begin + 1 >= len(trace):
            continue
        end = begin
        while end + 2 < len(trace) and trace[end + 1][1] < moved:
            end += 1
        spans.append(Span(_moment(trace, begin, first), _moment(trace, end, moved), name, block))
    return tuple(spans)


def _moment(trace: Sequence[tuple[float, float]], index: int, moved: float) -> float:
    """Return when that much had been moved, on the line that begins at an index."""
    (start_s, start), (end_s, end) = trace[index], trace[index + 1]
    share = (moved - start) / (end - start) if end > start else 0.0
    return start_s + (end_s - start_s) * min(max(share, 0.0), 1.0)
