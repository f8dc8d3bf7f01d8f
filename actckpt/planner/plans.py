"""A plan as plain data."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from actckpt._text.listed import calls_named
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._version import __version__
from actckpt.action import Action
from actckpt.planner.costs import CostTable
from actckpt.planner.fields import plain_data, read, read_fields, read_json

__all__ = ["PLAN_VERSION", "BlockWindows", "Plan", "Raced"]

PLAN_VERSION = 2
#: What `Plan.model` holds. A parameter: shape, dtype, whether it is trained.
_FACTS = {
    "type": str,
    "torch": str,
    "blocks": Mapping[str, tuple[str, ...]] | None,
    "parameters": Mapping[str, tuple[tuple[int, ...] | None, str, bool]] | None,
}


@dataclasses.dataclass(frozen=True, repr=False)
class Raced:
    """What running a plan, or a simple choice beside it, showed."""

    name: str
    peak_bytes: float
    #: Whether the peak fits into the budget; what does not is not timed.
    fits: bool
    #: Of a step, the median; None: not timed.
    seconds: float | None = None
    #: To the plan's.
    ratio: float | None = None

    def __repr__(self) -> str:
        peak = f"{self.name}: peak {format_bytes(self.peak_bytes)}"
        if self.seconds is None or self.ratio is None:
            return f"<{peak}, {'not timed' if self.fits else 'does not fit'}>"
        return f"<{peak}, {format_seconds(self.seconds)}, {self.ratio:.2f} x the plan>"


class BlockWindows(NamedTuple):
    """Most bytes that may be on their way while a block of a model runs, its own among them."""

    #: Out, while it runs forward, and when that has ended.
    out_bytes: int
    left_bytes: int
    #: Read back ahead of its backward.
    back_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of each value of each block, and what that is predicted to cost. Made by `solve`."""

    budget_bytes: float = dataclasses.field(metadata={"most": 2**63})
    #: Per block of the stack, in the order of the forward: what becomes of each value, by name. A value that backward
    #: does not need and that is neither kept nor offloaded is `RECOMPUTE`, and costs nothing unless another needs it.
    actions: tuple[Mapping[str, Action], ...]
    #: Per block: it is run again as a whole to get back what was dropped.
    rerun: tuple[bool, ...]
    #: Seconds of a step in which everything is kept.
    plain_seconds: float
    #: What is added to them: computing again, with what recording and offloading take, and waiting for copies out and
    #: back.
    recompute_seconds: float
    write_wait_seconds: float
    read_wait_seconds: float
    #: No plan for this budget adds less, by the same costs.
    bound_seconds: float
    #: Bytes in memory at the worst moment, with copies ahead of backward limited to `max_inflight`.
    peak_bytes: float
    #: Most bytes that wait to be written out, or are read back ahead; with fewer, the step would take longer.
    max_inflight: int
    #: What the plan was made of.
    costs: CostTable
    pins: tuple[tuple[Any, Action], ...] = ()
    #: Where the plan's blocks and values are in a model: per entry of the stack, the qualified name of the block (None:
    #: what runs outside of blocks), and the place of each value by name. None: the plan knows no model.
    blocks: tuple[str | None, ...] | None = None
    places: tuple[Mapping[str, Any], ...] | None = None
    #: What it holds for: `type` of the model, version of `torch`, types of `blocks` by name, and of `parameters` by
    #: name shape, dtype and whether they are trained.
    model: Mapping[str, Any] | None = None
    #: Per block of the stack, where a plan for a model offloads.
    windows: tuple[BlockWindows, ...] | None = None
    #: What was run against it to find the fastest, and which of them this is: `"plan"`, or the name of a simple choice.
    race: tuple[Raced, ...] = ()
    chosen: str = "plan"
    #: The version of actckpt that made it.
    version: str = __version__

    def __repr__(self) -> str:
        """Return one line; `table` and `explain` say more."""
        peak, budget = format_bytes(int(self.peak_bytes)), format_bytes(int(self.budget_bytes))
        percent = 100 * self.overhead_seconds / self.plain_seconds if self.plain_seconds else 0.0
        what = "plan" if self.chosen == "plan" else f"plan {self.chosen!r}"
        return f"<{what} for {len(self.actions)} block calls: {peak} of {budget}, steps take {percent:.1f} % more>"

    @property
    def overhead_seconds(self) -> float:
        """Seconds that a step takes longer than one in which everything is kept."""
        return self.recompute_seconds + self.write_wait_seconds + self.read_wait_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.plain_seconds + self.overhead_seconds

    @property
    def block_names(self) -> tuple[str, ...] | None:
        """Names of the entries of the stack: of blocks, with `@1` for the second call of one, or of what runs outside
        of them; None: the plan knows no model.
        """
        if self.blocks is None:
            return None
        return tuple(name or kind for name, kind in zip(calls_named(self.blocks), self.costs.stack, strict=True))

    def explain(self) -> str:
        """Say in words what sets the peak, what is done in which blocks, and what more memory would buy.

        Cost: solves the problem twice more, with other budgets.
        """
        from actckpt.planner.explanation import explained  # which solves, and so imports this module

        return explained(self)

    def table(self) -> str:
        """Return a table for people: what becomes of each value in which blocks, the largest values first."""
        from actckpt.planner.explanation import plan_table  # which knows this module

        return plan_table(self)

    def plot(self, path: str | Path) -> None:
        """Draw what other budgets would cost beside this plan, and the memory over its step.

        Args:
            path: of the file to write; its suffix (.png, .svg) says in which format.
        Raises:
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        Cost: solves the problem a dozen times more, with other budgets.
        """
        from actckpt.planner.pictures import plot_plan  # which solves, and so imports this module

        plot_plan(self, Path(path))

    def to_html(self, path: str | Path | None = None) -> str | None:
        """Write a page that shows the plan: memory over its step, time against memory, its values, and the trials.

        The page is one file that loads nothing. Its tables can be sorted. Charts need matplotlib; without it, the page
        says so in their place.

        Args:
            path: of the file to write; None: return the page instead.
        Raises:
            OSError: the file cannot be written.
        Cost: solves the problem a dozen times more, with other budgets.
        """
        from actckpt._report_page.html_page import to_html
        from actckpt.planner.pictures import plan_page  # which solves, and so imports this module

        return to_html(plan_page(self), path)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        from actckpt._report_page.html_page import tables_as_html
        from actckpt.planner.explanation import values_table

        return tables_as_html([repr(self)], [values_table(self)])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, which `from_dict` reads."""
        sums = {"overhead_seconds": self.overhead_seconds, "step_seconds": self.step_seconds}  # for other readers
        return {"plan_version": PLAN_VERSION, **sums, **plain_data(self), "costs": self.costs.to_dict()}

    @classmethod
    def from_dict(cls, plan: Mapping[str, Any]) -> Plan:
        """Read a plan from plain data that `to_dict` gave.

        Raises:
            ValueError: it is no plan, one that was changed, or one of another version.
        """
        if not isinstance(plan, Mapping):
            raise ValueError(f"This is no plan but a {type(plan).__name__}. Pass what `Plan.to_dict` gave.")
        if "plan_version" not in plan:
            meant = " It is a table of costs: actckpt.planner.solve(costs, budget=...)." if "classes" in plan else ""
            raise ValueError(f"This is no plan: it has no plan_version. Pass what `Plan.to_dict` gave.{meant}")
        if plan["plan_version"] != PLAN_VERSION:
            raise ValueError(
                f"This plan is of version {plan['plan_version']!r}, made by actckpt {plan.get('version')}; "
                f"actckpt {__version__} reads version {PLAN_VERSION}. Make it again."
            )
        try:
            given = read_fields(
                cls, {key: each for key, each in plan.items() if key in cls.__dataclass_fields__}, "plan"
            )
            given["pins"] = tuple((tuple(k) if isinstance(k, list) else k, each) for k, each in given.get("pins", ()))
            found = cls(**given)
            found._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"This plan makes no sense: {str(error).rstrip('.')}. Make the plan again.") from None
        return found

    def _check(self) -> None:
        """Raise a ValueError where entries are not those of the stack, or facts of the model are none."""
        num = len(self.costs.stack)
        for name in ("actions", "rerun", "blocks", "places", "windows"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != num:
                raise ValueError(f"it has {len(entries)} entries in {name!r}, and its costs have a stack of {num}")
        for index, (block, actions) in enumerate(zip(self.costs.blocks, self.actions, strict=True)):
            values = {value.name for value in block.values}
            if other := sorted(values ^ actions.keys()):
                side = "'costs' know" if other[0] in values else "'actions' give one to"
                raise ValueError(f"of block {index} {side} {other[0]!r} alone")
        for name, kind in _FACTS.items():
            if self.model is not None:
                read(kind, self.model.get(name), f"plan.model.{name}")

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which `load` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            TypeError: `path` is none.
            ValueError: it is no plan, one that was changed, or one of another version.
        """
        if not isinstance(path, (str, os.PathLike)):
            instead = " For plain data: Plan.from_dict(...)." if isinstance(path, Mapping) else ""
            raise TypeError(
                f"Plan.load: a {type(path).__name__} is no path. Pass that of a file that `Plan.save` wrote.{instead}"
            )
        plan = read_json(path, what="plan", instead="Pass a file that `Plan.save` wrote.")
        try:
            return cls.from_dict(plan)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
