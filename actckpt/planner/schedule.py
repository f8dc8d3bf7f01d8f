"""How long copies of given actions make a step wait, and what they leave in memory. See NOTE [ Formulation ].

NOTE [ Formulation ]

Blocks l = 1..L run forward, then L..1 backward. K_l and O_l are the bytes kept and offloaded by blocks 1..l, and
Q_l = O_L - O_(l-1) what of it blocks l..L need back. D counts bytes written out, P bytes brought back:

    write-out   D_l <= O_(l-1),  D_l <= D_(l-1) + d2h (forward_l + wait_l),  D_L = O_(L-1): out before backward begins
    forward     K_(l-1) + O_(l-1) - D_l + working set_l <= capacity, at the end of block l
    read-back   P'_l <= P_l + h2d (recompute_l + backward_l),  P_(l-1) <= P'_l + h2d wait'_(l-1),  P_l >= Q_l
    backward    K_(l-1) + P'_l - Q_l + working set_l + recompute bytes_l <= capacity
    host        O_L <= host bytes; with a disk, W <= D of them go on to it and R <= W come back, on links of its own,
                so that D - W <= host bytes and O - W + R - P <= host bytes at any time

The working set holds the block's own values, so its actions count for other blocks only, and the last block offloads
nothing. Where something of a block is not kept, recompute_l has recording_l, and recompute bytes_l count: those of a
rerun where it is run again. The step takes its plain seconds and the sum of recompute_l, wait_l and wait'_l.

For given actions, writing as early as it can and waiting as late as it can is best, and so is reading back as early as
the room of this and of all later moments allows; what goes to the disk is what the host has no room for.
"""

from __future__ import annotations

import dataclasses

import numpy

from actckpt.planner.problem import Array, Problem

__all__ = ["Schedule", "evaluate"]

#: Sums of bytes of another order may differ by this share.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What candidates come to. The first axis is the candidate, the second the block."""

    recompute_s: Array
    write_wait_s: Array
    read_wait_s: Array
    #: Bytes in memory while each block runs.
    forward_bytes: Array
    backward_bytes: Array
    #: Bytes that wait to be written out, and that were read back ahead of the block that needs them.
    backlog_bytes: Array
    ahead_bytes: Array
    #: Per candidate: bytes beyond what there is, on the device and elsewhere.
    excess_bytes: Array

    @property
    def overhead_s(self) -> Array:
        """Seconds over plain training, per candidate."""
        seconds: Array = (self.recompute_s + self.write_wait_s + self.read_wait_s).sum(axis=1)
        return seconds

    @property
    def peak_bytes(self) -> Array:
        """Bytes in memory at the worst moment, per candidate."""
        nbytes: Array = numpy.maximum(self.forward_bytes, self.backward_bytes).max(axis=1)
        return nbytes


def evaluate(problem: Problem, footprints: Array, windows: Array | None = None) -> Schedule:
    """Return what candidates come to.

    Args:
        footprints: kept bytes, offloaded bytes, recompute seconds and recompute bytes, of shape (candidate, block, 4).
        windows: most bytes that wait to be written out, and most bytes read ahead, per candidate; None: no limit.
    """
    kept, offloaded, recompute_s, recompute_bytes = (numpy.ascontiguousarray(footprints[..., i]) for i in range(4))
    run = _Run(problem, kept, offloaded, recompute_s, recompute_bytes, windows)
    run.forward()
    run.backward()
    return run.schedule()


class _Run:
    """One step of every candidate, block by block. Arrays are (block, candidate), or (candidate)."""

    def __init__(
        self,
        problem: Problem,
        kept: Array,
        offloaded: Array,
        recompute_s: Array,
        recompute_bytes: Array,
        windows: Array | None,
    ) -> None:
        costs = problem.costs
        self.problem, self.costs = problem, costs
        self.recompute_s = recompute_s.T
        self.num_blocks, self.num = self.recompute_s.shape
        self.kept = _before(kept.T)
        self.backward_base = problem.backward_base[:, None] + recompute_bytes.T
        self.offloaded = _before(offloaded.T)
        self.total = offloaded.sum(axis=1)
        self.needed_back = self.total - self.offloaded
        self.window = numpy.inf if windows is None else windows
        self.host = host = self.total if costs.host_bytes is None else numpy.full(self.num, float(costs.host_bytes))
        with_disk = min(costs.disk_bytes, costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s) > 0
        self.to_disk = numpy.maximum(self.total - host, 0.0)
        self.on_host = self.total - self.to_disk
        self.any_on_disk = bool((self.to_disk > 0.0).any())
        lost = numpy.maximum(self.to_disk - (costs.disk_bytes if with_disk else 0.0), 0.0)
        self.forward_room = (problem.forward_capacity - problem.forward_base)[:, None] - self.kept
        self.backward_room = problem.backward_capacity[:, None] - self.backward_base - self.kept
        over = -numpy.minimum(self.forward_room, self.backward_room)
        over[over <= _ROUNDING * (self.backward_base + self.kept)] = 0.0
        self.excess = over.max(axis=0) + lost * (lost > _ROUNDING * self.total)
        self.written, self.read, self.write_wait, self.read_wait = (
            numpy.zeros((self.num_blocks, self.num)) for _ in range(4)
        )
        self.invert = [_inverse(rate) for rate in (costs.d2h_bytes_per_s, costs.h2d_bytes_per_s)]
        self.invert += [_inverse(rate) for rate in (costs.disk_write_bytes_per_s, costs.disk_read_bytes_per_s)]

    def forward(self) -> None:
        """Write out while the forward runs, and wait where there is no room."""
        last = self.num_blocks - 1
        room = numpy.minimum(self.forward_room, self.window)
        targets = numpy.minimum(numpy.maximum(self.offloaded - room, 0.0), self.offloaded)
        targets[last] = self.offloaded[last]
        out = disk = numpy.zeros(self.num)
        for index, block in enumerate(self.problem.blocks):
            target = targets[index]
            wait = (target - out) * self.invert[0] - block.forward_s
            if self.any_on_disk:
                wait = numpy.maximum(wait, (target - self.host - disk) * self.invert[2] - block.forward_s)
            self.write_wait[index] = wait = numpy.maximum(wait, 0.0)
            duration = wait + block.forward_s
            out = numpy.minimum(out + self.costs.d2h_bytes_per_s * duration, self.offloaded[index])
            if self.any_on_disk:
                disk = numpy.minimum(disk + self.costs.disk_write_bytes_per_s * duration, self.to_disk)
                out = numpy.minimum(out, self.host + disk)
                disk = numpy.minimum(disk, out)
            self.written[index] = out = numpy.maximum(out, target)  # but for rounding it is there

    def backward(self) -> None:
        """Read back while the backward runs, as far as there is room, and wait for what a block needs."""
        costs = self.costs
        most = numpy.minimum(self.backward_room, self.window).clip(min=0.0) + self.needed_back
        most = numpy.minimum(numpy.minimum.accumulate(most, axis=0), self.total)
        back = disk = numpy.zeros(self.num)
        spare = self.host - self.on_host
        for index in reversed(range(self.num_blocks)):
            needed = self.needed_back[index]
            wait = numpy.maximum((needed - back) * self.invert[1], 0.0)
            if self.any_on_disk:
                wait = numpy.maximum(wait, (needed - self.on_host - disk) * self.invert[3])
                disk = numpy.minimum(disk + costs.disk_read_bytes_per_s * wait, numpy.maximum(back, needed) + spare)
            self.read_wait[index] = wait
            back = numpy.maximum(back, needed)  # what it waited for, and no more
            duration = self.recompute_s[index] + self.problem.blocks[index].backward_s
            end = numpy.minimum(back + costs.h2d_bytes_per_s * duration, most[index])
            if self.any_on_disk:
                disk = numpy.minimum(disk + costs.disk_read_bytes_per_s * duration, self.to_disk)
                end = numpy.minimum(end, self.on_host + disk)
            self.read[index] = back = numpy.maximum(end, back)
            if self.any_on_disk:
                disk = numpy.minimum(disk, back + spare)

    def schedule(self) -> Schedule:
        """Return what came of it."""
        base = self.problem.forward_base[:, None], self.backward_base
        backlog, ahead = self.offloaded - self.written, self.read - self.needed_back
        forward, backward = base[0] + self.kept + backlog, base[1] + self.kept + ahead
        fits = self.excess == 0.0  # then what is beyond capacity is rounding
        forward = numpy.where(fits, numpy.minimum(forward, self.problem.forward_capacity[:, None]), forward)
        backward = numpy.where(fits, numpy.minimum(backward, self.problem.backward_capacity[:, None]), backward)
        return Schedule(
            recompute_s=self.recompute_s.T,
            write_wait_s=self.write_wait.T,
            read_wait_s=self.read_wait.T,
            forward_bytes=forward.T,
            backward_bytes=backward.T,
            backlog_bytes=backlog.T,
            ahead_bytes=ahead.T,
            excess_bytes=self.excess,
        )


def _before(values: Array) -> Array:
    """Return sums over the blocks before each."""
    sums: Array = numpy.cumsum(values, axis=0)
    return sums - values


def _inverse(rate: float) -> float:
    return 1.0 / rate if rate > 0 else 0.0
