"""Which tensors of TransformerEngine modules must not be offloaded, or must be unpacked as aliases.

- Tensors that TransformerEngine marks, and all tensors while its own CPU offloading is on: two offloaders would not
  know of each other.
- Weights, the parts of quantized weights, and weight casts that modules keep between microbatches. They are looked up
  by storage in the modules whose forward runs.
- Weight casts made in each forward. They are saved tensors and could be offloaded, but making them is as cheap as
  loading them. They are recognised by their shape and one byte per element.

A tensor with a ready event is offloaded after that event. Backward empties tensors that it has used
(`saved.data = torch.empty(0)`), for every holder of the object. So what TransformerEngine saves is unpacked as an
alias, even while TransformerEngine is not registered.
"""

import sys

import torch
from torch import Tensor

from actckpt._core.extensions import Extension
from actckpt._interface import WarningText, is_code_running, modules_on_stack, warn_user
from actckpt.te.internals import PACKAGE, Internals, is_te_module

__all__ = ["SavedByModules", "Staying"]

_ROOT = PACKAGE.partition(".")[0]
_TWO_OFFLOADERS = WarningText(
    "actckpt's offloading runs inside TransformerEngine's get_cpu_offload_context: actckpt moves nothing there, so "
    "that no tensor has two offloaders.",
    "Use one of the two.",
    per="process",
)


class Staying:
    """Decides which tensors must stay."""

    def __init__(self, te: Internals) -> None:
        self._te = te
        self._has_warned = False

    def excludes_from_offload(self, tensor: Tensor) -> bool:
        """Whether the tensor must stay where it is; waits for its event."""
        if self._te.is_offloading:
            self._warn()
            return True
        if self._te.is_marked(tensor) or (not tensor.requires_grad and self._is_weight(tensor)):
            return True
        event = self._te.ready_event(tensor)
        if event is not None:
            event.wait()
        return False

    def _is_weight(self, tensor: Tensor) -> bool:
        address = _address(tensor)
        modules = [module for module in modules_on_stack() if is_te_module(module)]
        for module in dict.fromkeys(modules):
            for weight in self._te.weight_tensors(module):
                if address is not None and _address(weight) == address:
                    return True
                if tensor.element_size() == 1 and _is_cast(tensor.shape, weight.shape):
                    return True
        return False

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(_TWO_OFFLOADERS)


class SavedByModules(Extension):
    """Unpacks what TransformerEngine saves as an alias."""

    def clears_saved(self) -> bool:
        """Whether code of TransformerEngine is running."""
        if _ROOT not in sys.modules:
            return False
        return is_code_running(_ROOT) or any(is_te_module(module) for module in modules_on_stack())


def _is_cast(shape: torch.Size, weight: torch.Size) -> bool:
    """Whether bytes of this shape may be a cast of a weight, or of its transpose."""
    return len(weight) == 2 and tuple(shape) in (tuple(weight), tuple(reversed(weight)))


def _address(tensor: Tensor) -> int | None:
    """Return the address of the tensor's bytes; None if it has none (a quantized tensor has parts instead)."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None
