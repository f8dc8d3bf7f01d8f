"""A plan in words and as a table: `Plan.explain`, `Plan.table`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from actckpt._error_base import PlanInfeasibleError
from actckpt._report_page.content import Cell, Table, bytes_cell, seconds_cell
from actckpt._text.listed import listed, without_call
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, Value
from actckpt.planner.memory_parts import say_peak
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import needs
from actckpt.planner.solving import solve

__all__ = ["explained", "plan_table", "summary", "values_table"]

#: What the next GiB would buy; a tenth of the budget where that is less.
_MORE_BYTES = 2**30
#: Less than this share of the step is rounding; so much of the budget is worth a word if it is left.
_ROUNDING, _LEFT = 1e-6, 0.01

_COLUMNS = ("value", "of", "each", "in all", "keep", "recompute", "offload", "rerun", "recomputing")
_NUMBERS = " Numbers of blocks count from 0."
_VALUES = (
    f"\n{BLOCK_INPUT}: the input of a block. 1::aten.gelu.default#0.0: what its module '1' made by this operator. In "
    "brackets: what nothing can bring back. Values without bytes are left out."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A value that entries of the stack have."""

    value: Value
    #: The class, or the modules and how often they are called.
    of: str
    entries: list[int]

    def chosen(self, plan: Plan, action: Action) -> list[int]:
        """Return the entries that do this with the value, and do not run again as a whole."""
        return [i for i in self.entries if not plan.rerun[i] and plan.actions[i][self.value.name] is action]

    def seconds(self, plan: Plan, entries: Iterable[int], what: str) -> float:
        """Return the seconds that something (`"recompute_s"`, `"offload_s"`) takes for the value in these entries."""
        values = (value for index in entries for value in plan.costs.blocks[index].values)
        return float(sum(getattr(value, what) for value in values if value.name == self.value.name))


def folded(plan: Plan, entries: Iterable[int]) -> list[list[int]]:
    """Return entries of the stack, those of classes that are called alike together: calls of the same modules."""
    modules: dict[str, set[str]] = {name: set() for name in plan.costs.classes}
    for kind, name in zip(plan.costs.stack, plan.block_names or plan.costs.stack, strict=True):
        modules[kind].add(without_call(name))
    found: dict[frozenset[str], list[int]] = {}
    for index in entries:
        found.setdefault(frozenset(modules[plan.costs.stack[index]]), []).append(index)
    return list(found.values())


def rows(plan: Plan) -> Iterator[Row]:
    """Yield each value of entries that are called alike: values of one name, size and kind are one."""
    stack, blocks = plan.costs.stack, plan.costs.blocks
    for entries in folded(plan, range(len(stack))):
        found: dict[Value, list[int]] = {}
        for index in entries:
            for value in blocks[index].values:
                kind = dataclasses.replace(value, recompute_s=0.0, offload_s=0.0, inputs=())
                found.setdefault(kind, []).append(index)
        for value, having in found.items():
            yield Row(value, _of(plan, having), having)


def _of(plan: Plan, entries: list[int]) -> str:
    modules = () if plan.block_names is None else dict.fromkeys(without_call(plan.block_names[i]) for i in entries)
    if len(modules) in (0, len(entries)):
        return plan.costs.stack[entries[0]]
    return f"{listed(modules)}, {len(entries)} calls"


def say_blocks(plan: Plan, entries: Iterable[int]) -> str:
    """Say which blocks these are: by name, where the plan knows a model, else how many of which class."""
    if plan.block_names is not None:
        return _listed_entries(plan, entries)
    return ", ".join(f"{len(alike)} blocks {plan.costs.stack[alike[0]]!r}" for alike in folded(plan, entries))


def _listed_entries(plan: Plan, entries: Iterable[int]) -> str:
    """Return entries as text: by name, the calls of a module together, or by number where the plan knows no model."""
    names = plan.block_names
    if names is None:
        return listed(map(str, entries))
    calls: dict[str, list[str]] = {without_call(name): [] for name in names}
    for index in entries:
        calls[without_call(names[index])].append(names[index])
    return listed(itertools.chain(*calls.values()))


def values_table(plan: Plan) -> Table:
    """Return a row for each value of blocks that are called alike, by module and operator, the largest first."""
    shown = [row for row in rows(plan) if plan.block_names is None or row.value.nbytes]
    note = (
        "The columns keep, recompute, offload and rerun list blocks. Brackets around a value: it cannot be computed "
        "again."
    )
    lines = []
    for row in sorted(shown, key=lambda row: -row.value.nbytes * len(row.entries)):
        module, _, operator = row.value.name.removeprefix("(").removesuffix(")").rpartition("::")
        lines.append((module, operator.partition("#")[0] if "#" in operator else "", *_cells(plan, row)))
    return Table("Values by module and operator", ("module", "operator", *_COLUMNS), lines, note)


def _cells(plan: Plan, row: Row) -> tuple[str | Cell, ...]:
    value, recomputed = row.value, row.chosen(plan, Action.RECOMPUTE)
    reruns = [index for index in row.entries if plan.rerun[index]]
    chosen = (row.chosen(plan, Action.KEEP), recomputed, row.chosen(plan, Action.OFFLOAD), reruns)
    where = [_listed_entries(plan, entries) for entries in chosen]
    if recomputed and not value.needed:
        where[1] = "not needed"
    sizes = bytes_cell(value.nbytes), bytes_cell(len(row.entries) * value.nbytes)
    seconds = row.seconds(plan, recomputed, "recompute_s") if value.needed else 0.0
    return (value.name, row.of, *sizes, *where, seconds_cell(seconds))


def plan_table(plan: Plan) -> str:
    """Return the table as text, with the budget, the peak and the step."""
    lines = [[cell.text if isinstance(cell, Cell) else cell for cell in row[2:]] for row in values_table(plan).rows]
    budget = f"Budget {format_bytes(plan.budget_bytes)}, peak {format_bytes(plan.peak_bytes)}"
    step = f"step {format_seconds(plan.step_seconds)}, of that {format_seconds(plan.overhead_seconds)} for the plan"
    names = _NUMBERS if plan.block_names is None else _VALUES
    return f"{aligned([_COLUMNS, *lines], left=2)}\n{budget}; {step}.{names}"


def explained(plan: Plan) -> str:
    """Say what sets the peak, what is done in which blocks, and what more memory would buy."""
    return "\n".join([*summary(plan), *_without_reruns(plan), *_other_budgets(plan)])


def summary(plan: Plan) -> list[str]:
    """Return the lines of `explained` that need no other plan."""
    return [_times(plan), _peak(plan), *_values_by_action(plan), *_whole_blocks(plan), *_raced(plan)]


def _peak(plan: Plan) -> str:
    """Say when the peak is, and what is in memory then: parts are those of the predicted peak."""
    peak, predicted = format_bytes(plan.peak_bytes), format_bytes(max(needs(plan.costs, plan)))
    return f"Peak {peak}{'' if peak == predicted else f' measured; predicted {predicted}'}, {say_peak(plan)}."


def _raced(plan: Plan) -> Iterator[str]:
    """Say what was run, and which of it was fastest."""
    timed = [f"{row.name} {row.ratio:.3f}" for row in plan.race if row.ratio is not None]
    if timed:
        yield f"Raced, time over the plan's: {', '.join(timed)}. Fastest: {plan.chosen}."
    others = [f"{row.name} ({format_bytes(row.peak_bytes)})" for row in plan.race if not row.fits]
    if others:
        yield f"Too large for the budget: {', '.join(others)}."


def _times(plan: Plan) -> str:
    exceeds = ", which this plan exceeds" if plan.peak_bytes > plan.budget_bytes else ""
    text = f"Budget {format_bytes(plan.budget_bytes)}{exceeds}: forward and backward are predicted to take "
    tried = [row.seconds for row in plan.race if row.name == plan.chosen and row.seconds is not None]
    text += format_seconds(plan.step_seconds) + (f" (in trials {format_seconds(tried[0])})" if tried else "")
    if plan.overhead_seconds == 0.0:
        return f"{text}, no longer than with everything kept."
    entries = list(zip(plan.costs.blocks, plan.actions, strict=True))
    offloaded = (v for block, actions in entries for v in block.values if actions[v.name] is Action.OFFLOAD)
    also = " and offloading" if any(value.offload_s for value in offloaded) else ""
    parts = [
        (plan.recompute_seconds, f"computing again{also}"),
        (plan.write_wait_seconds, "waiting for copies out"),
        (plan.read_wait_seconds, "waiting for copies back"),
    ]
    terms = ", ".join(f"{format_seconds(seconds)} {what}" for seconds, what in parts if seconds)
    text = f"{text}, {_share(plan, plan.overhead_seconds)} more than with everything kept: {terms}."
    return text if exceeds else f"{text} {_best(plan)}"


def _best(plan: Plan) -> str:
    """Say how much less another plan for this budget could add, by the same costs, and what this one leaves of it."""
    if plan.chosen != "plan":  # solved plans are predicted to be faster
        return "Trials chose it."
    left = plan.budget_bytes - plan.peak_bytes
    is_left = left > _LEFT * plan.budget_bytes
    if plan.overhead_seconds - plan.bound_seconds <= _ROUNDING * plan.plain_seconds:
        other = f", even one that uses the {format_bytes(left)} left" if is_left else ""
        return f"No plan for this budget is predicted to be faster{other}."
    text = f"No plan for this budget is predicted to add less than {_share(plan, plan.bound_seconds)}."
    return f"{text} {format_bytes(left)} of it are left." if is_left else text


def _time(plan: Plan, seconds: float) -> str:
    return _share(plan, seconds) if seconds > _ROUNDING * plan.plain_seconds else "no time"


def _share(plan: Plan, seconds: float) -> str:
    share = f" ({100 * seconds / plan.plain_seconds:.2f} %)" if plan.plain_seconds else ""
    return f"{format_seconds(seconds)}{share}"


def _values_by_action(plan: Plan) -> Iterator[str]:
    for action, what, how in ((Action.OFFLOAD, "Offloaded", " out and back"), (Action.RECOMPUTE, "Recomputed", "")):
        chosen = [(row, entries) for row in rows(plan) if row.value.needed and (entries := row.chosen(plan, action))]
        if not chosen:
            continue
        num = sum(len(entries) for _, entries in chosen)
        seconds = sum(row.seconds(plan, entries, f"{action.value}_s") for row, entries in chosen)
        took = f", {format_seconds(seconds)}{' beside the copies' * (action is Action.OFFLOAD)}" if seconds else ""
        nbytes = format_bytes(sum(len(entries) * row.value.nbytes for row, entries in chosen))
        where = say_blocks(plan, sorted({index for _, entries in chosen for index in entries}))
        yield f"{what}: {num} value{'s' * (num != 1)} in {where} ({nbytes}{how}{took})."


def _whole_blocks(plan: Plan) -> Iterator[str]:
    """Say which blocks are recorded, and which run again as a whole."""
    entries = list(zip(plan.costs.blocks, plan.actions, plan.rerun, strict=True))
    recorded = {
        index: block.recording_s
        for index, (block, actions, rerun) in enumerate(entries)
        if block.recording_s and not rerun and block.is_recorded(actions)
    }
    reruns = {index: block.rerun_seconds for index, (block, _, rerun) in enumerate(entries) if rerun}
    for what, seconds in (("Recorded, to keep some values", recorded), ("Run again as a whole", reruns)):
        if seconds:
            yield f"{what}: {say_blocks(plan, seconds)}: {format_seconds(sum(seconds.values()))}."


def _without_reruns(plan: Plan) -> Iterator[str]:
    """Say which blocks could not be run again, where that might have been of use."""
    found: dict[str, list[int]] = {}
    for index, block in enumerate(plan.costs.blocks):
        if block.no_rerun and plan.overhead_seconds:
            found.setdefault(block.no_rerun, []).append(index)
    for why, chosen in found.items():
        yield f"Never run again as a whole: {say_blocks(plan, chosen)}: {why}."


def _other_budgets(plan: Plan) -> Iterator[str]:
    """Say what a larger budget would save and a smaller one would cost."""
    if plan.peak_bytes > plan.budget_bytes:
        yield f"No plan fits this budget: this one needs least, {format_bytes(plan.peak_bytes)}."
        return
    if plan.chosen != "plan":  # it won by measured times, which other budgets do not have
        return
    change, rounding = min(_MORE_BYTES, plan.budget_bytes / 10), _ROUNDING * plan.plain_seconds
    if plan.overhead_seconds:
        more = solve(plan.costs, budget=plan.budget_bytes + change, pins=dict(plan.pins))
        saved = max(plan.overhead_seconds - more.overhead_seconds, 0.0)
        peak = f": that plan has a peak of {format_bytes(more.peak_bytes)}" if saved > rounding else ""
        yield f"{format_bytes(change)} more would save {_time(plan, saved)}{peak}."
    try:
        less = solve(plan.costs, budget=plan.budget_bytes - change, pins=dict(plan.pins))
    except PlanInfeasibleError as error:
        least = format_bytes(error.smallest_bytes or 0)
        yield f"{format_bytes(change)} less would not do: the smallest budget is {least}."
    else:
        lost = max(less.overhead_seconds - plan.overhead_seconds, 0.0)
        yield f"{format_bytes(change)} less would cost {_time(plan, lost)}."
