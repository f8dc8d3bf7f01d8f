"""`apply` and `remove`: checkpoint the blocks of a model without changing its code.

How blocks are patched is in actckpt/_blocks/applied.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args, overload

import torch
from typing_extensions import Unpack

from actckpt._blocks.applied import (
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
from actckpt._blocks.model_report import GroupBy, ModelReport, rows_of, stayed, sums_of
from actckpt._blocks.planned_size import warns_of_larger
from actckpt._budget.planned_model import check_planned_for
from actckpt._budget.running import RECOMPUTE, settings_of
from actckpt._budget.training import BudgetedTraining
from actckpt._budget.wanted import Wanted, check_wanted
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._offload.session import Destination
from actckpt._options import ApplyKeywords, CheckpointOptions
from actckpt._text.misspelt import did_you_mean
from actckpt.action import Action
from actckpt.api import offload
from actckpt.planner.plans import Plan
from actckpt.policies import Policy, choice_of

__all__ = ["apply", "remove", "report"]

_NO_PLAN = (
    "No plan for the budget is made yet, and all blocks are checkpointed: it is made at the second forward with "
    "gradients of the model that was given to apply, for the first 16 kinds of steps, and not under torch.compile."
)
_STEP_OF_PLAN = "a step of the plan. Of blocks that run as they are, it has what the plan says."
_STEP_OF_OTHER = (
    "a step under another plan than the one that is shown (of another kind of step, or one that took turns with it): "
    "what blocks kept there says nothing of this one. The next step is recorded."
)
_NOT_RUN = "Nothing was recorded: no block has run yet. Run a step, forward and backward."
_NOTHING_RECORDED = (
    "Nothing was recorded: policy 'keep' leaves everything to autograd, so that the blocks hold what plain training "
    "holds (actckpt.region('keep', record=True) shows what); or they ran under torch.compile, or without gradients."
)
_NOTHING_OF_COPY = (
    "Nothing was recorded: these blocks are a copy of those of a model with a budget, and ran without gradients, or "
    "under torch.compile."
)


class OffloadKeywords(TypedDict, total=False):
    """What `apply` passes on to `offload`."""

    to: Destination
    min_bytes: int | str


class BudgetKeywords(TypedDict, total=False):
    """What `apply` takes to find a plan while the model trains."""

    budget: float | str
    activation_budget: int | str
    optimizer: Optimizers
    pins: Mapping[Any, Action | str]
    race: bool


_OFFLOAD_OPTIONS = frozenset(OffloadKeywords.__annotations__)
_BUDGET_OPTIONS = frozenset(BudgetKeywords.__annotations__)
_CHECKPOINT_OPTIONS = frozenset(CheckpointOptions._fields) - {"policy"}
_BUDGET = "a budget in place of a policy"
#: All of them, by when they are known.
_OPTIONS = {"policy='offload'": _OFFLOAD_OPTIONS, _BUDGET: _BUDGET_OPTIONS, "other policies": _CHECKPOINT_OPTIONS}
OPTION_NAMES = frozenset({"policy", "blocks"}).union(*_OPTIONS.values())


class _Default:
    """Stands for a policy that was not given."""

    def __repr__(self) -> str:
        return "'recompute'"


_DEFAULT = _Default()


@overload
def apply(
    model: torch.nn.Module,
    policy: Literal["offload", Action.OFFLOAD],
    blocks: Blocks | None = None,
    **options: Unpack[OffloadKeywords],
) -> tuple[str, ...]: ...


@overload
def apply(
    model: torch.nn.Module, *, blocks: Blocks | None = None, **options: Unpack[BudgetKeywords]
) -> tuple[str, ...]: ...


@overload
def apply(model: torch.nn.Module, policy: Plan) -> tuple[str, ...]: ...


@overload
def apply(
    model: torch.nn.Module,
    policy: Policy | None = "recompute",
    blocks: Blocks | None = None,
    **options: Unpack[ApplyKeywords],
) -> tuple[str, ...]: ...


def apply(
    model: torch.nn.Module, policy: Any = _DEFAULT, blocks: Blocks | None = None, **options: Any
) -> tuple[str, ...]:
    """Checkpoint the blocks of `model`: each call of such a block becomes a region.

    Args:
        model: changed in place.
        policy: `"recompute"` or None: as in `checkpoint`. `"offload"`: each call runs under `offload`. Any other policy
            of `region`: each call is such a region. A `Plan` that `actckpt.plan` made for this model: its blocks run as
            it says, without further keywords.
        blocks: which of its modules: a type or several, qualified names (`"layers.0"`), also with wildcards, which
            stop at dots (`"layers.*"`: each layer, `"**.mlp"`: every mlp), or a predicate on modules. Of matches inside
            each other the outermost are taken; a name without wildcards is always taken. None: the repeated blocks.
            These are modules of a kind that repeats, in rows (ModuleList, Sequential, ModuleDict, numbered attributes),
            neither stages of many blocks nor small parts of blocks, such that the least is held at the peak; NOTE [
            Blocks of a model ] in actckpt/_blocks/finding.py says how.
        **options: keywords of `checkpoint`, or of `offload`, for every block. In place of a policy, a budget:
            `budget` (all memory) or `activation_budget`, as in `actckpt.plan`, with `optimizer`, `pins` and `race`. The
            plan is then made while the model trains: the first step runs with all blocks checkpointed and measures;
            from the second on the fastest plan that is predicted to fit runs; with `race` (the default; `pins` leave
            nothing to choose) it takes turns with simple choices in the next steps, where they may be as fast, and the
            fastest stays. Each kind of step has a plan of its own: sizes of inputs, autocast, training or evaluation
            mode, what is trained; after 16 of them smaller sizes run the plans of larger ones.
            `actckpt.report(model).plan` is the plan, None until it is made. What is computed from outputs of the model
            counts as its graph shows, or as a device's allocator tells.
    Returns:
        The qualified names of the blocks that are checkpointed now. Blocks that did not run in the first step that
        calls backward are named in one warning, and in `actckpt.report(model)`.
    Raises:
        BlocksError: no block matches, a name matches nothing, or a block is checkpointed already.
        TypeError: `model` is no module.
        ValueError: the policy, the budget, an action of `pins` or an option is not known, or `offload` does not take
            its value. At the forward that would first run the plan: a pin names nothing.
        PlanInfeasibleError: at the forward that would first run the plan: no plan is predicted to fit the budget.

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
    if not {"budget", "activation_budget"}.isdisjoint(options):
        return _apply_budget(model, policy, blocks, options)
    if isinstance(policy, _Default):
        policy = "recompute"
    if isinstance(policy, Plan):
        return _apply_plan(model, policy, blocks, options)
    if policy is Action.OFFLOAD:
        policy = "offload"
    if policy is not None:
        choice_of(policy)  # raises if it is none
    _check_options(policy, options)
    chosen = find_blocks(model, blocks, "apply")
    names = patch(chosen, {name: {"policy": policy, **options} for name in chosen}, model)
    watch(chosen)
    return names


def _apply_budget(
    model: torch.nn.Module, policy: Any, blocks: Blocks | None, options: dict[str, Any]
) -> tuple[str, ...]:
    if not isinstance(policy, _Default):
        what = repr(policy) if isinstance(policy, str) else type(policy).__name__
        raise ValueError(f"apply: a budget beside policy={what}. Pass one of them: the budget decides the policy.")
    if unknown := sorted(set(options) - _BUDGET_OPTIONS):
        known = ", ".join(sorted(_BUDGET_OPTIONS))
        near = did_you_mean(unknown, sorted(_BUDGET_OPTIONS))
        raise ValueError(f"apply: unknown option {', '.join(unknown)} beside a budget.{near} Known: {known}.")
    optimizers = optimizers_of(options.pop("optimizer", None), model, "apply")
    given = {**dict.fromkeys(("budget", "activation_budget", "pins")), "race": True, **options}
    wanted = Wanted(optimizers=optimizers, **given)
    check_wanted(given, model, "apply")
    chosen = find_blocks(model, blocks, "apply")
    names = patch(chosen, dict.fromkeys(chosen, RECOMPUTE), model)
    forwards = forwards_in(chosen)
    training = BudgetedTraining(model, forwards, wanted)
    for forward in forwards.values():
        forward.together.training = training
    watch(chosen)
    return names


def _apply_plan(model: torch.nn.Module, plan: Plan, blocks: Blocks | None, options: dict[str, Any]) -> tuple[str, ...]:
    if blocks is not None or options:
        given = ", ".join(["blocks"] * (blocks is not None) + sorted(options))
        raise ValueError(f"apply: {given} beside a plan, which has blocks and options of its own. Leave them out.")
    if plan.blocks is not None:
        check_planned_for(plan, model)
    settings = settings_of(plan, model)
    chosen = find_blocks(model, list(settings), "apply")
    names = patch(chosen, settings, model)
    forwards = forwards_in(chosen)
    count_calls(model, forwards.values())
    for forward in forwards.values():
        forward.together.plan = plan
    if (found := warns_of_larger(plan)) is not None:
        block, size = found
        forwards[block].planned_size = size
    watch(chosen)
    return names


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
        offload(**options)  # raises if it cannot be called so


def remove(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `apply` for every block of `model`.

    Returns:
        The qualified names of the blocks that were checkpointed; where `model` is itself one, the name of its type.
    Raises:
        BlocksError: there are none, or `model` is a shallow copy of the one that was given to `apply`, or a part of one
            that has a budget, whose plan is for all of its blocks.
    """
    applied = blocks_of(model, "remove")
    check_no_copy(model, applied, "remove")
    check_all_of_budget(model, applied, "remove")
    unpatch(applied)
    return tuple(_readable(applied))


def _readable(applied: dict[str, Any]) -> dict[str, Any]:
    """Return blocks by names for people: where the model is the block, which has no name, that of its type."""
    return {name or type(block).__name__: block for name, block in applied.items()}


def _rescues(applied: dict[str, Any]) -> dict[str, int]:
    """Return how many forwards of each block ran out of memory and ran again, of those with any."""
    rescues = {name: block.forward.together.rescues[block.forward.name] for name, block in applied.items()}
    return {name: num for name, num in rescues.items() if num}


def _check_rows(group_by: str, top: int | None) -> None:
    if group_by not in get_args(GroupBy):
        near = did_you_mean([str(group_by)], get_args(GroupBy), show=repr)
        raise ValueError(f"report: group_by={group_by!r}. Pass 'operator', 'module' or 'type'.{near}")
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
        raise ValueError(f"report: top={top!r}. Pass the number of rows, from 1 on, or None for all.")


def report(model: torch.nn.Module, *, group_by: GroupBy = "operator", top: int | None = None) -> ModelReport:
    """Return what the blocks of an applied model did: which of them ran, and what became of what they saved.

    The first step is recorded, and the one after each report; others cost nothing. A step is up to its backward.

    Args:
        model: the one that was given to `apply`.
        group_by: one row per operator (`"(rerun)"` for what blocks that run again save, `"(input)"` for what they hold
            for it, `"(as it is)"` for what blocks hold of which a plan keeps everything), per module, with identical
            blocks together, or per type of modules.
        top: the number of rows, the largest; the others are summed up in one more. None: all.
    Raises:
        BlocksError: no block of `model` is checkpointed.
        ValueError: `group_by` or `top` is none of these.

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
    applied = _readable(blocks_of(model, "report"))
    ran = tuple(name for name, module in applied.items() if module.forward.has_run)
    together = {id(module.forward.together): module.forward.together for module in applied.values()}
    idle = dict.fromkeys(operator for blocks in together.values() for operator in blocks.matches.idle())
    plan = next((blocks.plan for blocks in together.values() if blocks.plan is not None), None)
    found = [
        (name, entry)
        for name, module in applied.items()
        for entry in module.forward.together.recording.entries_of(module.forward)
    ]
    is_first = any(blocks.recording.num_steps == 1 for blocks in together.values())
    for blocks in together.values():
        blocks.is_watching = True
    note = f"Recorded: {'the first step' if is_first else 'the step after the report before'}; the next one is, too."
    if small := stayed(found):
        note = f"{small}\n{note}"
    if plan is not None:
        is_of_it = any(blocks.recording.plan is plan for blocks in together.values())
        note = f"Recorded: {_STEP_OF_PLAN if is_of_it else _STEP_OF_OTHER}"
    trainings = [blocks.training for blocks in together.values() if blocks.training is not None]
    is_unplanned = plan is None and len(trainings) > 0
    if is_unplanned:  # the calls that were measured were none of training
        note, found = next((each.refused for each in trainings if each.refused), _NO_PLAN), []
    is_plain = plan is not None and plan.overhead_seconds == 0.0
    is_copy = not trainings and any(blocks.are_of_other_training for blocks in together.values())
    nothing = "" if is_plain else _NOT_RUN if not ran else _NOTHING_OF_COPY if is_copy else _NOTHING_RECORDED
    return ModelReport(
        blocks_patched=tuple(applied),
        blocks_ran=ran,
        operators_not_run=tuple(idle),
        forwards_rescued=_rescues(applied),
        plan=plan,
        rows=rows_of(model, applied, found, group_by, top),
        group_by=group_by,
        race_steps_left=None if is_unplanned else max((each.race_steps_left for each in trainings), default=0),
        note=note if found or is_unplanned else nothing,
        **sums_of(found),
    )
