"""A callback for the trainers of Transformers and TRL. Their models need only `actckpt.apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actckpt._blocks.applied import applied_blocks
from actckpt._budget.budget_config import has_budget
from actckpt.blocks import apply, remove
from actckpt.planner.plans import Plan
from actckpt.policies import Policy

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["callback"]


def callback(policy: Policy | Plan | None = None, **options: Any) -> TrainerCallback:
    """Return a callback for `Trainer`, including those of TRL: `apply` while it trains, `remove` afterwards.

    Args:
        policy: of `actckpt.apply`. None: recompute, or what a budget says.
        **options: keyword arguments of `actckpt.apply`. With a budget, `optimizer` is set to that of the trainer.
    """
    from transformers import TrainerCallback

    keywords = options if policy is None else {"policy": policy, **options}

    class Callback(TrainerCallback):
        is_applied = False

        def on_train_begin(self, *_: Any, model: Any, optimizer: Any = None, **__: Any) -> None:
            self.on_train_end(model=model)  # an earlier attempt was given up because its batches were too large
            more = {"optimizer": optimizer} if has_budget(options) else {}
            apply(model, **{**more, **keywords})
            self.is_applied = True

        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            if self.is_applied and applied_blocks(model):
                remove(model)
            self.is_applied = False

    return Callback()
