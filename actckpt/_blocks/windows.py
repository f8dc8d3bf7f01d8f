"""How many bytes may be on their way to and from the store while a block runs, where a plan offloads.

NOTE [ Windows of a plan ]

Rule 1. A plan's peak holds if no more is on its way than its simulation says (`planner.simulation.InFlight`). What a
        block moves itself is part of what it needs while it runs, so its window is larger by that much.
Rule 2. When a block's forward ends, its stream (on a CPU the program) waits until no more is on its way out than what
        runs next has room for. When backward comes to the last block, nothing may be on its way out.
Rule 3. When backward comes to a block's output, what the blocks before it moved is read ahead within its window; no
        value of a block that keeps everything is unpacked by hooks of ours that could begin it. What it moved itself is
        read within room of its own: from where it is asked for it is part of what the block needs, and no other value
        has that room (NOTE [ Reading ahead ], Rule 5).
Rule 4. When a backward has ended, what else the process offloads is not limited any more.
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
    from actckpt._blocks.together import AppliedBlocks

__all__ = ["Windows"]


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of one block."""

    block: BlockWindows
    #: What it moves itself.
    own_bytes: int
    is_last: bool

    def run(self, blocks: AppliedBlocks, forward: Callable[[], Any]) -> Any:
        """Run the forward of a block within its windows, and have its backward begin with reading ahead."""
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
