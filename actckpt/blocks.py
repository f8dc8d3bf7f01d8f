"""`apply` and `remove`: checkpoint the blocks of a model without changing its code.

How blocks are patched is in actckpt/_blocks/applied.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, get_args

import torch
from typing_extensions import Unpack

from actckpt._blocks.applied import (
    applied_blocks,
    blocks_of,
    check_all_of_budget,
    check_no_copy,
    count_calls,
    find_blocks,
    forwards_in,
    patch,
    unpatch,
    watch,
)
from actckpt._blocks.choosing import Blocks, check_model
from actckpt._blocks.model_report import GroupBy, ModelReport
from actckpt._blocks.other_checkpointing import restore
from actckpt._blocks.planned_size import warns_of_larger
from actckpt._blocks.report_data import keep_report, kept_report, report_data
from actckpt._budget.budget_config import BudgetConfig, OnInfeasible, check_budget, has_budget
from actckpt._budget.planned_model import check_planned_for
from actckpt._budget.running import RECOMPUTE, settings_of
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._cycles.loop import BudgetLoop
from actckpt._offload.session import Destination
from actckpt._options import ApplyKeywords, CheckpointOptions
from actckpt._text.suggestions import did_you_mean
from actckpt.action import Action
from actckpt.api import offload
from actckpt.planner.plans import Plan
from actckpt.policies import Policy, choice_of

__all__ = ["apply", "remove", "report"]

_MOST_OF_POLICY = 60


class OffloadKeywords(TypedDict, total=False):
    """Options that `apply` passes to `offload`."""

    to: Destination
    min_bytes: int | str


class BlockKeywords(ApplyKeywords, OffloadKeywords, total=False):
    """The other keywords of `apply`; which of them apply depends on the policy."""


_OFFLOAD_OPTIONS = frozenset(OffloadKeywords.__annotations__)
_BUDGET_OPTIONS = frozenset({"budget", "activation_budget", "optimizer", "pins", "race", "on_infeasible"})
#: Their defaults without a budget.
_WITHOUT_BUDGET = {"optimizer": None, "pins": None, "race": True, "on_infeasible": "warn"}
_CHECKPOINT_OPTIONS = frozenset(CheckpointOptions._fields) - {"policy"}
_BUDGET = "a budget in place of a policy"
#: All option names, by when they apply.
_OPTIONS = {"policy='offload'": _OFFLOAD_OPTIONS, _BUDGET: _BUDGET_OPTIONS, "other policies": _CHECKPOINT_OPTIONS}
OPTION_NAMES = frozenset({"policy", "blocks"}).union(*_OPTIONS.values())


def apply(
    model: torch.nn.Module,
    policy: Policy | Plan | None = "recompute",
    blocks: Blocks | None = None,
    *,
    budget: float | str | None = None,
    activation_budget: float | str | None = None,
    optimizer: Optimizers = None,
    pins: Mapping[Any, Action | str] | None = None,
    race: bool = True,
    on_infeasible: OnInfeasible = "warn",
    **options: Unpack[BlockKeywords],
) -> tuple[str, ...]:
    """Checkpoint the blocks of `model`: each call of such a block becomes a region.

    Args:
        model: changed in place.
        policy: `"recompute"` or None: as in `checkpoint`. `"offload"`: each call runs under `offload`. Any other policy
            of `region`: each call is such a region. A `Plan` that `actckpt.plan` made for this model: its blocks run by
            the plan, without further keywords.
        blocks: which of its modules: a type or several, qualified names (`"layers.0"`), also with wildcards, which
            stop at dots (`"layers.*"`: each layer, `"**.mlp"`: every mlp), or a predicate on modules. Of nested matches
            the outermost are used; a name without wildcards is always used. None: the repeated blocks. These are
            modules of a kind that repeats, in rows (ModuleList, Sequential, ModuleDict, numbered attributes), neither
            stages of many blocks nor small parts of blocks. They are chosen for the lowest peak; see
            actckpt/_blocks/finding.py.
        budget: instead of a policy, the maximum of all memory at any moment of a step, as in `actckpt.plan`. The first
            step recomputes every block and is measured. With `blocks=None`, other modules that hold more than a
            twentieth of the activations may become blocks then (actckpt/_cycles/added_blocks.py says which), and the
            second step is measured, too. From the next step on, the fastest plan that is predicted to fit runs; the
            steps after it may try others. Each kind of step has its own plan: input sizes, autocast, training or
            evaluation mode, trained parameters.
            `actckpt.report(model).plan` is the plan, None until it is made.
        activation_budget: instead of `budget`, the maximum number of bytes that a step may add to the memory in use
            before it, without gradients of parameters.
        optimizer: the one that trains the model, or several in a list: its state counts toward `budget`.
        pins: values and the actions that plans must give them, as in `actckpt.planner.solve`.
        race: whether steps try the plan and simple policies in turn; the fastest one is kept. Not with `pins`.
        on_infeasible: if no plan is predicted to fit: `"warn"` runs the smallest plan and warns, with the smallest
            budget and what holds the memory; `"raise"` raises.
        **options: keywords of `checkpoint`, or with `policy="offload"` of `offload`, for every block.
    Returns:
        The qualified names of the blocks that are checkpointed now. Those that did not run in the first step that
        calls backward are named in one warning, and in `actckpt.report(model)`.
    Raises:
        BlocksError: no block matches, a name matches nothing, or a block is checkpointed already.
        TypeError: `model` is no module.
        ValueError: the policy, the budget, an action of `pins` or an option is unknown, or `offload` rejects its value.
            At the forward that would first run the plan: a pin names nothing.
        PlanInfeasibleError: with `on_infeasible="raise"`, at the forward that would first run the plan: no plan is
            predicted to fit the budget. Otherwise, only if pins leave no plan for any budget.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> actckpt.apply(model)
        ('0', '1', '2')
        >>> actckpt.remove(model)
        ('0', '1', '2')
    """
    check_model(model, "apply")
    budget_options = {"budget": budget, "activation_budget": activation_budget, "optimizer": optimizer, "pins": pins}
    budget_options |= {"race": race, "on_infeasible": on_infeasible}
    if has_budget(budget_options):
        return _apply_budget(model, policy, blocks, budget_options, options)
    extra = {name: budget_options[name] for name, default in _WITHOUT_BUDGET.items() if budget_options[name] != default}
    others: dict[str, Any] = {**options, **extra}
    if isinstance(policy, Plan):
        return _apply_plan(model, policy, blocks, others)
    if policy is Action.OFFLOAD:
        policy = "offload"
    if policy is not None:
        choice_of(policy)  # raises if it is invalid
    _check_options(policy, others)
    chosen = find_blocks(model, blocks, "apply")
    names = patch(chosen, {name: {"policy": policy, **others} for name in chosen}, model)
    for forward in forwards_in(chosen).values():
        forward.group.policy = f"policy={_named(policy)}"
    watch(chosen)
    return names


def _apply_budget(
    model: torch.nn.Module,
    policy: Any,
    blocks: Blocks | None,
    budget_options: dict[str, Any],
    options: Mapping[str, Any],
) -> tuple[str, ...]:
    if not (isinstance(policy, str) and policy == "recompute"):
        what = repr(policy) if policy is None or isinstance(policy, str) else type(policy).__name__
        raise ValueError(f"apply: a budget beside policy={what}. Pass one of them: the budget decides the policy.")
    if unknown := sorted(options):
        known = ", ".join(sorted(_BUDGET_OPTIONS))
        near = did_you_mean(unknown, sorted(_BUDGET_OPTIONS))
        raise ValueError(f"apply: unknown option {', '.join(unknown)} beside a budget.{near} Known: {known}.")
    optimizers = optimizers_of(budget_options.pop("optimizer"), model, "apply")
    adds_blocks = blocks is None and not budget_options["pins"]
    config = BudgetConfig(optimizers=optimizers, adds_blocks=adds_blocks, **budget_options)
    check_budget(budget_options, model, "apply")
    chosen = find_blocks(model, blocks, "apply")
    names = patch(chosen, dict.fromkeys(chosen, RECOMPUTE), model)
    forwards = forwards_in(chosen)
    training = BudgetLoop(model, forwards, config)
    for forward in forwards.values():
        forward.group.training, forward.group.policy = training, config.text
    watch(chosen)
    return names


def _apply_plan(model: torch.nn.Module, plan: Plan, blocks: Blocks | None, options: dict[str, Any]) -> tuple[str, ...]:
    if blocks is not None or options:
        passed = ", ".join(["blocks"] * (blocks is not None) + sorted(options))
        raise ValueError(f"apply: {passed} beside a plan, which has blocks and options of its own. Leave them out.")
    if plan.blocks is not None:
        check_planned_for(plan, model)
    settings = settings_of(plan, model)
    chosen = find_blocks(model, list(settings), "apply")
    names = patch(chosen, settings, model)
    forwards = forwards_in(chosen)
    count_calls(model, forwards.values())
    for forward in forwards.values():
        forward.run_around_compiled()
        forward.group.plan, forward.group.policy = plan, "policy=<a plan>"
    if (shown := warns_of_larger(plan)) is not None:
        block, size = shown
        forwards[block].planned_size = size
    watch(chosen)
    return names


def _named(policy: Policy | None) -> str:
    """Return a policy as written in `apply`; for a function or a long table, its name or type."""
    if policy is None or isinstance(policy, Action):
        return repr("recompute" if policy is None else policy.value)
    text = str(getattr(policy, "__qualname__", repr(policy)))
    return text if len(text) <= _MOST_OF_POLICY else f"<a {type(policy).__name__}>"


def _check_options(policy: Policy | None, options: dict[str, Any]) -> None:
    known = _OFFLOAD_OPTIONS if policy == "offload" else _CHECKPOINT_OPTIONS
    unknown = set(options) - known
    if unknown:
        elsewhere = [f" With {where} it is one." for where, options in _OPTIONS.items() if unknown <= options]
        hint = elsewhere[0] if elsewhere else did_you_mean(sorted(unknown - OPTION_NAMES), sorted(OPTION_NAMES))
        more = "" if elsewhere else f" With {_BUDGET}: {', '.join(sorted(_BUDGET_OPTIONS))}."
        raise ValueError(
            f"apply: unknown option {', '.join(sorted(unknown))} for policy={policy!r}.{hint} "
            f"Known: {', '.join(sorted(known))}.{more}"
        )
    if policy == "offload":
        offload(**options)  # raises if the options are invalid
    else:
        CheckpointOptions(policy=policy, **options).check({})


def remove(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `apply` for every block of `model`. `report(model)` still returns the last report.

    Returns:
        The qualified names of the blocks that were checkpointed; if `model` is itself one, the name of its type.
    Raises:
        BlocksError: there are none, or `model` is a shallow copy of the one passed to `apply`, or a part of one that
            has a budget, whose plan covers all of its blocks.
    """
    applied = blocks_of(model, "remove")
    check_no_copy(model, applied, "remove")
    check_all_of_budget(model, applied, "remove")
    keep_report(model, report_data(_readable(applied)))
    unpatch(applied)
    restore(model)
    return tuple(_readable(applied))


def _readable(applied: dict[str, Any]) -> dict[str, Any]:
    """Return blocks by display name: if the model is the block, which has no name, that of its type."""
    return {name or type(block).__name__: block for name, block in applied.items()}


def _check_rows(group_by: str, top: int | None) -> None:
    if group_by not in get_args(GroupBy):
        near = did_you_mean([str(group_by)], get_args(GroupBy), show=repr)
        raise ValueError(f"report: group_by={group_by!r}. Pass 'operator', 'module' or 'type'.{near}")
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
        raise ValueError(f"report: top={top!r}. Pass the number of rows, from 1 on, or None for all.")


def report(model: torch.nn.Module, *, group_by: GroupBy = "operator", top: int | None = None) -> ModelReport:
    """Return what the blocks of an applied model did: which of them ran, and what became of what they saved.

    The first step is recorded, the first one of each plan, and the one after each report; others have no overhead. A
    step lasts until its backward. After `remove`, and until the next `apply`, this returns the last report.

    Args:
        model: the one passed to `apply`.
        group_by: one row per operator (`"(rerun)"` for what rerun blocks save, `"(input)"` for what they hold for the
            rerun, `"(as it is)"` for what blocks hold of which a plan keeps everything), per module, with identical
            blocks combined, or per type of modules.
        top: the number of rows, largest first; the others are summed up in one more. None: all.
    Raises:
        BlocksError: no block of `model` is checkpointed, or was before `remove`.
        ValueError: invalid `group_by` or `top`.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block())
        >>> _ = actckpt.apply(model)
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> found = actckpt.report(model, group_by="module")
        >>> found.blocks_ran, [(row.name, row.recomputed_bytes, row.kept_bytes) for row in found.rows]
        (('0', '1'), [('0-1', 0, 64), ('0-1.1', 64, 0)])
    """
    _check_rows(group_by, top)
    check_model(model, "report")
    if not applied_blocks(model) and (kept := kept_report(model)) is not None:
        modules = dict(model.named_modules())
        blocks = {name: modules.get(name, model) for name in kept.blocks}
        return kept.report(model, blocks, group_by, top, is_removed=True)
    applied = _readable(blocks_of(model, "report"))
    data = report_data(applied)
    for module in applied.values():
        module.forward.group.is_watching = True
    return data.report(model, applied, group_by, top)
