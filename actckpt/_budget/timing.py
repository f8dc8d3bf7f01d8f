"""The times of an isolated block: plain forward and backward, recorded and replayed, and rerun.

A rerun is timed from its start to its end. It ends before the forward would, once it has all values that it must
restore.

Saving and restoring costs additional time per value: the extra time of forward and backward in a rerun region over
plain ones, minus the rerun. For a block that takes long, noise may exceed this difference, but then it is small. So it
is capped per value.

In training a device is busy when a block starts, and computes while the host issues more. So the same block is issued
once before, without waiting. The host's time to issue the work counts if it exceeds the device's: in a series of such
blocks the device waits for the host, in forward or in backward.

The host's extra time per offloaded value is measured with some values. If all are offloaded, the device may no longer
hide it. The extra time of the block is then distributed over them: a sum over values cannot express that the first ones
are free. Copies, and waiting for them, are not included.
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

__all__ = ["Offloading", "Run", "Runs", "Times", "fastest"]

#: The fastest run counts: noise only adds time. At least this many runs are timed, at most this many, and no more once
#: all together have taken this many seconds.
_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 2, 5, 0.1
#: Maximum time to save and restore one more value.
_MOST_PER_SAVED_S = 5e-6


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


class Offloading(NamedTuple):
    """A block that offloads some of its values, and keeps the others."""

    runs: Runs
    #: How many values it offloads, and how many it could.
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
    """Return the least times of several runs, which alternate.

    Args:
        plain, recorded, rerun: the block as it is, in a region that replays, and in one that reruns. The first run in
            each region takes longer: it is audited, or meets new code.
        device: of the block.
        num_values: number of its values.
        offloading: the block in a region that offloads; None: the host's time for that is not measured.
    """
    ways: list[Callable[[], tuple[_Span, ...]]] = [functools.partial(_timed, way, device) for way in (plain, recorded)]
    if rerun is not None:
        ways.append(functools.partial(_timed_rerun, rerun, device))
    if offloading is not None:
        ways.append(functools.partial(_timed, offloading.runs, device))
    (forward, backward), (recording, replaying), *others = _in_turns(ways)
    rerun_s, offload_s = None, 0.0
    if rerun is not None:
        *spans, rerun_span = others.pop(0)
        longer_s = sum(span.seconds for span in spans) - forward.seconds - backward.seconds
        rerun_s = min(max(longer_s, rerun_span.seconds), rerun_span.seconds + num_values * _MOST_PER_SAVED_S)
    if offloading is not None:
        pairs = zip((recording, backward), others.pop(), strict=True)
        offload_s = sum(_per_offloaded_s(usual, with_some, offloading) for usual, with_some in pairs)
    return Times(forward.seconds, backward.seconds, recording.seconds, replaying.seconds, rerun_s, offload_s)


def _per_offloaded_s(usual: _Span, with_some: _Span, offloading: Offloading) -> float:
    """Return the extra time of forward or backward for each offloaded value.

    Args:
        usual: time without offloading.
        with_some: time with some offloaded values.
    """
    host_s = max(with_some.host_s - usual.host_s, 0.0) / offloading.num_offloaded
    num = offloading.num_offloadable
    return max(usual.host_s + num * host_s - usual.seconds, 0.0) / num


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


def _timed_rerun(runs: Runs, device: torch.device) -> tuple[_Span, _Span, _Span]:
    """Return the times of forward, backward and the rerun in it; zero for the last if no rerun starts."""
    timer = _Timer(device)
    forward, backward = _timed(runs, device, timer.registered())
    return forward, backward, _Span(0.0, 0.0) if timer.span is None else timer.span[0].until(timer.span[1])


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
