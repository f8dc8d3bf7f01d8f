"""How long a block takes that is set apart: forward and backward as they are, recorded and replayed, and run again.

NOTE [ Timing a rerun ]

Rule 1. A rerun is timed from its begin to its end, which comes before that of the forward where it has all that it is
        to bring back.
Rule 2. What is saved and brought back on top takes time for each value. It is what forward and backward take longer
        than plain ones in a region that runs again, less the rerun. A difference of times is lost in what else the
        machine does where a block takes long, but then it is small: no more counts than so much for each value.
Rule 3. In training a device is busy when a block begins, and computes while the host gives it more. So it is given the
        same block once before, and nobody waits. What the host takes to give it all counts where that is longer than
        what the device takes: in a row of such blocks the device waits for the host, in forward or in backward.
Rule 4. What the host takes longer for each value that is offloaded is measured with some of them. How much longer a
        block takes where all are offloaded, since the device no longer hides it, is shared out to them: a sum over
        values cannot say that the first ones are free. Copies are not part of it, nor is waiting for them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._core import devices, extensions
from actckpt._core.storages import tensors_in

__all__ = ["Offloading", "Run", "Runs", "Times", "fastest"]

#: The fastest of some runs counts: whatever else the machine does can only add to it. At least so many are timed, and
#: others as long as all together take less than so many seconds.
_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 2, 5, 0.1
#: Most that saving and bringing back one more value takes.
_MOST_PER_SAVED_S = 5e-6


class Run(NamedTuple):
    """One run of a block that is set apart."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Where its backward ends.
    leaves: list[Tensor]

    def call(self) -> Any:
        """Run forward."""
        return self.forward(*self.args, **self.kwargs)

    def roots(self) -> list[Tensor]:
        """Run forward; return what backward begins with."""
        return [tensor for tensor in tensors_in(self.call()) if tensor.requires_grad]

    def backward(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Run backward to the leaves."""
        if roots and self.leaves:
            torch.autograd.backward(roots, gradients, inputs=self.leaves)


#: Sets a block apart for one run.
Runs = Callable[[], "contextlib.AbstractContextManager[Run]"]


class Times(NamedTuple):
    """Seconds of a block."""

    forward_s: float
    backward_s: float
    #: The same where operators are recorded, and replayed.
    recorded_s: float
    replaying_s: float
    #: What the block takes longer where it runs again in backward; None: it may not.
    rerun_s: float | None
    #: What it takes longer for each value that is offloaded, beside the copies.
    offload_s: float = 0.0


class Offloading(NamedTuple):
    """A block that offloads some of its values, and keeps the others."""

    runs: Runs
    #: How many it offloads, and how many it could.
    num_offloaded: int
    num_offloadable: int


def fastest(
    plain: Runs,
    *,
    recorded: Runs,
    rerun: Runs | None,
    device: torch.device,
    num_values: int,
    offloading: Offloading | None = None,
) -> Times:
    """Return the least times of some runs in turns.

    Args:
        plain, recorded, rerun: the block as it is, in a region that replays, and in one that runs again. The first run
            in each region does not count: it is audited, or meets what is new.
        device: of the block.
        num_values: how many values it has.
        offloading: the block in a region that offloads; None: what that takes the host is not asked for.
    """
    ways: list[Callable[[], tuple[_Span, ...]]] = [functools.partial(_timed, way, device) for way in (plain, recorded)]
    if rerun is not None:
        ways.append(functools.partial(_timed_rerun, rerun, device))
    if offloading is not None:
        ways.append(functools.partial(_timed, offloading.runs, device))
    for way in ways[1:]:
        way()
    (forward, backward), (recording, replaying), *others = _in_turns(ways)
    rerun_s, offload_s = None, 0.0
    if rerun is not None:
        *spans, alone = others.pop(0)
        longer_s = sum(span.seconds for span in spans) - forward.seconds - backward.seconds
        rerun_s = min(max(longer_s, alone.seconds), alone.seconds + num_values * _MOST_PER_SAVED_S)
    if offloading is not None:
        pairs = zip((recording, backward), others.pop(), strict=True)
        offload_s = sum(_per_offloaded_s(usual, with_some, offloading) for usual, with_some in pairs)
    return Times(forward.seconds, backward.seconds, recording.seconds, replaying.seconds, rerun_s, offload_s)


def _per_offloaded_s(usual: _Span, with_some: _Span, offloading: Offloading) -> float:
    """Return what forward or backward takes longer for each value that is offloaded (Rule 4).

    Args:
        usual: what it takes where none is.
        with_some: the same with some.
    """
    host_s = max(with_some.host_s - usual.host_s, 0.0) / offloading.num_offloaded
    num = offloading.num_offloadable
    return max(usual.host_s + num * host_s - usual.seconds, 0.0) / num


def _in_turns(timed: Sequence[Callable[[], tuple[_Span, ...]]]) -> list[tuple[_Span, ...]]:
    """Return the least that each of these takes, in several turns."""
    turns: list[list[tuple[_Span, ...]]] = []
    spent_s = 0.0
    while len(turns) < _LEAST_TIMED or (len(turns) < _MOST_TIMED and spent_s < _TIMED_S):
        turns.append([each() for each in timed])
        spent_s += sum(span.seconds for spans in turns[-1] for span in spans)
    return [tuple(map(_least, zip(*found, strict=True))) for found in zip(*turns, strict=True)]


class _Span(NamedTuple):
    """What some work took the host, and the slower one of host and device (Rule 3)."""

    host_s: float
    seconds: float


def _least(spans: Iterable[_Span]) -> _Span:
    return _Span(*map(min, zip(*spans, strict=True)))


class _Moment(NamedTuple):
    """A point in the work of the host and in that of the device."""

    host_s: float
    device: devices.Moment

    @classmethod
    def now(cls, device: torch.device) -> _Moment:
        return cls(devices.host_seconds(device), devices.moment(device))

    def until(self, later: _Moment) -> _Span:
        """Return what the work between two moments took."""
        host_s = later.host_s - self.host_s
        return _Span(host_s, max(host_s, devices.seconds_between(self.device, later.device)))


def _timed(
    runs: Runs, device: torch.device, watch: contextlib.AbstractContextManager[object] | None = None
) -> tuple[_Span, _Span]:
    """Return what forward and backward take; `watch` is around the run that counts."""
    devices.synchronize(device)
    if devices.accelerator_of(device.type) is not None:  # Rule 3
        with runs() as ahead:
            _backward(ahead, ahead.roots())
    with runs() as run, watch or contextlib.nullcontext():
        start = _Moment.now(device)
        roots = run.roots()
        middle = _Moment.now(device)
        _backward(run, roots)
        end = _Moment.now(device)
    return start.until(middle), middle.until(end)


def _backward(run: Run, roots: list[Tensor]) -> None:
    run.backward(roots, [torch.ones_like(root) for root in roots])


def _timed_rerun(runs: Runs, device: torch.device) -> tuple[_Span, _Span, _Span]:
    """Return what forward, backward and the rerun in it take; nothing for the last where none begins."""
    timer = _Timer(device)
    forward, backward = _timed(runs, device, timer.registered())
    return forward, backward, _Span(0.0, 0.0) if timer.span is None else timer.span[0].until(timer.span[1])


class _Timer(extensions.Extension):
    """Times the rerun of the first region that this thread opens: those inside of it are parts of it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._thread = device, threading.get_ident()
        self._is_taken = False
        self.span: tuple[_Moment, _Moment] | None = None

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Watch what regions are opened inside."""
        extensions.register(self)
        try:
            yield
        finally:
            extensions.unregister(self)

    def capture(self) -> Any:
        """Take the first region."""
        if self._is_taken or threading.get_ident() != self._thread:
            return None
        self._is_taken = True
        return self

    @contextlib.contextmanager
    def rerun(self, _: Any, /) -> Iterator[None]:
        """Time what runs inside."""
        began = _Moment.now(self._device)
        try:
            yield
        finally:
            self.span = began, _Moment.now(self._device)
