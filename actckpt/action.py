"""Plain data of policies: what can be done with a saved tensor, and what a policy is told about one.

Does not import torch, as the planner that works with actions does not.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from actckpt._text.places import Place

__all__ = ["Action", "SavedTensorInfo"]


class Action(enum.Enum):
    """What becomes of a saved tensor.

    Attributes:
        KEEP: its bytes stay.
        RECOMPUTE: its bytes are dropped; backward computes them again. What cannot be replayed is kept.
        OFFLOAD: its bytes go to a store, if need be after a wait; backward brings them back.
        PREFER_OFFLOAD: the same where the store has room at once; else the bytes stay. What torch calls
            `PREFER_CPU_OFFLOAD`.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PREFER_OFFLOAD = "prefer_offload"


@dataclasses.dataclass(frozen=True)
class SavedTensorInfo:
    """What a policy is told about a value, the first time that autograd saves it.

    Attributes:
        op: the operator that made it, a `torch._ops.OpOverload` or a higher-order operator; None for inputs of the
            region and for bytes that no operator made.
        index: which of the operator's results it is, from 0.
        shape: of the tensor that is saved.
        dtype: of the tensor that is saved.
        device: of the tensor that is saved.
        nbytes: bytes of the storage behind it, which may be larger than the tensor.
        is_input: it existed before the region, or nothing that was recorded made it.
        is_parameter: it is a parameter, or a buffer, or a view of one. These always stay.
        replayable: whether replaying operators can bring it back. What cannot be replayed is kept where a policy says
            RECOMPUTE.
        module: qualified name of the module whose forward made it, or None.
        place: what names it in every step and process; None for what no operator made.
    """

    op: Any
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    is_input: bool
    is_parameter: bool
    replayable: bool
    module: str | None
    place: Place | None = None
