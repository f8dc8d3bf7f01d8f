"""`distribute_saved_activations`: ranks with the same input each keep a share of it."""

import math
import weakref
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from actckpt._interface import Hooks

__all__ = ["SplitInput"]


class _Share:
    """This rank's share of a tensor, in memory order."""

    __slots__ = ("dims", "part", "shape")

    def __init__(self, tensor: Tensor, rank: int, num_ranks: int) -> None:
        # Strides are kept: kernels may round differently for others. (Except those of an expanded tensor.)
        self.dims = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
        tensor = tensor.detach().permute(self.dims)
        self.shape = tensor.shape
        size = math.ceil(tensor.numel() / num_ranks)
        self.part = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
        own = tensor.reshape(-1)[rank * size : (rank + 1) * size]
        self.part[: own.numel()] = own  # the last shares may be shorter: they are padded

    def gathered(self, group: Any, num_ranks: int) -> Tensor:
        """Return the tensor; all ranks of the group must call this."""
        whole = torch.empty(self.part.numel() * num_ranks, dtype=self.part.dtype, device=self.part.device)
        torch.distributed.all_gather_into_tensor(whole, self.part, group=group)
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return whole[: math.prod(self.shape)].view(self.shape).permute(back)


class SplitInput:
    """Hooks for a region's inputs that split the first argument over the ranks of a group.

    The tensor itself is not changed: TransformerEngine cuts its data, for all its users.
    """

    def __init__(self, args: tuple[Any, ...], group: Any) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise ValueError(
                "te.checkpoint: distribute_saved_activations=True needs process groups, and torch.distributed is not "
                "initialized. Call torch.distributed.init_process_group() first, or leave the keyword out."
            )
        if not args or type(args[0]) is not Tensor or args[0].layout is not torch.strided:
            actual = type(args[0]).__name__ if args else "no argument"
            raise ValueError(
                "te.checkpoint: distribute_saved_activations=True splits the first argument, which must be a dense "
                f"tensor, and it is {actual} here. Pass the tensor first, or leave the keyword out."
            )
        # Weak: the region that holds these hooks must not hold the tensor.
        self._first = weakref.ref(args[0])
        self._group = group

    @property
    def hooks(self) -> Hooks:
        """The pack and unpack hooks."""
        first, group = self._first, self._group
        rank, num_ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)

        def pack(tensor: Tensor) -> Any:
            return _Share(tensor, rank, num_ranks) if tensor is first() else tensor

        def unpack(held: Any) -> Any:
            return held.gathered(group, num_ranks) if isinstance(held, _Share) else held

        return pack, unpack
