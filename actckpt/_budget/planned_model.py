"""Facts about the model that a plan was made for, as plain data, and the check of another model against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt.errors import BlocksError
from actckpt.planner.plans import Plan

__all__ = ["check_planned_for", "facts_of"]

#: Part of the names of modules inside a `torch.compile` wrapper.
_COMPILED = "_orig_mod."
_OTHER_TORCH = WarningText(
    "apply: the plan was made with torch {planned}, and this is {present}: operators may save other values, and take "
    "other times. Gradients are the same; memory may exceed the budget.",
    "Make the plan again with the present version.",
)
_AGAIN = "Make the plan again with actckpt.plan, or pass the budget to apply, which plans while the model trains."


def facts_of(model: torch.nn.Module, blocks: Iterable[str | None]) -> dict[str, Any]:
    """Return the facts that a plan depends on: the torch version, block types, and parameter shapes.

    Args:
        blocks: their qualified names; None stands for what runs outside of them.
    """
    names = dict.fromkeys(name for name in blocks if name is not None)
    return {
        "type": type(model).__name__,
        "torch": torch.__version__,
        "blocks": {name: _types(model.get_submodule(name)) for name in names},
        "parameters": _parameters(model),
    }


def _types(module: torch.nn.Module) -> list[str]:
    """Return the class names of a module and its bases; for a compiled module, those of the inner one.

    Libraries replace a module's class by a subclass (sharding, parametrizations).
    """
    bases = type(getattr(module, "_orig_mod", module)).__mro__
    return [base.__name__ for base in bases[: max(bases.index(torch.nn.Module), 1)]]


def _parameters(model: torch.nn.Module) -> dict[str, list[Any]]:
    return {name.replace(_COMPILED, ""): _described(parameter) for name, parameter in model.named_parameters()}


def _described(parameter: torch.nn.Parameter) -> list[Any]:
    shape = None if is_lazy(parameter) else list(parameter.shape)  # of the full parameter, if it is sharded
    return [shape, str(parameter.dtype).removeprefix("torch."), parameter.requires_grad]


def check_planned_for(plan: Plan, model: torch.nn.Module) -> None:
    """Raise a BlocksError if a plan was made for a different model; warn if for a different torch."""
    assert plan.blocks is not None
    named = dict(model.named_modules())
    names = list(dict.fromkeys(name for name in plan.blocks if name is not None))
    if missing := [name for name in names if name not in named]:
        raise BlocksError(
            f"apply: the plan is one of another model: {len(missing)} of its {len(names)} blocks are not in "
            f"{type(model).__name__}, the first is {missing[0]!r}. {_AGAIN}"
        )
    if plan.model is None:
        return
    difference = _other_block(plan.model["blocks"], named) or _other_parameter(plan.model["parameters"], model)
    if difference:
        raise BlocksError(f"apply: the plan was made for another {plan.model['type']}: {difference}. {_AGAIN}")
    if plan.model["torch"].split(".")[:2] != torch.__version__.split(".")[:2]:
        warn_user(_OTHER_TORCH, planned=plan.model["torch"], present=torch.__version__)


def _other_block(then: Mapping[str, list[str]], named: Mapping[str, torch.nn.Module]) -> str:
    """Describe a block of another type: neither derives from the other's class."""
    for name, kinds in then.items():
        now = _types(named[name])
        if kinds[0] not in now and now[0] not in kinds:
            return f"block {name!r} is a {now[0]} here, and was a {kinds[0]}"
    return ""


def _other_parameter(then: Mapping[str, list[Any]], model: torch.nn.Module) -> str:
    now = _parameters(model)
    for names, others, where in ((now, then, "not in that one"), (then, now, "in that one alone")):
        if more := [name for name in names if name not in others]:
            return f"{len(more)} of {len(names)} parameters are {where}, the first is {more[0]!r}"
    for name, (shape, dtype, is_trained) in now.items():
        if shape != then[name][0]:
            return f"parameter {name!r} has the shape {_text(shape)} here, and had {_text(then[name][0])}"
        if dtype != then[name][1]:
            return f"parameter {name!r} is of {dtype} here, and was of {then[name][1]}"
        if is_trained != then[name][2]:
            return f"parameter {name!r} is {'trained' if is_trained else 'frozen'} here, and was not"
    return ""


def _text(shape: list[int] | None) -> str:
    return "none yet" if shape is None else str(tuple(shape))
