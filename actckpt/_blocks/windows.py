"""Limits of in-flight bytes while a block runs, for plans that offload.

NOTE [ Windows of a plan ]

A plan's peak is valid only if no more is in flight than its simulation says (`planner.simulation.InFlight`). The
window of a block is larger by the bytes that it offloads itself: they count as the block's own memory while it runs.

When a block's forward ends, its stream (on a CPU, the program) waits until the copies out fit in the room that the next
code leaves. When backward reaches the last block, no copy out may be in flight.

When backward reaches a block's output, tensors of the blocks before it are prefetched within its window. (A block that
keeps everything unpacks nothing through our hooks, so these could not start it.) The values that the block itself
offloaded have bytes reserved in the window. Once they are unpacked, they count as the block's own memory, and no other
value may use these bytes (NOTE [ Prefetching ]). When a backward ends, other offloading of the process is not limited
any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from actckpt._C import LastMoved, when_backward_ends
from actckpt._core.storages import tensors_in
from actckpt._offload import stores
from actckpt.planner.plans import BlockWindows

if TYPE_CHECKING:
    from actckpt._blocks.block_group import BlockGroup

__all__ = ["Windows"]


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of one block."""

    block: BlockWindows
    #: Bytes that it offloads itself.
    own_bytes: int
    is_last: bool

    def run(self, blocks: BlockGroup, forward: Callable[[], Any]) -> Any:
        """Run the forward of a block within its windows, and make its backward start with prefetching."""
        blocks.limit_windows(self.block.out_bytes)
        result = forward()
        output = next((tensor for tensor in tensors_in(result) if tensor.grad_fn is not None), None)
        if output is None:
            return result
        blocks.limit_windows(self.block.left_bytes)
        stores.make_room(output.device)
        moved = LastMoved()

        def ended() -> None:
            blocks.limit_windows(None)

        def reached(gradient: torch.Tensor) -> None:
            if self.is_last:
                blocks.limit_windows(0)
                stores.make_room(gradient.device)
            blocks.limit_windows(self.block.back_bytes)
            moved.read_ahead(self.own_bytes)
            when_backward_ends(ended)

        output.register_hook(reached)
        return result
