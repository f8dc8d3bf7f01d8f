"""A callback for Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from actckpt._budget.budget_config import has_budget
from actckpt._core.optimizers import trains
from actckpt.blocks import apply, remove
from actckpt.planner.plans import Plan
from actckpt.policies import Policy

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["callback"]


def callback(policy: Policy | Plan | None = None, *, module: str = "", **options: Any) -> Callback:
    """Return a callback that checkpoints the blocks of a LightningModule while a Trainer fits it.

    It calls `actckpt.apply` when the fit starts and `actckpt.remove` when it ends, also after an error. A strategy
    shards the module before that: with sharding, call `actckpt.apply` in `configure_model` instead.

    Args:
        policy: of `actckpt.apply`. None: recompute, or what a budget says.
        module: the name of the part to pass to `apply`, for example `"net"`; default: the whole module. With a budget
            it
            is the part that `training_step` calls, unless that is the module itself.
        **options: keyword arguments of `actckpt.apply`. With a budget, `optimizer` is set to those of the Trainer.
    """
    # The package that the program uses: both have the same code, but a Trainer accepts only its own callbacks.
    is_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    base = importlib.import_module("pytorch_lightning" if is_old else "lightning.pytorch").Callback

    applied: list[torch.nn.Module] = []

    class Applied(base):  # type: ignore[misc, valid-type]
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            more: dict[str, Any] = {} if policy is None else {"policy": policy}
            part = pl_module.get_submodule(module)
            if has_budget(options):
                more["optimizer"] = [optimizer for optimizer in trainer.optimizers if trains(optimizer, part)]
            apply(part, **{**more, **options})
            applied.append(part)

        def on_fit_end(self, *_: Any) -> None:
            remove(applied.pop())

        def on_exception(self, *_: Any) -> None:
            for part in applied:
                remove(part)
            applied.clear()

    return Applied()
