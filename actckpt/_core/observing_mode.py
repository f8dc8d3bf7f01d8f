"""Base class of dispatch modes below which compiled functions stay compiled."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._core import torch_private

__all__ = ["ObservingMode"]


class ObservingMode(TorchDispatchMode):
    """A dispatch mode below which compiled functions run compiled, if torch supports that.

    Below other modes, torch runs a not yet compiled function eagerly, and never compiles it later.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether compiled functions run compiled: from torch 2.10 on."""
        return torch_private.runs_compiled_below_modes
