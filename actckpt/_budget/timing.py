"""The times of an isolated block: plain forward and backward, recorded and replayed, and rerun.

A rerun is timed from its start to its end. It ends before the forward would, once it has all values that it must
restore.

In training a device is busy when a block starts, and computes while the host issues more. So the same block is issued
once before, without waiting. The host's time to issue the work counts if it exceeds the device's: in a series of such
blocks the device waits for the host, in forward or in backward.

A value that is offloaded takes the host a fixed time. If all are offloaded, the device may not hide it. The extra time
of the block is then distributed over them: a sum over values cannot express that the first ones are free. Copies, and
waiting for them, are not included.
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
from actckpt._core.simulated import is_simulated
from actckpt._core.storages import tensors_in
from actckpt._rerun.audit import without_audits

__all__ = ["Run", "Runs", "Times", "fastest"]

#: The fastest run counts: noise only adds time. At least this many runs are timed, at most this many, and no more once
#: all together have taken this many seconds.
_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 2, 5, 0.1
#: Host time to pack a value that is offloaded, and to unpack it.
_PER_OFFLOADED_S = 15e-6


class Run(NamedTuple):
    """One run of an isolated block."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Where its backward ends.
    leaves: list[Tensor]

    def call(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    def roots(self) -> list[Tensor]:
        """Run forward; return the roots of backward."""
        return [tensor for tensor in tensors_in(self.call()) if tensor.requires_grad]

    def backward(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        """Run backward to the leaves, in this thread.

        A rerun in a thread of autograd leaves autocast there, which clears the casts that this forward still reads.
        """
        if roots and self.leaves:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(roots, gradients, inputs=self.leaves)


#: Isolates a block for one run.
Runs = Callable[[], "contextlib.AbstractContextManager[Run]"]


class Times(NamedTuple):
    """Seconds of a block."""

    forward_s: float
    backward_s: float
    #: The same with recorded and replayed operators.
    recorded_s: float
    replaying_s: float
    #: Extra time if the block is rerun in backward; None: it must not be.
    rerun_s: float | None
    #: Extra time for each offloaded value, without the copies.
    offload_s: float = 0.0


def fastest(
    plain: Runs, *, recorded: Runs, rerun: Runs | None, device: torch.device, num_offloadable: int = 0
) -> Times:
    """Return the least times of several runs, which alternate.

    Args:
        plain, recorded, rerun: the block as it is, in a region that replays, and in one that reruns. The first run in
            each region takes longer: it is audited, or meets new code.
        device: of the block.
        num_offloadable: number of values that it may offload.
    """
    ways: list[Callable[[], tuple[_Span, ...]]] = [functools.partial(_timed, way, device) for way in (plain, recorded)]
    if rerun is not None:
        ways.append(functools.partial(_timed_rerun, rerun, device))
    (forward, backward), (recording, replaying), *reruns = _in_turns(ways)
    rerun_s = reruns[0][0].seconds if reruns else None
    offload_s = sum(_longer_s(span, num_offloadable) for span in (recording, backward)) / max(num_offloadable, 1)
    return Times(forward.seconds, backward.seconds, recording.seconds, replaying.seconds, rerun_s, offload_s)


def _longer_s(span: _Span, num_offloaded: int) -> float:
    """Return the extra time of forward or backward if the host offloads so many values."""
    return max(span.host_s + num_offloaded * _PER_OFFLOADED_S - span.seconds, 0.0)


def _in_turns(timed: Sequence[Callable[[], tuple[_Span, ...]]]) -> list[tuple[_Span, ...]]:
    """Return the least times of each of these, over several rounds."""
    turns: list[list[tuple[_Span, ...]]] = []
    spent_s = 0.0
    with without_audits():
        while len(turns) < _LEAST_TIMED or (len(turns) < _MOST_TIMED and spent_s < _TIMED_S):
            if turns and is_simulated():  # every run takes as long
                break
            turns.append([measure() for measure in timed])
            spent_s += sum(span.seconds for spans in turns[-1] for span in spans)
    return [tuple(map(_least, zip(*rounds, strict=True))) for rounds in zip(*turns, strict=True)]


class _Span(NamedTuple):
    """Time of some work on the host, and the longer one of host and device."""

    host_s: float
    seconds: float


def _least(spans: Iterable[_Span]) -> _Span:
    return _Span(*map(min, zip(*spans, strict=True)))


class _Moment(NamedTuple):
    """A point in the work of the host and of the device."""

    host_s: float
    device: devices.Moment

    @classmethod
    def now(cls, device: torch.device) -> _Moment:
        return cls(devices.host_seconds(device), devices.moment(device))

    def until(self, later: _Moment) -> _Span:
        """Return the time of the work between two moments."""
        host_s = later.host_s - self.host_s
        return _Span(host_s, max(host_s, devices.seconds_between(self.device, later.device)))


def _timed(
    runs: Runs, device: torch.device, watch: contextlib.AbstractContextManager[object] | None = None
) -> tuple[_Span, _Span]:
    """Return the times of forward and backward; `watch` is around the run that counts."""
    devices.synchronize(device)
    if devices.accelerator_of(device.type) is not None:  # keep the device busy
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


def _timed_rerun(runs: Runs, device: torch.device) -> tuple[_Span]:
    """Return the time of the rerun in a backward; zero if none starts."""
    timer = _Timer(device)
    _timed(runs, device, timer.registered())
    return (_Span(0.0, 0.0) if timer.span is None else timer.span[0].until(timer.span[1]),)


class _Timer(extensions.Extension):
    """Times the rerun of the first region that this thread opens; nested reruns are part of it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._thread = device, threading.get_ident()
        self._is_taken = False
        self.span: tuple[_Moment, _Moment] | None = None

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Watch regions opened inside the body."""
        extensions.register(self)
        try:
            yield
        finally:
            extensions.unregister(self)

    def capture(self) -> Any:
        """Claim the first region."""
        if self._is_taken or threading.get_ident() != self._thread:
            return None
        self._is_taken = True
        return self

    @contextlib.contextmanager
    def rerun(self, _: Any, /) -> Iterator[None]:
        """Time the body."""
        began = _Moment.now(self._device)
        try:
            yield
        finally:
            self.span = began, _Moment.now(self._device)
