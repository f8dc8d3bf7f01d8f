"""The times of a block call: plain, replayed, rerun if it can be, and with offloaded values on a device."""

from __future__ import annotations

import functools
import itertools

from actckpt._budget.block_calls import BlockCall
from actckpt._budget.timing import Offloading, Times, fastest
from actckpt._core import devices
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, Value
from actckpt.policies import Policy

__all__ = ["block_times"]

#: Maximum bytes offloaded, unless one value has more.
_MOVED_BYTES = 64 << 20


def block_times(
    call: BlockCall, values: tuple[Value, ...], recorded: tuple[Value, ...], no_rerun: str | None
) -> tuple[Times, str | None]:
    """Return the times of a block, and why it must not be rerun.

    Args:
        recorded: the values by their places in the model.
        no_rerun: why it must not, if that is known.
    """
    device, moved = call.structure.device, _moved(recorded)
    policies: tuple[Policy, ...] = ([], "recompute", moved)
    ways = [functools.partial(call.isolate, call.in_region(policy)) for policy in policies]
    offloading = None
    if moved and devices.accelerator_of(device.type) is not None:
        num_moved = sum(action is Action.OFFLOAD for action in moved.values())
        offloading = Offloading(ways[2], num_moved, sum(value.offloadable for value in values))
    timed = functools.partial(
        fastest,
        call.isolate,
        recorded=ways[0],
        device=device,
        num_values=len(values),
        offloading=offloading,
    )
    if no_rerun is None:
        # A block that runs other operators each time fails in a rerun, as does one that cannot run in backward: it is
        # planned without reruns. A block that fails without a rerun, or because a failed rerun left state behind, fails
        # again.
        try:
            return timed(rerun=ways[1]), None
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "").rstrip(".")
            no_rerun = f"it failed with {type(error).__name__}: {first_line}"
    return timed(rerun=None), no_rerun


def _moved(values: tuple[Value, ...]) -> dict[str, Action]:
    """Return a policy, by places, that offloads the smallest values and keeps the rest; may be empty."""
    may = sorted((v for v in values if v.offloadable and v.name != BLOCK_INPUT), key=lambda value: value.nbytes)
    total = itertools.accumulate(value.nbytes for value in may)
    some = {value.name for value, nbytes in zip(may, total, strict=True) if value is may[0] or nbytes <= _MOVED_BYTES}
    names = (value.name for value in values if value.needed and value.name != BLOCK_INPUT)
    return {name: Action.OFFLOAD if name in some else Action.KEEP for name in names} if some else {}
