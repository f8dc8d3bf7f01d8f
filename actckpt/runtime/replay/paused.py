"""Working on tensors while every recorder of this thread stands aside."""

import threading

import torch
from torch import Tensor

from actckpt.runtime import torch_private

__all__ = ["Paused", "paused", "version_of", "whole"]

#: Threads in which every recorder stands aside, and how many times over.
paused: dict[int, int] = {}


class Paused:
    """Every recorder stands aside in this thread, and no graph is built (Rule 9)."""

    __slots__ = ("_grad", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._grad = torch.is_grad_enabled()
        paused[self._thread] = paused.get(self._thread, 0) + 1
        if self._grad:
            torch_private.set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._grad:
            torch_private.set_grad_enabled(True)
        left = paused[self._thread] - 1
        if left:
            paused[self._thread] = left
        else:
            del paused[self._thread]


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def whole(tensor: Tensor) -> Tensor:
    """Return an alias of all elements of the storage of `tensor`, with its version counter."""
    alias = tensor.detach()
    if alias.is_conj() or alias.is_neg() or alias.untyped_storage().nbytes() % alias.element_size():
        return torch.empty(0, dtype=torch.uint8, device=alias.device).set_(alias.untyped_storage())
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)
