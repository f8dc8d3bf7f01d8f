"""The methods that the demo compares. A new one is an entry in `METHODS` and a function applied to a model.

What a method needs is imported in its function, so that `--help` can list the methods without loading torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actckpt._text.misspelt import did_you_mean

if TYPE_CHECKING:
    from actckpt.demo.model import LanguageModel

__all__ = ["METHODS", "REFERENCE", "Method", "budgeted", "choose_methods"]


@dataclass(frozen=True)
class Method:
    """A way of holding activations.

    Attributes:
        name: what the user types and the table shows.
        description: one line.
        apply: changes a model that nobody else uses, before its first step.
        may_not_fit: it may say that what was asked for cannot be, and so runs before all others.
    """

    name: str
    description: str
    apply: Callable[[LanguageModel], None]
    may_not_fit: bool = False


def _keep_everything(model: LanguageModel) -> None:
    """Leave the model as it is."""


def _torch_checkpoint(model: LanguageModel) -> None:
    from torch.utils import checkpoint as torch_checkpoint

    for block in model.blocks:
        block.forward = functools.partial(torch_checkpoint.checkpoint, block.forward, use_reentrant=False)


def _torch_selective(model: LanguageModel) -> None:
    import torch
    from torch.utils import checkpoint as torch_checkpoint

    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for block in model.blocks:
        block.forward = functools.partial(
            torch_checkpoint.checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )


def _actckpt_checkpoint(model: LanguageModel) -> None:
    import actckpt
    from actckpt.demo.model import Block

    actckpt.apply(model, policy="recompute", blocks=Block)


#: The demo's tensors are small; `offload` leaves those below 1 MiB alone by default.
_MIN_OFFLOAD_BYTES = 1 << 16
#: And all of them would fit into the window that is read ahead by default.
_READ_AHEAD_BYTES = 8 << 20


def _actckpt_offload(model: LanguageModel) -> None:
    import actckpt
    from actckpt.demo.model import Block

    actckpt.configure(max_inflight=_READ_AHEAD_BYTES)
    actckpt.apply(model, policy="offload", blocks=Block, min_bytes=_MIN_OFFLOAD_BYTES)


def _actckpt_both(model: LanguageModel) -> None:
    import actckpt
    from actckpt.demo.model import Block

    actckpt.configure(max_inflight=_READ_AHEAD_BYTES)
    actckpt.apply(model, policy="recompute", blocks=Block)
    forward = model.forward

    def offloaded(*args: Any) -> Any:
        with actckpt.offload(min_bytes=_MIN_OFFLOAD_BYTES):
            return forward(*args)

    model.forward = offloaded  # type: ignore[method-assign, assignment]


def _keep_matmuls(model: LanguageModel) -> None:
    import torch

    import actckpt
    from actckpt.demo.model import Block

    actckpt.apply(model, policy=[torch.ops.aten.mm], blocks=Block)


def _offload_matmuls(model: LanguageModel) -> None:
    import torch

    import actckpt
    from actckpt.demo.model import Block

    actckpt.configure(max_inflight=_READ_AHEAD_BYTES)
    policy = actckpt.policies.PerOp({torch.ops.aten.mm: actckpt.Action.OFFLOAD}, default=actckpt.Action.RECOMPUTE)
    actckpt.apply(model, policy=policy, blocks=Block)


def _recompute_by_replay(model: LanguageModel) -> None:
    import actckpt

    for block in model.blocks:
        block.forward = actckpt.region("recompute")(block.forward)


def budgeted(activation_budget: str) -> Method:
    """Return the method that finds a plan for a budget while it trains."""

    def apply(model: LanguageModel) -> None:
        import actckpt
        from actckpt.demo.model import Block

        actckpt.apply(model, blocks=Block, activation_budget=activation_budget, on_infeasible="raise")

    description = f"find the fastest plan for {activation_budget} of activations"
    return Method("budget", description, apply, may_not_fit=True)


REFERENCE = Method("none", "keep every activation", _keep_everything)
METHODS: tuple[Method, ...] = (
    REFERENCE,
    Method("torch-checkpoint", "recompute each block with torch.utils.checkpoint", _torch_checkpoint),
    Method("torch-keep-matmuls", "keep matmuls, recompute the rest with torch's selective contexts", _torch_selective),
    Method("actckpt-checkpoint", "recompute each block with actckpt.apply", _actckpt_checkpoint),
    Method("actckpt-offload", "move what each block saves to a store", _actckpt_offload),
    Method(
        "actckpt-both",
        "recompute each block, move its inputs and all else that is saved to a store",
        _actckpt_both,
    ),
    Method("keep-matmuls", "keep matmuls, recompute the rest operator by operator", _keep_matmuls),
    Method("offload-matmuls", "move matmuls to a store, recompute the rest operator by operator", _offload_matmuls),
    Method("recompute-by-replay", "recompute each block operator by operator", _recompute_by_replay),
)


def choose_methods(names: Iterable[str]) -> tuple[Method, ...]:
    """Look methods up by name.

    Args:
        names: as typed, repetitions ignored; none means all methods.

    Returns:
        The methods in the registry's order, with "none" first: the others are compared with it.

    Raises:
        ValueError: a name is not in the registry.
    """
    known = {method.name: method for method in METHODS}
    wanted = set(names)
    for name in sorted(wanted - known.keys()):
        hint = did_you_mean([name], list(known), cutoff=0.3)
        raise ValueError(f"--methods has unknown {name!r}.{hint} Known are {', '.join(known)}.")
    return tuple(m for m in METHODS if not wanted or m.name in wanted or m is REFERENCE)
