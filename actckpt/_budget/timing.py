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
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._core import devices, extensions
from actckpt._core.storages import tensors_in

__all__ = ["Run", "Runs", "Times", "fastest"]

#: The fastest of some runs counts: whatever else the machine does can only add to it. At least so many are timed, and
#: others as long as all together take less than so many seconds.
_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 2, 8, 0.3
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


def fastest(plain: Runs, *, recorded: Runs, rerun: Runs | None, device: torch.device, num_values: int) -> Times:
    """Return the least times of some runs in turns.

    Args:
        plain, recorded, rerun: the block as it is, in a region that replays, and in one that runs again. The first run
            in each region does not count: it is audited, or meets what is new.
        device: of the block.
        num_values: how many values it has.
    """
    ways = [plain, recorded, *([rerun] if rerun is not None else [])]
    for way in ways[1:]:
        _seconds(way, device)
    times: list[tuple[float, ...]] = []
    while len(times) < _LEAST_TIMED or (len(times) < _MOST_TIMED and sum(map(sum, times)) < _TIMED_S):
        turn = [seconds for way in ways for seconds in _seconds(way, device)]
        times.append((*turn, *([_rerun_alone_s(rerun, device)] if rerun is not None else [])))
    forward_s, backward_s, recorded_s, replaying_s, *again = map(min, zip(*times, strict=True))
    rerun_s = None
    if again:
        longer_s = again[0] + again[1] - forward_s - backward_s
        rerun_s = min(max(longer_s, again[2]), again[2] + num_values * _MOST_PER_SAVED_S)
    return Times(forward_s, backward_s, recorded_s, replaying_s, rerun_s)


class _Moment(NamedTuple):
    """A point in the work of the host and in that of the device."""

    host_s: float
    device: devices.Moment

    @classmethod
    def now(cls, device: torch.device) -> _Moment:
        return cls(devices.host_seconds(device), devices.moment(device))

    def seconds_until(self, later: _Moment) -> float:
        """Return what the slower one took (Rule 3)."""
        return max(later.host_s - self.host_s, devices.seconds_between(self.device, later.device))


def _seconds(
    runs: Runs, device: torch.device, watch: contextlib.AbstractContextManager[object] | None = None
) -> tuple[float, float]:
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
    return start.seconds_until(middle), middle.seconds_until(end)


def _backward(run: Run, roots: list[Tensor]) -> None:
    run.backward(roots, [torch.ones_like(root) for root in roots])


def _rerun_alone_s(runs: Runs, device: torch.device) -> float:
    """Return what the rerun of a block takes, which its forward is not a part of; 0 where none begins."""
    timer = _Timer(device)
    _seconds(runs, device, timer.registered())
    return 0.0 if timer.span is None else timer.span[0].seconds_until(timer.span[1])


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
