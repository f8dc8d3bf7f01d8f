"""Activation checkpointing and offloading for PyTorch. See README.md.

The names of torch.utils.checkpoint are here too, so that code which imports that module can import
this one instead.
"""

import torch.utils.checkpoint as _torch_checkpoint
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointFunction,
    CheckpointPolicy,
    DefaultDeviceType,
    SelectiveCheckpointContext,
    check_backward_validity,
    create_selective_checkpoint_contexts,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
    set_device_states,
)

from actckpt import rng
from actckpt._version import __version__
from actckpt.api import checkpoint, checkpoint_sequential
from actckpt.blocks import apply, remove
from actckpt.errors import (
    ActckptError,
    BlocksError,
    InputChangedError,
    RerunMismatchError,
    SavedTensorChangedError,
)
from actckpt.runtime import connect as _connect  # noqa: F401 - imported for its effect

__all__ = [
    "SAC_IGNORED_OPS",
    "ActckptError",
    "BlocksError",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "InputChangedError",
    "RerunMismatchError",
    "SavedTensorChangedError",
    "SelectiveCheckpointContext",
    "__version__",
    "apply",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "remove",
    "rng",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

if hasattr(_torch_checkpoint, "GraphExecGroup"):  # from torch 2.10 on
    from torch.utils.checkpoint import GraphExecGroup

    __all__ += ["GraphExecGroup"]
