"""Blocks that cannot be profiled in isolation, since that would gather their parameters once more."""

from __future__ import annotations

import sys

import torch

from actckpt._budget.structure import BlockStructure
from actckpt.errors import BlocksError

__all__ = ["check_units", "check_wrapped"]


def check_units(name: str, structure: BlockStructure) -> None:
    """Raise if modules inside a block gathered their own parameters (FSDP2)."""
    if structure.exchanges.has_units:
        raise BlocksError(
            f"block {name!r} has modules that FSDP2 shards, and cannot be profiled on its own: that would gather their "
            "parameters once more. Shard the blocks themselves (fully_shard(block)), pass these modules as blocks=, or "
            "a policy in place of a budget."
        )


def check_wrapped(name: str, block: torch.nn.Module) -> None:
    """Raise if modules of a block are wrapped by FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever wraps with it
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in block.modules()):
        raise BlocksError(
            f"block {name!r} has modules that FullyShardedDataParallel wraps, and cannot be profiled on its own: that "
            "would gather their parameters once more. Call apply first and then wrap the blocks, or pass a policy in "
            "place of a budget."
        )
