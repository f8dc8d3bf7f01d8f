"""The data of a model's report as plain data, so that it outlives `remove`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actckpt._blocks.model_report import GroupBy, ModelReport, kept_below_modes, rows_of, stayed, sums_of
from actckpt._core.region_report import RecordedValue
from actckpt.planner.plans import Plan

__all__ = ["ReportData", "keep_report", "kept_report", "report_data"]

_NO_PLAN = (
    "No plan for the budget is made yet, and all blocks are checkpointed: it is made at the second forward with "
    "gradients of the model that was given to apply, and not under torch.compile."
)
_STEP_OF_PLAN = "a step of the plan. Of blocks that run as they are, it has what the plan says."
_NO_STEP_OF_PLAN = "No step of this plan is recorded yet. The next one will be."
_REMOVED = "The last report before actckpt.remove: nothing is checkpointed now."
_NOT_RUN = "Nothing was recorded: no block has run yet. Run a step, forward and backward."
_KEEP = "policy='keep'"
_NOTHING_OF_KEEP = (
    "Nothing was recorded: policy 'keep' leaves everything to autograd, so that the blocks hold what plain training "
    "holds. actckpt.profile(step, model=model) lists it."
)
_NOTHING_RECORDED = "Nothing was recorded: the blocks ran under torch.compile, or without gradients."
_NOTHING_OF_COPY = (
    "Nothing was recorded: these blocks are a copy of those of a model with a budget, and ran without gradients, or "
    "under torch.compile."
)


@dataclasses.dataclass(frozen=True)
class ReportData:
    """A report before its rows are grouped. Holds no tensor and no module."""

    blocks: tuple[str, ...]
    blocks_ran: tuple[str, ...]
    policy: str
    operators_not_run: tuple[str, ...]
    #: The recorded entries by block; storages are replaced by markers with the same equality.
    entries: tuple[tuple[str, RecordedValue], ...]
    plan: Plan | None
    race_steps_left: int | None
    note: str

    def report(
        self,
        model: torch.nn.Module,
        blocks: Mapping[str, Any],
        group_by: GroupBy,
        top: int | None,
        *,
        is_removed: bool = False,
    ) -> ModelReport:
        """Return the report; `blocks` maps names to the current modules of the model."""
        return ModelReport(
            blocks_patched=self.blocks,
            blocks_ran=self.blocks_ran,
            policy=self.policy,
            operators_not_run=self.operators_not_run,
            plan=self.plan,
            rows=rows_of(model, blocks, self.entries, group_by, top),
            detail_rows=rows_of(model, blocks, self.entries, "module and operator", None),
            group_by=group_by,
            race_steps_left=0 if is_removed else self.race_steps_left,
            note=self.note,
            heading=_REMOVED if is_removed else "",
            top=top,
            **sums_of(self.entries),
        )


def report_data(applied: Mapping[str, Any]) -> ReportData:
    """Return the data about patched blocks, by their display names."""
    ran = tuple(name for name, module in applied.items() if module.forward.has_run)
    groups = [*{id(module.forward.group): module.forward.group for module in applied.values()}.values()]
    plan = next((group.plan for group in groups if group.plan is not None), None)
    recordings = {id(group): group.recording_of(group.plan) for group in groups}
    entries = [
        (name, entry)
        for name, module in applied.items()
        if (recording := recordings[id(module.forward.group)]) is not None
        for entry in recording.entries_of(module.forward)
    ]
    trainings = [group.training for group in groups if group.training is not None]
    is_unplanned = plan is None and len(trainings) > 0
    if is_unplanned:
        entries = []  # the measured calls were not training
    refused = next((training.refused for training in trainings if training.refused), "")
    rescued = "".join(training.rescued for training in trainings)
    step = _recorded(groups, entries, plan, has_run=len(ran) > 0)
    exceeds = f"The plan exceeds the budget. {refused}" if refused else ""
    return ReportData(
        blocks=tuple(applied),
        blocks_ran=ran,
        policy=" and ".join(dict.fromkeys(group.policy for group in groups)),
        operators_not_run=tuple(dict.fromkeys(operator for group in groups for operator in group.matches.idle())),
        entries=_without_storages(entries),
        plan=plan,
        race_steps_left=None if is_unplanned else max((one.race_steps_left for one in trainings), default=0),
        note=(refused or _NO_PLAN) if is_unplanned else "\n".join(filter(None, (exceeds, rescued, step))),
    )


def _recorded(groups: Sequence[Any], entries: Sequence[tuple[str, Any]], plan: Plan | None, *, has_run: bool) -> str:
    """Return which step was recorded, or why none was."""
    if entries and plan is not None:
        return kept_below_modes(entries) + f"Recorded: {_STEP_OF_PLAN}"
    if entries:
        is_first = any(
            recording.num_steps == 1 for blocks_together in groups if (recording := blocks_together.recording_of(None))
        )
        which = "the first step" if is_first else "the step after the report before"
        lines = filter(None, (stayed(entries), f"Recorded: {which}; the next one is, too."))
        return kept_below_modes(entries) + "\n".join(lines)
    if plan is not None and plan.overhead_seconds == 0.0:
        return ""
    if not has_run:
        return _NOT_RUN
    if plan is not None and any(group.training is not None for group in groups):
        return _NO_STEP_OF_PLAN
    if any(group.are_of_other_training and group.training is None for group in groups):
        return _NOTHING_OF_COPY
    return _NOTHING_OF_KEEP if all(group.policy == _KEEP for group in groups) else _NOTHING_RECORDED


def _without_storages(entries: Sequence[tuple[str, Any]]) -> tuple[tuple[str, RecordedValue], ...]:
    """Return entries as plain data."""
    markers: dict[int, tuple[Any, Any]] = {}
    plain = []
    for block, entry in entries:
        storage = entry.storage  # held in the dict, so that ids stay unique
        marker = None if storage is None else markers.setdefault(id(storage), (storage, object()))[1]
        values = getattr(entry, "num_values", 1)
        known = entry.operator, entry.module, entry.action, entry.why, marker, entry.nbytes, entry.num_replays, values
        plain.append((block, RecordedValue(*known)))
    return tuple(plain)


#: Last reports of models whose blocks are no longer checkpointed.
_kept: weakref.WeakKeyDictionary[torch.nn.Module, ReportData] = weakref.WeakKeyDictionary()


def keep_report(model: torch.nn.Module, data: ReportData) -> None:
    """Keep the last report on a model while the model is alive."""
    _kept[model] = data


def kept_report(model: torch.nn.Module) -> ReportData | None:
    """Return the last report on a model that `remove` was called on."""
    return _kept.get(model)
