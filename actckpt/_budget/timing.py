"""How long a block takes that is set apart: forward and backward as they are, recorded and replayed, and run again.

NOTE [ Timing a rerun ]

Rule 1. A rerun ends at the last tensor that forward saves, so it takes what forward takes until then: timed directly.
Rule 2. What is saved and brought back on top takes time for each tensor. It is what forward and backward take longer
        than plain ones in a region that runs again, less the rerun. A difference of times is lost in what else the
        machine does where a block takes long, but then it is small: no more counts than so much for each tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._core import devices
from actckpt._core.storages import tensors_in

__all__ = ["Run", "Runs", "Times", "fastest"]

#: The fastest of some runs counts: whatever else the machine does can only add to it. At least so many are timed, and
#: others as long as all together take less than so many seconds.
_LEAST_TIMED, _MOST_TIMED, _TIMED_S = 2, 8, 0.3
#: Most that saving and bringing back one more tensor takes.
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


def fastest(plain: Runs, recorded: Runs, rerun: Runs | None, device: torch.device) -> Times:
    """Return the least times of some runs in turns, the first of each left out: it is audited, or meets what is new.

    Args:
        plain, recorded, rerun: the block as it is, in a region that replays, and in one that runs again.
    """
    ways = [plain, recorded, *([rerun] if rerun is not None else [])]
    for way in ways[1:]:
        _seconds(way, device)
    times: list[tuple[float, ...]] = []
    num_saved = 0
    while len(times) < _LEAST_TIMED or (len(times) < _MOST_TIMED and sum(map(sum, times)) < _TIMED_S):
        turn = [seconds for way in ways for seconds in _seconds(way, device)]
        if rerun is not None:
            until_s, num_saved = _until_last_saved(plain, device)
            turn.append(until_s)
        times.append(tuple(turn))
    forward_s, backward_s, recorded_s, replaying_s, *again = map(min, zip(*times, strict=True))
    rerun_s = None
    if again:
        until_s = min(again[2], forward_s)
        longer_s = again[0] + again[1] - forward_s - backward_s
        rerun_s = min(max(longer_s, until_s), until_s + num_saved * _MOST_PER_SAVED_S)
    return Times(forward_s, backward_s, recorded_s, replaying_s, rerun_s)


def _seconds(runs: Runs, device: torch.device) -> tuple[float, float]:
    """Return what forward and backward take: a device starts at rest."""
    with runs() as run:
        devices.synchronize(device)
        start = devices.moment(device)
        roots = [tensor for tensor in tensors_in(run.call()) if tensor.requires_grad]
        middle = devices.moment(device)
        run.backward(roots, [torch.ones_like(root) for root in roots])
        end = devices.moment(device)
        return devices.seconds_between(start, middle), devices.seconds_between(middle, end)


def _until_last_saved(runs: Runs, device: torch.device) -> tuple[float, int]:
    """Return what forward takes until it saves its last tensor, and how many it saves."""
    saved: list[Tensor] = []
    with runs() as run:
        devices.synchronize(device)
        start = last = devices.moment(device)

        def note(tensor: Tensor) -> Tensor:
            nonlocal last
            last = devices.moment(device)
            saved.append(tensor.detach())
            return saved[-1]

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run.call()
        return devices.seconds_between(start, last), len(saved)
