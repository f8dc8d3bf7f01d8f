"""Private names of torch's own checkpointing: its selective policies, contexts that set early stop and debug mode."""

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def forced_by_context() -> tuple[bool | None, bool | None]:
    """Return what torch's `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` ask for.

    None outside of such a context.
    """
    module: Any = torch.utils.checkpoint
    return module._enable_checkpoint_early_stop, module._checkpoint_debug_enabled


def selective_policy(context: object) -> Callable[..., Any] | None:
    """Return the policy function of torch's selective checkpointing, if `context` is its mode of the forward."""
    names: Any = torch.utils.checkpoint
    return context.policy_fn if type(context) is names._CachingTorchDispatchMode else None  # type: ignore[attr-defined]


def set_selective_policy(context: Any, policy: Callable[..., Any]) -> None:
    """Let a mode for which `selective_policy` returns one ask another policy function."""
    context.policy_fn = policy
