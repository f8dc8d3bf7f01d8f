"""Plain data of policies: what can be done with a saved tensor, and what a policy is told about one.

Does not import torch, as the planner that works with actions does not.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Action", "SavedTensorInfo"]


class Action(enum.Enum):
    """What becomes of a saved tensor."""

    #: Its bytes stay.
    KEEP = "keep"
    #: Its bytes are dropped; backward computes them again.
    RECOMPUTE = "recompute"
    #: Its bytes go to a store, if need be after a wait; backward brings them back.
    OFFLOAD = "offload"
    #: The same where nobody waits for it: bytes that made an earlier step wait, or for which no store has room
    #: without waiting, stay. What torch calls `PREFER_CPU_OFFLOAD`.
    PREFER_OFFLOAD = "prefer_offload"


@dataclasses.dataclass(frozen=True)
class SavedTensorInfo:
    """What a policy is told about a value, the first time that autograd saves it."""

    #: The operator that made it, a `torch._ops.OpOverload` or a higher-order operator; None for inputs of the region
    #: and for bytes that no operator made.
    op: Any
    #: Which of the operator's results it is.
    index: int
    #: Of the tensor that is saved.
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    #: Bytes of the storage behind it.
    nbytes: int
    #: It existed before the region, or nothing that was recorded made it.
    is_input: bool
    #: It is a parameter, or a buffer, or a view of one. These always stay.
    is_parameter: bool
    #: Whether replaying operators can bring it back. What cannot be replayed is kept where a policy
    #: says RECOMPUTE.
    replayable: bool
    #: Qualified name of the module whose forward made it, or None.
    module: str | None
