"""Checkpoints around the running code, which will rerun it in backward."""

from __future__ import annotations

from actckpt._core import torch_private
from actckpt._core.hooks import is_of_checkpoint

__all__ = ["checkpoint_around"]


def checkpoint_around() -> object | None:
    """Return an object that identifies the checkpoint, of torch or actckpt, with the innermost hooks; None: none."""
    hooks = torch_private.outer_hooks()
    return None if hooks is None or not is_of_checkpoint(hooks) else hooks[0]
