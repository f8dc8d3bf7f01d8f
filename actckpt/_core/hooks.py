"""Whose the saved-tensor hooks around a region are, and what such hooks get."""

import functools

from actckpt._C import Frame, OffloadSession, Refill, pack_recorded
from actckpt._core import torch_private

__all__ = ["get_all_leaves", "is_of_checkpoint"]


def is_of_checkpoint(hooks: torch_private.Hooks) -> bool:
    """Whether hooks are those of a checkpoint, of torch or of actckpt.

    Both know their forward and their rerun by hooks of their own; those of torch are functions of its module.
    """
    pack = hooks[0]
    is_ours = isinstance(getattr(pack, "__self__", None), (Frame, Refill))
    return is_ours or getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def get_all_leaves(hooks: torch_private.Hooks) -> bool:
    """Whether hooks get every leaf that requires grad, not only those among the positional arguments.

    Autograd's graph holds such a leaf anyway: hooks cannot free it, and if their owner holds the output, the reference
    cycle runs through that graph, where the garbage collector does not look. Hooks of checkpoints and of regions get
    all tensors all the same: in a rerun, the tensor in the place of a leaf may be none, and the other way round. So do
    those that let programs overwrite saved tensors.
    """
    pack = hooks[0]
    is_of_region = isinstance(pack, functools.partial) and pack.func is pack_recorded
    is_of_offload = isinstance(getattr(pack, "__self__", None), OffloadSession)
    return is_of_region or is_of_offload or is_of_checkpoint(hooks) or torch_private.allows_mutation()
