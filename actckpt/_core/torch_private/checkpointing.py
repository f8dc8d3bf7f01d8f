"""Private names of torch's own checkpointing: its selective policies, contexts that set early stop and debug mode."""

from collections.abc import Callable
from typing import Any

from actckpt._core.torch_private.lookup import attribute, lookup, reader

_early_stop = reader("torch.utils.checkpoint._enable_checkpoint_early_stop")
_debug_enabled = reader("torch.utils.checkpoint._checkpoint_debug_enabled")
_selective_mode = lookup("torch.utils.checkpoint._CachingTorchDispatchMode")


def forced_by_context() -> tuple[bool | None, bool | None]:
    """Return the values of torch's `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled`.

    None outside of such a context.
    """
    return _early_stop(), _debug_enabled()


def selective_policy(context: object) -> Callable[..., Any] | None:
    """Return the policy function of torch's selective checkpointing, if `context` is its forward mode."""
    if not isinstance(context, _selective_mode) or type(context) is not _selective_mode:
        return None
    policy: Callable[..., Any] = attribute(context, "policy_fn")
    return policy


def set_selective_policy(context: Any, policy: Callable[..., Any]) -> None:
    """Set the policy function of a mode for which `selective_policy` returns one."""
    context.policy_fn = policy
