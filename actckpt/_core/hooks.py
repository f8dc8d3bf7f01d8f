"""Which kind of saved-tensor hooks surrounds a region, and which tensors they get."""

import functools

from actckpt._C import Frame, OffloadSession, RecomputedValues, pack_recorded
from actckpt._core import torch_private

__all__ = ["get_all_leaves", "is_of_checkpoint", "is_ours"]


def is_of_checkpoint(hooks: torch_private.Hooks) -> bool:
    """Whether hooks belong to a checkpoint of torch or actckpt.

    Both use their own hooks in forward and rerun; torch's are functions of its checkpoint module.
    """
    pack = hooks[0]
    is_ours = isinstance(getattr(pack, "__self__", None), (Frame, RecomputedValues))
    return is_ours or getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def get_all_leaves(hooks: torch_private.Hooks) -> bool:
    """Whether hooks get every leaf that requires grad, not only those among the positional arguments.

    Autograd's graph holds such a leaf anyway, so hooks cannot free it. If the owner of the hooks holds the output,
    packing the leaf makes a reference cycle through that graph, which the garbage collector cannot see. Three kinds of
    hooks get all tensors nevertheless. Hooks of checkpoints and regions do: in a rerun, the tensor in the place of a
    leaf may not be a leaf, and vice versa. So do hooks that let programs overwrite saved tensors.
    """
    return is_ours(hooks) or torch_private.allows_mutation()


def is_ours(hooks: torch_private.Hooks) -> bool:
    """Whether hooks belong to a checkpoint of torch, or to a checkpoint, region or offload of actckpt."""
    pack = hooks[0]
    is_of_region = isinstance(pack, functools.partial) and pack.func is pack_recorded
    is_of_offload = isinstance(getattr(pack, "__self__", None), OffloadSession)
    return is_of_region or is_of_offload or is_of_checkpoint(hooks)
