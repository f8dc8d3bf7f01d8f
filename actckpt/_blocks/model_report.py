"""The report on an applied model: what its blocks did in a step, by operator, module or module type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from actckpt._core.modes import BELOW
from actckpt._core.region_report import READ, SMALL
from actckpt._core.sites import qualified_name
from actckpt._report_page.content import Cell, Page, Table, bytes_cell, number_cell, share_cell
from actckpt._report_page.html_page import tables_as_html, to_html
from actckpt._text.listed import listed
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.planner.plans import Plan

__all__ = ["GroupBy", "ModelReport", "ModelRow", "folded", "kept_below_modes", "rows_of", "stayed", "sums_of"]

GroupBy = Literal["operator", "module", "type"]
#: How long a summary is, and the minimum number of rows in it.
_MOST_LINES, _FEWEST_ROWS = 15, 3
_NO_PLAN = "left out. There is no plan for a budget: actckpt.apply(model, budget=...) makes one."
#: The entry with the highest rank decides if a storage has several.
_RANKS = {Action.RECOMPUTE: 0, Action.OFFLOAD: 1, Action.PREFER_OFFLOAD: 1, Action.KEEP: 2}
#: A block's name, and an entry for one of its values in the step's record.
Found = tuple[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """Values of one operator, of one module in identical blocks, or of modules of one type."""

    #: Of the operator, the module or the type. Identical blocks share a row: `layers.0-31.mlp`.
    name: str
    num_blocks: int
    num_values: int
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    #: How often a value of this row was replayed; reruns of blocks do not count.
    num_replays: int
    #: The share of all its bytes, whatever their action, in what plain training holds in the blocks.
    share: float

    @property
    def nbytes(self) -> int:
        """All bytes, whatever their action."""
        return self.kept_bytes + self.offloaded_bytes + self.recomputed_bytes


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The result of `actckpt.report(model)`. `print` it for a table."""

    #: Qualified names of the blocks that `apply` checkpoints.
    blocks_patched: tuple[str, ...]
    #: Those of them that have run.
    blocks_ran: tuple[str, ...]
    #: The arguments of `apply`: `"policy='recompute'"`, `"activation_budget='50%'"`.
    policy: str = ""
    #: Operators that the policy names and that did not run in the first step, with what ran instead.
    operators_not_run: tuple[str, ...] = ()
    #: The values that blocks saved in the recorded step, the largest first.
    rows: tuple[ModelRow, ...] = ()
    #: Bytes of these values, each storage once: held by blocks at the end of the forward, offloaded, dropped.
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0
    #: Bytes that autograd saved in the blocks: what plain training would hold there at the end of the forward.
    plain_bytes: int = 0
    group_by: GroupBy = "operator"
    #: Which step that was; or why nothing is known.
    note: str = ""
    #: Says that this is the last report of a model after `remove`; else empty.
    heading: str = ""
    #: The plan of `apply(budget=...)` or `apply(policy=plan)`; None: not made yet, or another policy.
    plan: Plan | None = None
    #: How many more steps are trials, which run `plan` and simple policies in turn; the fastest one is kept. None: a
    #: budget was given, and no plan is made yet.
    race_steps_left: int | None = 0
    #: The same values by module and operator, whatever `group_by` and `top`: `layers.0-31.mlp::aten.gelu.default`.
    detail_rows: tuple[ModelRow, ...] = ()
    #: How many rows were asked for; None: all, of which `print` shows the largest.
    top: int | None = None

    @property
    def kept_share(self) -> float | None:
        """The share of plain training's bytes that blocks hold at the end of the forward.

        None: nothing was recorded, and `note` says why (`policy="keep"` leaves everything to autograd).
        """
        return self.kept_bytes / self.plain_bytes if self.plain_bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        fields = dataclasses.asdict(dataclasses.replace(self, plan=None))
        return {**fields, "kept_share": self.kept_share, "plan": None if self.plan is None else self.plan.to_dict()}

    def table(self) -> str:
        """Return all that is known as text. `str` is the summary: the plan, the blocks, and the largest rows."""
        lines = [*self._which_ran(), *self._sums_and_note(), *self._shown(self.rows)]
        if self.plan is not None:
            lines += [self.plan.explain(), self.plan.table()]
        return "\n".join(lines)

    def _shown(self, rows: Sequence[ModelRow]) -> list[str]:
        header = (self.group_by, "blocks", "values", "of plain", "kept", "offloaded", "recomputed", "replays")
        return aligned([header, *map(_cells, rows)], left=1).splitlines() if rows else []

    def _which_ran(self) -> list[str]:
        not_run = [name for name in self.blocks_patched if name not in self.blocks_ran]
        lines = [self.heading] if self.heading else []
        lines.append(f"{len(self.blocks_ran)} of {len(self.blocks_patched)} blocks ran ({self.policy})")
        if not_run:
            lines.append(f"not run: {', '.join(not_run)}")
        if self.operators_not_run:
            lines.append(f"operators of the policy that did not run: {'; '.join(self.operators_not_run)}")
        return lines

    def _sums_and_note(self) -> list[str]:
        lines = []
        if self.rows:
            share = "-" if self.kept_share is None else f"{100 * self.kept_share:.0f} %"
            lines.append(
                f"held at the end of the forward: {format_bytes(self.kept_bytes)}, {share} of the "
                f"{format_bytes(self.plain_bytes)} that plain training saves in the blocks"
            )
        if self.note:
            lines.append(self.note)
        if self.race_steps_left:
            steps = f"at most the next {self.race_steps_left} steps"
            lines.append(f"Trials: {steps} run this plan and simple choices in turn; the fastest one is kept.")
        return lines

    def to_html(self, path: str | Path | None = None) -> str | None:
        """Write a page that shows the report by module and operator and, where there is a plan, the page of the plan.

        The page is one file that loads nothing. Its tables can be sorted. Charts are those of the plan, and need
        matplotlib.

        Args:
            path: of the file to write; None: return the page instead.
        Raises:
            OSError: the file cannot be written.
        Cost: with a plan, solves the problem a dozen times more, with other budgets.
        """
        from actckpt.planner.pictures import CHARTS, plan_page  # which imports the solver: slow

        lines = [line for text in (*self._which_ran(), *self._sums_and_note()) for line in text.splitlines()]
        tables = [_html_table(self.detail_rows)]
        page = Page(left_out=[f"{', '.join((*CHARTS, 'trials'))}: {_NO_PLAN}"], title="")
        if self.plan is not None:
            page = plan_page(self.plan)
        return to_html(
            dataclasses.replace(
                page, title="Report of the blocks", lines=[*lines, *page.lines], tables=[*tables, *page.tables]
            ),
            path,
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        plan = [] if self.plan is None else [repr(self.plan)]
        return tables_as_html([*self._which_ran(), *self._sums_and_note(), *plan], [_html_table(self.detail_rows)])

    def __str__(self) -> str:
        lines = [*self._which_ran(), *self._sums_and_note()]
        if self.plan is not None:
            from actckpt.planner.explanation import summary  # which imports the solver: slow

            start = int(self.heading != "")
            lines[start:start] = summary(self.plan)
        num_free = _MOST_LINES - 2 - sum(1 + line.count("\n") for line in lines)
        num_rows = len(self.rows) if self.top is not None else max(num_free, _FEWEST_ROWS)
        more = ["Everything: print(report.table())"] * (self.plan is not None or num_rows < len(self.rows))
        return "\n".join([*lines, *self._shown(self.rows[:num_rows]), *more])


def _cells(row: ModelRow) -> tuple[str, ...]:
    sizes = map(format_bytes, (row.kept_bytes, row.offloaded_bytes, row.recomputed_bytes))
    share = f"{100 * row.share:.1f} %"
    return row.name, str(row.num_blocks), str(row.num_values), share, *sizes, str(row.num_replays)


def _html_table(rows: Sequence[ModelRow]) -> Table:
    names = ("module", "operator", "blocks", "values", "of plain", "kept", "offloaded", "recomputed", "replays")
    lines: list[tuple[str | Cell, ...]] = []
    for row in rows:
        module, _, operator = row.name.rpartition("::")
        counts = (number_cell(row.num_blocks), number_cell(row.num_values), share_cell(row.share))
        sizes = map(bytes_cell, (row.kept_bytes, row.offloaded_bytes, row.recomputed_bytes))
        lines.append((module, operator, *counts, *sizes, number_cell(row.num_replays)))
    return Table("What the blocks saved, by module and operator", names, lines)


def _once(entries: Sequence[Found]) -> list[Found]:
    """Return one entry per storage: as held if any block holds it."""
    chosen: dict[Any, Found] = {}
    for number, (block, entry) in enumerate(entries):
        key = number if entry.storage is None else entry.storage
        before = chosen.get(_Same(key))
        if before is None or _RANKS[entry.action] > _RANKS[before[1].action]:
            chosen[_Same(key)] = block, entry
    return list(chosen.values())


class _Same:
    """A key that equals only itself: dead weak references compare unequal to all others, and cannot be hashed."""

    __slots__ = ("_key",)

    def __init__(self, key: object) -> None:
        self._key = key

    def __hash__(self) -> int:
        return id(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._key is other._key


def sums_of(entries: Sequence[Found]) -> dict[str, int]:
    """Return the sums of a report by name."""
    sums = dict.fromkeys(Action, 0)
    for _, entry in _once(entries):
        sums[entry.action] += entry.nbytes
    saved = _once([item for item in entries if item[1].why != READ])
    return {
        "kept_bytes": sums[Action.KEEP],
        "offloaded_bytes": sums[Action.OFFLOAD],
        "recomputed_bytes": sums[Action.RECOMPUTE],
        "plain_bytes": sum(entry.nbytes for _, entry in saved),
    }


def stayed(entries: Sequence[Found]) -> str:
    """Return what stayed under `offload` because it is small, and what to do if nothing was offloaded."""
    small = [entry for _, entry in entries if entry.why.startswith(SMALL)]
    num = sum(entry.num_values for entry in small)
    if not num:
        return ""
    nbytes = sum(entry.nbytes for entry in small)
    what = f"{num} tensors of {format_bytes(nbytes)} in all are {small[0].why}"
    if any(entry.action is Action.OFFLOAD and entry.nbytes for _, entry in entries):
        return f"{what}, and stay."
    return (
        f"Nothing was offloaded: all {what}. They have {format_bytes(nbytes / num)} on average; "
        "pass less than that: actckpt.apply(model, policy='offload', min_bytes=...)."
    )


def kept_below_modes(entries: Sequence[Found]) -> str:
    """Return what was kept because of the program's dispatch modes, by the reason that names one."""
    sums: dict[str, int] = {}
    for _, entry in _once(entries):
        if entry.why.startswith(BELOW):
            sums[entry.why] = sums.get(entry.why, 0) + entry.nbytes
    return "".join(f"Kept although the policy drops it: {format_bytes(n)} {why}.\n" for why, n in sums.items())


def rows_of(
    model: torch.nn.Module,
    blocks: Mapping[str, Any],
    entries: Sequence[Found],
    group_by: GroupBy | Literal["module and operator"],
    top: int | None,
) -> tuple[ModelRow, ...]:
    """Return the rows of a report.

    Args:
        blocks: by name.
        found: the entries of the recorded step.
        top: maximum number of rows; the rest is summed up in one more. None: all.
    """
    plain_bytes = sums_of(entries)["plain_bytes"]
    once = _once(entries)
    modules = {qualified_name(model, module): module for module in model.modules()} if group_by == "type" else {}
    groups: dict[str, list[Found]] = {}
    named = _names_in_blocks(blocks, once) if group_by.startswith("module") else {}
    for item in once:
        block, entry = item
        if group_by == "operator":
            name = entry.operator
        else:
            path = _path(blocks, block, entry.module)
            name = type(modules.get(path, blocks[block])).__name__ if group_by == "type" else named[path]
            if group_by == "module and operator":
                name = f"{name}::{entry.operator}"
        groups.setdefault(name, []).append(item)
    rows = [_row(name, members, plain_bytes) for name, members in groups.items()]
    rows.sort(key=lambda row: -row.nbytes)
    if top is not None and len(rows) > top:
        rest = [item for row in rows[top:] for item in groups[row.name]]
        rows = [*rows[:top], _row(f"({len(rows) - top} more)", rest, plain_bytes)]
    return tuple(rows)


def _row(name: str, members: Sequence[Found], plain_bytes: int) -> ModelRow:
    sums = dict.fromkeys(Action, 0)
    for _, entry in members:
        sums[entry.action] += entry.nbytes
    return ModelRow(
        name=name,
        num_blocks=len({block for block, _ in members}),
        num_values=sum(getattr(entry, "num_values", 1) for _, entry in members),
        kept_bytes=sums[Action.KEEP],
        offloaded_bytes=sums[Action.OFFLOAD],
        recomputed_bytes=sums[Action.RECOMPUTE],
        num_replays=sum(entry.num_replays for _, entry in members),
        share=sum(sums.values()) / max(plain_bytes, 1),
    )


def _path(blocks: Mapping[str, Any], block: str, module: str | None) -> str:
    """Return the name in the model of a module that ran in a block.

    The recorder names it relative to the outermost running module, which may be the block, or a wrapper of the model.
    """
    if module is None or module == type(blocks[block]).__name__:
        return block
    at = f".{module}.".find(f".{block}.")
    return f"{block}.{module}" if at < 0 else module[at:]


def _names_in_blocks(blocks: Mapping[str, Any], entries: Iterable[Found]) -> dict[str, str]:
    """Return display names of modules by path: identical blocks share a name."""
    inside: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in blocks}
    for block, entry in entries:
        path = _path(blocks, block, entry.module)
        kinds = [entry.nbytes * (entry.action is action) for action in (Action.KEEP, Action.OFFLOAD, Action.RECOMPUTE)]
        before = inside[block].get(path[len(block) :], (0, 0, 0, 0))
        inside[block][path[len(block) :]] = tuple(a + b for a, b in zip(before, (*kinds, 1), strict=True))
    alike: dict[frozenset[Any], list[str]] = {}
    for block, parts in inside.items():
        alike.setdefault(frozenset(parts.items()), []).append(block)
    labels = {block: folded(names) for names in alike.values() for block in names}
    return {f"{block}{part}": f"{labels[block]}{part}" for block, parts in inside.items() for part in parts}


def folded(names: Sequence[str]) -> str:
    """Return one name for several: `layers.0-31`, `layers.{0-2, 5}`; wildcards or a count if they differ otherwise."""
    if len(names) == 1:
        return names[0]
    parts = list(zip(*(name.split(".") for name in names), strict=False))
    if len({name.count(".") for name in names}) > 1:
        return f"{names[0]} and {len(names) - 1} more"
    is_grid = len(names) == math.prod(len(set(part)) for part in parts)  # all combinations occur
    return ".".join(part[0] if len(set(part)) == 1 else _range(part) if is_grid else "*" for part in parts)


def _range(part: Sequence[str]) -> str:
    if not all(label.isdecimal() for label in part):
        return "*"
    ranges = listed(dict.fromkeys(part))
    return f"{{{ranges}}}" if "," in ranges else ranges
