"""Activation checkpointing and offloading for PyTorch. See README.md.

The names of torch.utils.checkpoint can be imported from here too, so this package can replace that module in imports.
"""

import importlib as _importlib
import importlib.util as _importlib_util
import sys as _sys
import types as _types
import typing as _typing

import torch.utils.checkpoint as _torch_checkpoint

if _typing.TYPE_CHECKING:
    from torch.utils.checkpoint import (
        SAC_IGNORED_OPS as SAC_IGNORED_OPS,
        CheckpointError as CheckpointError,
        CheckpointFunction as CheckpointFunction,
        CheckpointPolicy as CheckpointPolicy,
        DefaultDeviceType as DefaultDeviceType,
        SelectiveCheckpointContext as SelectiveCheckpointContext,
        check_backward_validity as check_backward_validity,
        create_selective_checkpoint_contexts as create_selective_checkpoint_contexts,
        detach_variable as detach_variable,
        get_device_states as get_device_states,
        noop_context_fn as noop_context_fn,
        set_checkpoint_debug_enabled as set_checkpoint_debug_enabled,
        set_checkpoint_early_stop as set_checkpoint_early_stop,
        set_device_states as set_device_states,
    )

try:
    from actckpt import _C  # noqa: F401 - built with the package
except ImportError as _error:
    if _importlib_util.find_spec("actckpt._C") is not None:
        raise  # the error says what is wrong
    raise ImportError(
        f"actckpt is imported from {__path__[0]}, where its C++ extension is not built: a clone hides the package that "
        "is installed. Run in another folder, or build it in place: pip install -e ."
    ) from _error

from actckpt import (
    _bind,  # noqa: F401 - imported for its effect
    errors,
    memory,
    policies,
    rng,
    te,
)
from actckpt._blocks.model_report import ModelReport
from actckpt._replay.schedule import ReplayGraph
from actckpt._text.places import Place
from actckpt._version import __version__
from actckpt.action import Action, SavedTensorInfo
from actckpt.api import checkpoint, checkpoint_sequential, offload
from actckpt.blocks import apply, remove, report
from actckpt.budgets import plan
from actckpt.comparison import Comparison, compare
from actckpt.config import Settings, configure
from actckpt.errors import ActckptWarning
from actckpt.estimation import Estimate, Target, estimate
from actckpt.memory import explain_oom
from actckpt.memory_labels import label_memory
from actckpt.memory_profile import MemoryProfile, profile
from actckpt.planner.plans import Plan
from actckpt.regions import region
from actckpt.statistics import Stats, reset_stats, stats
from actckpt.tracing import trace

__all__ = [
    "ActckptWarning",
    "Action",
    "Comparison",
    "Estimate",
    "MemoryProfile",
    "ModelReport",
    "Place",
    "Plan",
    "ReplayGraph",
    "SavedTensorInfo",
    "Settings",
    "Stats",
    "Target",
    "__version__",
    "apply",
    "checkpoint",
    "checkpoint_sequential",
    "compare",
    "configure",
    "errors",
    "estimate",
    "explain_oom",
    "label_memory",
    "memory",
    "offload",
    "plan",
    "planner",
    "policies",
    "profile",
    "region",
    "remove",
    "report",
    "reset_stats",
    "rng",
    "stats",
    "te",
    "trace",
]


def _name_public_places(module: _types.ModuleType, *behind: str) -> None:
    """Set `__module__` of classes and functions from rooms `behind` a public module, for tracebacks and help()."""
    for public in module.__all__:
        member = getattr(module, public) if public != "planner" else None  # imported lazily
        if getattr(member, "__module__", "").startswith(behind):
            if "__annotations__" in vars(member):
                member.__annotations__ = _typing.get_type_hints(member)  # evaluated in the module that defines it
            member.__module__ = module.__name__


_name_public_places(errors, "actckpt._")
_name_public_places(_sys.modules[__name__], "actckpt._")
_name_public_places(rng, "actckpt._")


def __getattr__(name: str) -> _typing.Any:
    if name == "planner":  # imported at first use: most programs do not need it
        return _importlib.import_module("actckpt.planner")
    if name in _torch_checkpoint.__all__:
        return getattr(_torch_checkpoint, name)
    advice = f": it is in {__name__}.errors" if hasattr(errors, name) else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return __all__
