"""Work on tensors while every recorder of this thread is paused."""

import torch
from torch import Tensor

from actckpt._C import Paused

__all__ = ["Paused", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """Return an alias of the whole storage of `tensor`, with its version counter."""
    alias = tensor.detach()
    if alias.is_conj() or alias.is_neg() or alias.untyped_storage().nbytes() % alias.element_size():
        return torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)
