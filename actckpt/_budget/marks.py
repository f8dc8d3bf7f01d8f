"""Marks of a step: when blocks begin and end, and what is alive then; and what runs outside of blocks, from marks."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from actckpt._blocks.arguments import first_tensor, others
from actckpt._budget.workspaces import NumberedStorages
from actckpt._core import devices
from actckpt._core.storages import storages_of, tensors_in
from actckpt.planner.costs import BlockClass, Value

__all__ = [
    "Mark",
    "Marks",
    "Outside",
    "begins",
    "between",
    "held_after",
    "last_end",
    "outside_bytes",
    "outside_seconds",
]

#: Name of the value that stands for what the stem leaves.
_HELD = "(made outside of the blocks)"


@dataclasses.dataclass(frozen=True)
class Outside:
    """What runs outside of blocks, before the first, after the last, or between two: seconds, and bytes."""

    forward_s: float
    backward_s: float
    working_set_bytes: float
    held_bytes: float = 0.0
    gradient_bytes: float = 0.0
    #: Parameters that FSDP2 gathers for the block after it.
    gathered_bytes: float = 0.0

    def counts_before(self, block: BlockClass) -> bool:
        """Return whether it changes what a plan needs, if it runs right before a block."""
        return self.held_bytes > 0.0 or self.working_set_bytes > block.working_set_bytes

    def with_gradients(self, nbytes: int) -> Outside:
        """Return it with gradients that wait while it runs backward."""
        return dataclasses.replace(self, working_set_bytes=self.working_set_bytes + nbytes)

    def block_class(self) -> BlockClass:
        """Return it as a class of blocks."""
        held = (Value(_HELD, self.held_bytes, offloadable=False, replayable=False),) if self.held_bytes else ()
        return BlockClass(self.forward_s, self.backward_s, self.working_set_bytes, self.gradient_bytes, held)


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment of a step: `"forward"` of a block begins, `"end"`s, or `"backward"` reaches its output."""

    what: str
    #: Which call of a block in the step, counted from 0; -1: none.
    call: int
    moment: devices.Moment
    live_bytes: int
    #: Most bytes alive since the mark before.
    peak_bytes: int
    #: Of the block's input where its forward begins, as far as that is new with it; where it ends, of what it made and
    #: returns.
    nbytes: int = 0
    #: Of the parameters of a block that begins, which FSDP2 has gathered.
    gathered_bytes: int = 0
    #: Of what lives, that which lives on when the forward has ended, but for the `nbytes`; and that which does not, but
    #: for inputs of blocks, which were moved then.
    lasting_bytes: int = 0
    passing_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Unsettled:
    """What is known of a mark before the forward has ended."""

    #: How many storages had been made.
    num_made: int
    #: Of what has the `nbytes`.
    storages: list[weakref.ref[torch.UntypedStorage]]
    #: Of inputs of blocks that had ended by then: how many there are, and the bytes of those that lived.
    num_inputs: int
    input_bytes: int


class Marks:
    """Takes down marks of one step on a device.

    Args:
        live: what counts, None: only times are asked for.
    """

    def __init__(self, live: NumberedStorages | None, device: torch.device) -> None:
        self._live, self._device = live, device
        self.found: list[Mark] = []
        self._unsettled: list[_Unsettled] = []
        #: Of inputs of blocks that ran with gradients: they may be moved.
        self._inputs: list[weakref.ref[torch.UntypedStorage]] = []
        #: Of all that blocks are given, which reruns hold to the end, until the forward has ended.
        self._given: list[torch.UntypedStorage] = []
        #: How many storages were made before the last call began, and by when it ended; and what it returned.
        self._num_begun = self._num_ended = 0
        self._begun: list[weakref.ref[torch.UntypedStorage]] = []
        self._returned: list[weakref.ref[torch.UntypedStorage]] = []

    def begins(self, call: int, arguments: Any, gathered_bytes: int = 0) -> None:
        """Take down that the forward of a block begins with arguments.

        New is what was made after the block before had ended, or returned by that (NOTE [ Measuring a step ], Rule 6).
        """
        new: list[torch.UntypedStorage] = []
        if self._live is not None:
            since, returned = self._num_ended, set(map(id, _alive(self._returned)))
            own = {id(storage): storage for storage in storages_of(first_tensor(arguments))}.values()
            new = [each for each in own if id(each) in returned or self._live.has_made(each, since=since)]
            self._num_begun = self._live.num_made
        self._begun = list(map(weakref.ref, new))
        self.note("forward", call, new, gathered_bytes)

    def ends(self, call: int, arguments: Any, result: Any) -> int:
        """Take down that the forward of a block has ended; return the bytes of what it made and returns."""
        if self._live is not None and any(tensor.requires_grad for tensor in tensors_in(result)):
            self._inputs += self._begun
            self._given += storages_of(others(arguments))
        made: list[torch.UntypedStorage] = []
        if self._live is not None:
            own = {id(storage): storage for storage in storages_of(list(tensors_in(result)))}.values()
            made = [each for each in own if self._live.has_made(each, since=self._num_begun)]
            self._num_ended, self._returned = self._live.num_made, list(map(weakref.ref, made))
        self.note("end", call, made)
        return self.found[-1].nbytes

    def note(
        self, what: str, call: int = -1, storages: Sequence[torch.UntypedStorage] = (), gathered_bytes: int = 0
    ) -> None:
        """Take down a mark."""
        live_bytes = peak_bytes = 0
        if self._live is not None:
            live_bytes, peak_bytes = self._live.live_bytes, self._live.peak_bytes
            self._live.reset_peak()
            refs = [weakref.ref(storage) for storage in storages]
            num_inputs, input_bytes = len(self._inputs), _nbytes(self._inputs)
            self._unsettled.append(_Unsettled(self._live.num_made, refs, num_inputs, input_bytes))
        moment, nbytes = devices.moment(self._device), sum(storage.nbytes() for storage in storages)
        self.found.append(Mark(what, call, moment, live_bytes, peak_bytes, nbytes, gathered_bytes))

    def settle(self) -> None:
        """The forward has ended: take down what lives on.

        Of parameters that FSDP2 gathers and releases again backward needs as much: where it does, all lives on.
        """
        if self._live is None:
            return
        made_by, is_gathered = self._live.made_by(), any(mark.gathered_bytes for mark in self.found)
        for number, (mark, known) in enumerate(zip(self.found, self._unsettled, strict=True)):
            moved = known.input_bytes - _nbytes(self._inputs[: known.num_inputs])
            below = mark.live_bytes - mark.nbytes - moved
            lasting = below if is_gathered else made_by(known.num_made) - _nbytes(known.storages)
            self.found[number] = dataclasses.replace(mark, lasting_bytes=lasting, passing_bytes=max(below - lasting, 0))
        self._given.clear()


def _alive(storages: Iterable[weakref.ref[torch.UntypedStorage]]) -> list[torch.UntypedStorage]:
    return [storage for each in storages if (storage := each()) is not None]


def _nbytes(storages: Iterable[weakref.ref[torch.UntypedStorage]]) -> int:
    return sum(storage.nbytes() for storage in _alive(storages))


def outside_seconds(marks: list[Mark], num_calls: int) -> list[tuple[float, float]]:
    """Return forward and backward seconds of stem and head; so many calls of blocks are between them."""
    stem, head = [0.0, 0.0], [0.0, 0.0]
    for mark, after in itertools.pairwise(marks):
        seconds = devices.seconds_between(mark.moment, after.moment)
        if mark.what in ("start", "stem", "done"):  # done: of the optimizer, which ends the step
            stem[mark.what != "start"] += seconds
        elif mark.what == "end" and mark.call == num_calls - 1:
            head[1] += seconds
    return [(stem[0], stem[1]), (head[0], head[1])]


def outside_bytes(marks: list[Mark], num_calls: int, backward_bytes: Sequence[int]) -> tuple[Outside, Outside]:
    """Return what stem and head need, without their seconds.

    Args:
        backward_bytes: by position, the most that was found to live while backward runs there (`Read`).
    """
    first, last = begins(marks)[0], last_end(marks, num_calls)
    stem_peak = head_peak = 0
    for mark, after in itertools.pairwise(marks):
        if mark.what in ("start", "stem"):
            stem_peak = max(stem_peak, after.peak_bytes)
        elif mark is last:
            head_peak = after.peak_bytes
    stem_peak, head_peak = max(stem_peak, backward_bytes[0]), max(head_peak, backward_bytes[-1])
    head_bytes = head_peak - last.lasting_bytes  # the last output is the head's own
    stem = Outside(0.0, 0.0, float(stem_peak), float(max(first.lasting_bytes, 0)))
    return stem, Outside(0.0, 0.0, float(max(head_bytes, 0)))


def begins(marks: list[Mark]) -> list[Mark]:
    """Return where forwards of blocks begin, in their order."""
    return [mark for mark in marks if mark.what == "forward"]


def last_end(marks: list[Mark], num_calls: int) -> Mark:
    """Return the mark at which the last block ended."""
    return next(mark for mark in marks if mark.what == "end" and mark.call == num_calls - 1)


def held_after(marks: list[Mark], num_calls: int) -> int:
    """Return what is held at the last mark of what ran after the last block."""
    return marks[-1].lasting_bytes - last_end(marks, num_calls).lasting_bytes


def _pairs(marks: list[Mark], num_calls: int) -> list[tuple[Mark, Mark]]:
    """Return for each two calls of blocks in a row where the former ends and the latter begins."""
    starts = {mark.call: mark for mark in begins(marks)}
    ends = {mark.call: mark for mark in marks if mark.what == "end"}
    return [(ends[call], starts[call + 1]) for call in range(num_calls - 1)]


def between(marks: list[Mark], num_calls: int, backward_bytes: Sequence[int]) -> list[Outside]:
    """Return for each two calls of blocks in a row what runs between them, without its seconds."""
    found = []
    for (end, begin), backward in zip(_pairs(marks, num_calls), backward_bytes[2:-1:2], strict=True):
        held = max(begin.lasting_bytes - end.lasting_bytes, 0)
        needed = float(max(max(begin.peak_bytes, backward) - end.lasting_bytes, 0))  # with the output of the former
        gathered = min(begin.gathered_bytes, held)
        found.append(Outside(0.0, 0.0, needed, float(held - gathered), gathered_bytes=float(gathered)))
    return found
