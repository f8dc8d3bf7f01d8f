"""What the allocator of a device tells of the step in which blocks are profiled, beyond what its forward shows.

NOTE [ The first backward ]

Rule 1. The allocator is read where the forward of a block ends, where backward reaches its output and its input, and
        where backward ends: what is held, what was given out in all, and the peak since the program last started that
        again. The host does not wait. What only a copy holds is not held: where a block ends, its stream waits for
        copies out, so that none holds an input that the program holds as well.
Rule 2. What the peak rises to between the end of the last block and the moment in which backward reaches its output,
        the head needs, with the loss. Where it does not rise, the head is taken to need what its forward and the graph
        show (NOTE [ Gradients that wait ]), but may need up to what was there already, or was given out meanwhile if
        that is less: the difference is in doubt. What else the program does in between, it does in every step.
        Where backward is asked to retain the graph, another one may follow, of which nothing is read: then the head
        needs no less than NOTE [ Loss ] says.
Rule 3. What is held where backward reaches a block, and was not where its forward ended, are gradients: of the output,
        of parameters, and others that wait for what ran before the block, of results that are read past blocks (the
        skips of a UNet). These are there while the block runs backward. What was read ahead is none, nor are outputs
        of the model that the program holds.
Rule 4. What the peak rises to between the moment in which backward reaches the input of a block and that in which it
        reaches the output of the block before, or ends, what runs there needs, with what its kernels need inside of
        them (the convolution that makes patches of an image). Where it does not rise, the graph alone tells: more than
        the peak it cannot be. Where cuDNN looks for the fastest of its kernels, a first step needs more than any other:
        then it tells nothing of this.
Rule 5. From the end of the forward to the moment in which backward reaches the output of the last block, the loss and
        the backward of the head run, no longer watched: neither that nor the head's forward takes longer than this.
Rule 6. Where another forward began before this backward had ended, where backward leaves no gradients in parameters
        (`torch.autograd.grad` returns them), or where there is no such allocator, nothing is known.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from actckpt import _C
from actckpt._blocks.arguments import bytes_of, first_tensor
from actckpt._budget.measuring import MeasuredStep
from actckpt._core import devices
from actckpt._core.subclasses import plain_parts
from actckpt._offload import stores
from actckpt.planner.costs import BlockClass

__all__ = ["FirstStep"]

#: Gradients that wait count from this share of what their block needs: sizes of tensors are rounded.
_SHARE = 0.02


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Bytes at a moment: held, given out so far, the peak, gradients of parameters, and what was read ahead."""

    held: int
    given: int
    peak: int
    gradients: int
    ahead: int
    #: Of the input of the block, which lived when its forward ended, and was moved: it lives no more.
    gone: int = 0


@dataclasses.dataclass(frozen=True)
class _Call:
    """The end of one call of a block, the storage of its input, and the bytes of that and of its output."""

    end: _Reading
    input: weakref.ref[torch.UntypedStorage]
    input_bytes: int
    output_bytes: int


class FirstStep:
    """Readings of the allocator at the blocks of one step (NOTE [ The first backward ])."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._device, self._allocator = device, devices.counting(device)
        self._model, self._parameters = model, list(model.parameters())
        self._calls: list[_Call] = []
        #: By the number of the call: where backward reaches its output, and where it reaches its input.
        self._reached: dict[int, _Reading] = {}
        self._passed: dict[int, _Reading] = {}
        #: The end of the forward, and where backward reaches the last block.
        self._end: devices.Moment | None = None
        self._came: devices.Moment | None = None
        self._is_known = self._allocator is not None
        #: What the head may need beyond what it is taken to need (Rule 2).
        self.doubt_bytes = 0.0

    def block_ends(self) -> None:
        """The forward of a block ends: its stream waits for what is on its way out, which takes time (Rule 1)."""
        if self._is_known:
            stores.limit_windows(self, 0)
            stores.make_room(self._device)
            stores.limit_windows(self, None)

    def block_ended(self, source: torch.Tensor | None, result: Any, output_bytes: int) -> None:
        """The forward of a block has ended.

        Args:
            source: its input.
            output_bytes: of its result, without what it was given beside its input and hands on.
        """
        output = first_tensor(result)
        if not self._is_known or source is None or output is None or not output.requires_grad:
            self._is_known = False
            return
        number, storage = len(self._calls), source.untyped_storage()
        self._calls.append(_Call(self._read(), weakref.ref(storage), storage.nbytes(), output_bytes))
        output.register_hook(lambda _: self._note(number))
        if source.requires_grad:
            source.register_hook(lambda _: self._note_passed(number))

    def _note_passed(self, number: int) -> None:
        if number not in self._passed:
            self._passed[number] = self._read()

    def forward_ended(self) -> None:
        """The forward of the model has ended."""
        if self._is_known:
            self._end = devices.moment(self._device)

    def _note(self, number: int) -> None:
        if number not in self._reached:
            if number == len(self._calls) - 1:
                self._came = devices.moment(self._device)
            call = self._calls[number]
            gone = call.input_bytes if call.input() is None else 0
            self._reached[number] = dataclasses.replace(self._read(), gone=gone)

    def _read(self) -> _Reading:
        assert self._allocator is not None
        inflight_bytes = stores.inflight_bytes(self._device)  # first: asking releases what has passed
        gradients = [part for each in self._parameters if each.grad is not None for part in plain_parts(each.grad)]
        return _Reading(
            held=self._allocator.allocated_bytes(self._device) - inflight_bytes,
            given=self._allocator.given_bytes(self._device),
            peak=self._allocator.peak_bytes(self._device),
            gradients=bytes_of(gradients),
            ahead=_C.read_ahead_bytes(),
        )

    def disturb(self) -> None:
        """Another forward begins (Rule 6)."""
        self._is_known = False

    def completed(self, measured: MeasuredStep, held_bytes: float, *, is_retained: bool) -> MeasuredStep:
        """Return what was measured of the step with what these readings show, once its backward has ended.

        Args:
            held_bytes: of the model's outputs that the program holds, and of what it computed from them.
            is_retained: backward was asked to retain the graph.
        """
        ended = self._read() if self._is_known else None
        self._parameters = []
        if ended is None or not len(self._reached) == len(self._calls) > 0 or not self._reached[0].gradients:
            return measured
        pending = self._pending_bytes(measured)
        needed = [block.working_set_bytes for block in measured.costs.blocks]
        needed[-1] = max(self._head_bytes(needed[-1]), needed[-1] if is_retained else 0.0)
        places = [place for place, name in enumerate(measured.names) if name is not None]
        for number, (place, known) in enumerate(zip(places, measured.waiting_bytes, strict=True)):
            waiting = self._waiting_bytes(number) - held_bytes - known - pending[place]
            if waiting > _SHARE * needed[place]:
                needed[place] += waiting
            # What runs before it has an entry of its own, or counts with the block; outputs do not count in the stem.
            before = place - (measured.names[place - 1] is None)
            counted = held_bytes + pending[places[number - 1]] if number else -held_bytes
            needed[before] = max(needed[before], self._bytes_before(number, ended) - counted)
        costs = measured.needing(needed).costs
        classes = {**costs.classes, costs.stack[-1]: self._timed(costs.blocks[-1])}
        return dataclasses.replace(measured, costs=dataclasses.replace(costs, classes=classes), loss_more_bytes=0.0)

    def _timed(self, head: BlockClass) -> BlockClass:
        """Return the head with no more seconds than it can take (Rule 5)."""
        if self._end is None or self._came is None:
            return head
        most_s = devices.seconds_between(self._end, self._came)
        return dataclasses.replace(head, forward_s=min(head.forward_s, most_s), backward_s=min(head.backward_s, most_s))

    def _pending_bytes(self, measured: MeasuredStep) -> list[int]:
        """Return per entry of the stack gradients of parameters that one after it reads, and it or one before it."""
        parameters, _ = measured.parameters_in(self._model)
        first: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}
        for place, each in enumerate(parameters):
            for parameter in each:
                first.setdefault(id(parameter), place)
                last[id(parameter)] = place, bytes_of(plain_parts(parameter.detach())) * parameter.requires_grad
        found = [0] * len(parameters)
        for key, (end, nbytes) in last.items():
            for place in range(first[key], end):
                found[place] += nbytes
        return found

    def _head_gradient_bytes(self) -> int:
        """Return the bytes of gradients of parameters that backward leaves before it comes to the last block."""
        return max(self._reached[len(self._calls) - 1].gradients - self._calls[-1].end.gradients, 0)

    def _head_bytes(self, expected: float) -> float:
        """Return what the head needs (Rule 2), without gradients that it leaves in parameters."""
        call, reached = self._calls[-1], self._reached[len(self._calls) - 1]
        if reached.peak < call.end.peak:  # the program started it again
            return expected
        gradients = self._head_gradient_bytes()
        most = max(reached.peak - (call.end.held - call.output_bytes - reached.gone) - gradients, 0)
        if reached.peak == call.end.peak:
            most = min(most, call.output_bytes + reached.given - call.end.given - gradients)
            self.doubt_bytes = max(most - expected, 0.0)
        return most - self.doubt_bytes

    def _bytes_before(self, number: int, ended: _Reading) -> float:
        """Return what is needed in backward by what runs before a block (Rule 4), 0 where that is not known."""
        begun, until = self._passed.get(number), self._reached[number - 1] if number else ended
        if begun is None or until.peak <= begun.peak or torch.backends.cudnn.benchmark:
            return 0.0
        if number:
            call = self._calls[number - 1]
            held = call.end.held - call.output_bytes - until.gone + until.gradients - call.end.gradients
        else:
            held = until.held  # gradients, and what is there in the next step
        return until.peak - held - until.ahead

    def _waiting_bytes(self, number: int) -> int:
        """Return what waits while a block runs backward (Rule 3)."""
        end, reached = self._calls[number].end, self._reached[number]
        return reached.held - (end.held - reached.gone) - (reached.gradients - end.gradients) - reached.ahead
