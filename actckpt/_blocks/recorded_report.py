"""What blocks recorded, and the report that is made of it, also once `actckpt.remove` has run."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from actckpt._blocks.model_report import GroupBy, ModelReport, rows_of, stayed, sums_of
from actckpt.planner.plans import Plan

__all__ = ["RecordedReport", "keep_last_report", "last_report"]

_NO_PLAN = (
    "No plan for the budget is made yet, and all blocks are checkpointed: it is made at the second forward with "
    "gradients of the model that was given to apply, for the first 16 kinds of steps, and not under torch.compile."
)
_STEP_OF_PLAN = "a step of the plan. Of blocks that run as they are, it has what the plan says."
_STEP_OF_OTHER = "a step that ran under another plan than the one shown here. The next step is recorded."
_NOT_RUN = "Nothing was recorded: no block has run yet. Run a step, forward and backward."
_NOTHING_RECORDED = (
    "Nothing was recorded: policy 'keep' leaves everything to autograd, so that the blocks hold what plain training "
    "holds (actckpt.region('keep', record=True) shows what); or they ran under torch.compile, or without gradients."
)
_NOTHING_OF_COPY = (
    "Nothing was recorded: these blocks are a copy of those of a model with a budget, and ran without gradients, or "
    "under torch.compile."
)
_REMOVED = "Blocks are not checkpointed any more (actckpt.remove): this is their last report."


@dataclasses.dataclass(frozen=True)
class RecordedReport:
    """What the blocks of one model recorded. It holds no tensor and no module."""

    #: Qualified names of the blocks, by their names for people.
    paths: Mapping[str, str]
    ran: tuple[str, ...]
    operators_not_run: tuple[str, ...]
    plan: Plan | None
    #: By name of a block, what it recorded of a value.
    entries: tuple[tuple[str, Any], ...]
    race_steps_left: int | None
    note: str

    @classmethod
    def of(cls, applied: Mapping[str, Any]) -> RecordedReport:
        """Collect what blocks recorded, by their names for people."""
        ran = tuple(name for name, module in applied.items() if module.forward.has_run)
        together = list({id(module.forward.together): module.forward.together for module in applied.values()}.values())
        idle = dict.fromkeys(operator for blocks in together for operator in blocks.matches.idle())
        plan = next((blocks.plan for blocks in together if blocks.plan is not None), None)
        entries = tuple(
            (name, entry)
            for name, module in applied.items()
            for entry in module.forward.together.recording.entries_of(module.forward)
        )
        trainings = [blocks.training for blocks in together if blocks.training is not None]
        is_unplanned = plan is None and len(trainings) > 0
        if is_unplanned:  # the calls that were measured were none of training
            note, entries = next((each.refused for each in trainings if each.refused), _NO_PLAN), ()
        elif entries:
            note = _which_step(together, plan)
            note = f"{small}\n{note}" if plan is None and (small := stayed(entries)) else note
        elif plan is not None and plan.overhead_seconds == 0.0:
            note = ""
        else:
            is_copy = not trainings and any(blocks.are_of_other_training for blocks in together)
            note = _NOT_RUN if not ran else _NOTHING_OF_COPY if is_copy else _NOTHING_RECORDED
        left = None if is_unplanned else max((each.race_steps_left for each in trainings), default=0)
        paths = {name: module.forward.name for name, module in applied.items()}
        return cls(paths, ran, tuple(idle), plan, entries, left, note)

    def rendered(self, model: torch.nn.Module, group_by: GroupBy, top: int | None) -> ModelReport:
        """Return the report on a model whose blocks these are."""
        modules = {name: model.get_submodule(path) for name, path in self.paths.items()}
        return ModelReport(
            blocks_patched=tuple(self.paths),
            blocks_ran=self.ran,
            operators_not_run=self.operators_not_run,
            plan=self.plan,
            rows=rows_of(model, modules, list(self.entries), group_by, top),
            group_by=group_by,
            race_steps_left=self.race_steps_left,
            note=self.note,
            **sums_of(list(self.entries)),
        )


def _which_step(together: list[Any], plan: Plan | None) -> str:
    """Say which step was recorded."""
    if plan is not None:
        is_of_it = any(blocks.recording.plan is plan for blocks in together)
        return f"Recorded: {_STEP_OF_PLAN if is_of_it else _STEP_OF_OTHER}"
    is_first = any(blocks.recording.num_steps == 1 for blocks in together)
    return f"Recorded: {'the first step' if is_first else 'the step after the report before'}; the next one is, too."


_last: weakref.WeakKeyDictionary[torch.nn.Module, RecordedReport] = weakref.WeakKeyDictionary()


def keep_last_report(model: torch.nn.Module, report: RecordedReport) -> None:
    """Keep the last report on a model whose blocks are about to be given back."""
    _last[model] = dataclasses.replace(report, note=f"{_REMOVED}\n{report.note}".strip(), race_steps_left=0)


def last_report(model: torch.nn.Module) -> RecordedReport | None:
    """Return the last report on a model, None where its blocks were never removed."""
    return _last.get(model)
