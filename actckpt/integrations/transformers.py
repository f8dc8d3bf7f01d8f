"""Models and trainers of Transformers, and so of TRL and PEFT: actckpt behind the library's own switches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from actckpt._blocks.applied import applied_blocks
from actckpt._blocks.choosing import check_model
from actckpt.blocks import apply, remove
from actckpt.planner.plans import Plan
from actckpt.policies import Policy

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["callback", "disable", "enable"]

#: The library's methods of a model, before version 5 and from it on, and those that stand in for them.
_SWITCHES = {
    f"{kind}_checkpointing_{what}": f"turn_{'on' if what == 'enable' else 'off'}"
    for kind in ("gradient", "activation")
    for what in ("enable", "disable")
}


def enable(model: torch.nn.Module, policy: Policy | Plan | None = None, **options: Any) -> tuple[str, ...]:
    """Checkpoint the blocks of a model with actckpt, now and wherever somebody turns checkpointing on.

    As `actckpt.apply(model, ...)`; and `model.gradient_checkpointing_enable()`, which trainers call
    (`gradient_checkpointing=True`, the default of TRL), turns this on in place of the library's own, which is off then.

    Args:
        model: a model of Transformers, or one of PEFT around it; changed in place. Before or after LoRA is added.
        policy: of `actckpt.apply`. None: recompute, or what a budget says.
        **options: keywords of `actckpt.apply`, for example `budget` or `blocks`.
    Returns:
        The qualified names of the blocks that are checkpointed now.
    Raises:
        BlocksError, TypeError, ValueError: as `actckpt.apply`, or `gradient_checkpointing_enable` is given options.
    """
    check_model(model, "enable")
    given = options if policy is None else {"policy": policy, **options}
    names = apply(model, **given)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):  # the library's own is on
            module.gradient_checkpointing = False  # type: ignore[assignment]
    stand_in = _StandIn(model, given, {name: _switch_before(model, name) for name in _SWITCHES})
    for name, method in _SWITCHES.items():
        setattr(model, name, getattr(stand_in, method))
    return names


def disable(model: torch.nn.Module) -> None:
    """Undo `enable`: blocks run as they are, and the switches of the model are the library's. May be called again."""
    check_model(model, "disable")
    for name in _SWITCHES:
        stand_in = getattr(model.__dict__.get(name), "__self__", None)
        if isinstance(stand_in, _StandIn):
            stand_in.turn_off()
            delattr(model, name)
            if stand_in.replaced[name] is not None:
                setattr(model, name, stand_in.replaced[name])


def callback(policy: Policy | Plan | None = None, **options: Any) -> TrainerCallback:
    """Return a callback for `Trainer`, and so for those of TRL: `enable` while it trains, `disable` afterwards.

    Args:
        policy: as in `enable`.
        **options: as in `enable`. Beside a budget, `optimizer` is that of the trainer.
    """
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any = None, **__: Any) -> None:
            disable(model)  # an attempt before this one was given up, with batches that were too large
            more = {"optimizer": optimizer} if {"budget", "activation_budget"} & options.keys() else {}
            enable(model, policy, **{**more, **options})

        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            disable(model)

    return Callback()


def _switch_before(model: torch.nn.Module, name: str) -> Any:
    """Return what stood on the instance for a switch before the first `enable`, None: the method of its class."""
    stand_in = getattr(model.__dict__.get(name), "__self__", None)
    return stand_in.replaced[name] if isinstance(stand_in, _StandIn) else model.__dict__.get(name)


@dataclasses.dataclass(eq=False)
class _StandIn:
    """Takes the place of the switches of one model. Its methods follow the model into copies and files."""

    model: torch.nn.Module
    given: dict[str, Any]
    #: What stood in the place of a method on the instance before.
    replaced: dict[str, Any]

    def turn_on(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Take what the library's take, and refuse what would be left out."""
        options |= {**(options.pop("activation_checkpointing_kwargs", None) or gradient_checkpointing_kwargs or {})}
        usual = {"use_reentrant": options.get("use_reentrant"), "every_n_layers": 1, "offload": False}
        asked = sorted(name for name, value in options.items() if name not in usual or value != usual[name])
        if asked:
            raise ValueError(
                f"{type(self.model).__name__}: gradient checkpointing with {', '.join(asked)}, which is the library's, "
                "but actckpt checkpoints this model. Leave it out, and pass enable a policy, blocks or options."
            )
        if not applied_blocks(self.model):
            apply(self.model, **self.given)

    def turn_off(self) -> None:
        if applied_blocks(self.model):
            remove(self.model)
