"""Checkpoints around what runs, which run it again in backward."""

from __future__ import annotations

from actckpt._core import torch_private
from actckpt._core.hooks import is_of_checkpoint

__all__ = ["checkpoint_around"]


def checkpoint_around() -> object | None:
    """Return what stands for the checkpoint, of torch or of actckpt, whose hooks are the innermost, None if none is."""
    hooks = torch_private.outer_hooks()
    return None if hooks is None or not is_of_checkpoint(hooks) else hooks[0]
