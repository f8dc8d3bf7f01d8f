"""A plan in words: `Plan.explain`."""

from __future__ import annotations

from collections.abc import Iterator

from actckpt._error_base import PlanInfeasibleError
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt.action import Action
from actckpt.planner.cycle import moments
from actckpt.planner.folding import Row, folded, rows, say_blocks
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import simulate
from actckpt.planner.smallest import base_parts, kept_bytes, least_needs
from actckpt.planner.solving import solve

__all__ = ["explained"]

#: What the next GiB would buy; a tenth of the budget where that is less.
_MORE_BYTES = 2**30
#: Less than this share of the step is rounding; so much of the budget is worth a word if it is left.
_ROUNDING, _LEFT = 1e-6, 0.01


def explained(plan: Plan) -> str:
    """Say what sets the peak, what is done with which values and why, and what more memory would buy."""
    lines = [_times(plan), _peak(plan), *_offloaded(plan), *_recomputed(plan), *_whole_blocks(plan)]
    return "\n".join([*lines, *_without_reruns(plan), *_raced(plan), *_other_budgets(plan)])


def _raced(plan: Plan) -> Iterator[str]:
    """Say what was run, and which of it was fastest."""
    timed = [f"{row.name} {row.ratio:.3f}" for row in plan.race if row.ratio is not None]
    if timed:
        yield f"Raced, time over the plan's: {', '.join(timed)}. Fastest: {plan.chosen}."
    others = [f"{row.name} ({format_bytes(row.peak_bytes)})" for row in plan.race if not row.fits]
    if others:
        yield f"Too large for the budget: {', '.join(others)}."


def _times(plan: Plan) -> str:
    text = f"Budget {format_bytes(plan.budget_bytes)}: a step takes {format_seconds(plan.step_seconds)}"
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
    return f"{text}, {_share(plan, plan.overhead_seconds)} more than with everything kept: {terms}. {_best(plan)}"


def _best(plan: Plan) -> str:
    """Say how much less another plan for this budget could add, by the same costs, and what this one leaves of it."""
    left = plan.budget_bytes - plan.peak_bytes
    is_left = left > _LEFT * plan.budget_bytes
    if plan.overhead_seconds - plan.bound_seconds <= _ROUNDING * plan.plain_seconds:
        other = f", also none that uses the {format_bytes(left)} that this one leaves of it" if is_left else ""
        return f"No plan for this budget is predicted to be faster{other}."
    text = f"No plan for this budget is predicted to add less than {_share(plan, plan.bound_seconds)}."
    return f"{text} This one leaves {format_bytes(left)} of it." if is_left else text


def _time(plan: Plan, seconds: float) -> str:
    return _share(plan, seconds) if seconds > _ROUNDING * plan.plain_seconds else "no time"


def _share(plan: Plan, seconds: float) -> str:
    share = f" ({100 * seconds / plan.plain_seconds:.2f} %)" if plan.plain_seconds else ""
    return f"{format_seconds(seconds)}{share}"


def _peak(plan: Plan) -> str:
    """Say when the peak is, and what is in memory then."""
    step, cycle = simulate(plan.costs, plan), moments(plan.costs)
    peaks = [number for number, nbytes in enumerate(step.segment_bytes) if nbytes >= step.peak_bytes * (1 - _ROUNDING)]
    number = next((each for each in peaks if cycle[each].is_backward), peaks[0])
    segment, base = cycle[number].segment, base_parts(plan, number)
    parts = [
        *((nbytes, what.replace("its", "the block's")) for nbytes, what in base[:2]),
        (kept_bytes(plan, number), "kept by the blocks before it"),
        *base[2:],
        (
            step.peak_bytes - least_needs(plan)[number],
            "read back ahead" if cycle[number].is_backward else "still to be written out",
        ),
    ]
    held = ", ".join(f"{format_bytes(nbytes)} {what}" for nbytes, what in parts if nbytes)
    if segment.running < 0:
        return f"Peak {format_bytes(plan.peak_bytes)}, where no block runs: {held}."
    where = f"{'forward' if segment.is_forward else 'backward'} of {_entry(plan, segment.running)}"
    return f"Peak {format_bytes(plan.peak_bytes)}, in {where}: {held}."


def _entry(plan: Plan, index: int) -> str:
    """Say which entry of the stack it is: of the model, where the plan knows it."""
    if plan.block_names is not None:
        return plan.block_names[index]
    return f"block {index} of {len(plan.costs.stack)} ({plan.costs.stack[index]!r})"


def _groups(plan: Plan, action: Action) -> Iterator[tuple[str, Row, list[int]]]:
    """Yield which value of which blocks has an action, in words, its row, and these entries."""
    for row in rows(plan):
        chosen = row.chosen(plan, action)
        if chosen:
            where = f"of {row.of!r} in {len(chosen)} of {len(row.entries)} blocks"
            yield where if plan.blocks is None else f"in {say_blocks(plan, chosen)}", row, chosen


def _offloaded(plan: Plan) -> Iterator[str]:
    for where, row, chosen in _groups(plan, Action.OFFLOAD):
        value = row.value
        again_s, offload_s = (row.seconds(plan, chosen, what) for what in ("recompute_s", "offload_s"))
        other = f"computing it again would take {format_seconds(again_s)}, and what its inputs take"
        why = other if value.replayable else "it cannot be computed again"
        total = format_bytes(len(chosen) * value.nbytes)
        beside = f", {format_seconds(offload_s)} beside the copies" if offload_s else ""
        yield f"Offloaded: {value.name} {where} ({total} out and back{beside}): {why}."


def _recomputed(plan: Plan) -> Iterator[str]:
    for where, row, chosen in _groups(plan, Action.RECOMPUTE):
        if row.value.needed:
            total = format_bytes(len(chosen) * row.value.nbytes)
            seconds = format_seconds(row.seconds(plan, chosen, "recompute_s"))
            yield f"Recomputed: {row.value.name} {where} ({total}): {seconds}."


def _whole_blocks(plan: Plan) -> Iterator[str]:
    """Say which blocks are recorded, and which run again as a whole."""
    entries = list(zip(plan.costs.blocks, plan.actions, plan.rerun, strict=True))
    recorded = {
        index: block.recording_s
        for index, (block, actions, rerun) in enumerate(entries)
        if block.recording_s and not rerun and block.is_recorded(actions)
    }
    reruns = {index: block.rerun_seconds for index, (block, _, rerun) in enumerate(entries) if rerun}
    for what, seconds in (("Recorded, so that not all of it is kept", recorded), ("Run again as a whole", reruns)):
        for chosen in folded(plan, seconds):
            total = format_seconds(sum(seconds[index] for index in chosen))
            yield f"{what}: {say_blocks(plan, chosen)}: {total}."


def _without_reruns(plan: Plan) -> Iterator[str]:
    """Say which blocks could not be run again, where that might have been of use."""
    found: dict[tuple[str, str], list[int]] = {}
    if plan.overhead_seconds:
        for index, block in enumerate(plan.costs.blocks):
            if block.no_rerun:
                class_name = plan.costs.stack[index] if plan.block_names is None else ""
                found.setdefault((block.no_rerun, class_name), []).append(index)
    for (why, _), chosen in found.items():
        yield f"Never run again as a whole: {say_blocks(plan, chosen)}: {why}."


def _other_budgets(plan: Plan) -> Iterator[str]:
    """Say what a larger budget would save and a smaller one would cost."""
    if plan.peak_bytes > plan.budget_bytes:
        yield f"No plan fits this budget: this one needs least, {format_bytes(plan.peak_bytes)}."
        return
    change, rounding = min(_MORE_BYTES, plan.budget_bytes / 10), _ROUNDING * plan.plain_seconds
    if plan.overhead_seconds:
        more = solve(plan.costs, budget=plan.budget_bytes + change, pins=dict(plan.pins))
        now = plan.overhead_seconds if plan.chosen == "plan" else plan.bound_seconds  # another won by its measured time
        saved = max(now - more.overhead_seconds, 0.0)
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
