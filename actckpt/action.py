"""Plain data of policies: actions for saved tensors, and the information passed to a policy function.

Does not import torch, since the planner uses actions without it.
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
    """What happens to a saved tensor.

    Attributes:
        KEEP: its bytes stay.
        RECOMPUTE: its bytes are dropped and recomputed in backward. What cannot be replayed is kept.
        OFFLOAD: its bytes are copied to a store, waiting for room if necessary, and loaded in backward.
        PREFER_OFFLOAD: like OFFLOAD if the store has room at once; else the bytes stay. torch calls it
            `PREFER_CPU_OFFLOAD`.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PREFER_OFFLOAD = "prefer_offload"


@dataclasses.dataclass(frozen=True)
class SavedTensorInfo:
    """What a policy function gets about a value when autograd first saves it.

    Attributes:
        op: the operator that made it, a `torch._ops.OpOverload` or a higher-order operator; None for inputs of the
            region and for bytes that no operator made.
        index: the index of the operator's result.
        shape: of the saved tensor.
        dtype: of the saved tensor.
        device: of the saved tensor.
        nbytes: bytes of its storage, which may be larger than the tensor.
        is_input: it existed before the region, or no recorded operator made it.
        is_parameter: it is a parameter, a buffer, or a view of one. These always stay.
        replayable: whether replaying operators can restore it. If not, RECOMPUTE keeps it.
        module: qualified name of the module whose forward made it, or None.
        place: its name in every step and process; None if no operator made it.
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
