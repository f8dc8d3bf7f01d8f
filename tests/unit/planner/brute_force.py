"""Every plan of a small stack, tried: an oracle that shares no code with the solver or the simulator."""

import itertools
import random
from typing import Any

import numpy

Table = dict[str, Any]
#: Kept bytes, offloaded bytes, recompute seconds and recompute bytes of a block.
Footprint = tuple[float, float, float, float]


def random_table(seed: int) -> Table:
    """Return a small stack with whole numbers, so that plans fill budgets to the last byte."""
    rng = random.Random(seed)
    num_blocks, num_values = rng.choice([(2, 5), (3, 3), (3, 4), (4, 3)])
    classes = {f"c{i}": _random_class(rng, num_values) for i in range(rng.randint(1, 2))}
    stack = [rng.choice(list(classes)) for _ in range(num_blocks)]
    table: Table = {"version": 1, "classes": classes, "stack": stack}
    if rng.random() < 0.5:
        classes["head"] = {"forward_s": 1.0, "backward_s": 1.0, "working_set_bytes": rng.randint(1, 12)}
        stack[-1] = "head"
    for name in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
        table[name] = rng.choice([0.5, 1.0, 2.0, 4.0])
    if rng.random() < 0.3:
        table["host_bytes"] = rng.randint(0, 20)
        rng.random()  # so that the seeds that tests name keep their tables
    if rng.random() < 0.3:
        table["fixed_bytes"] = rng.randint(0, 5)
        for block in classes.values():
            block["gradient_bytes"] = rng.randint(0, 4)
    if seed % 4 == 3:
        for block in classes.values():
            block["recompute_bytes"], block["rerun_bytes"] = rng.randint(0, 6), rng.randint(0, 6)
            block["rerun"] = rng.random() < 0.6
    return table


def _random_class(rng: random.Random, num_values: int) -> Table:
    names = ["x0", *(f"v{i}" for i in range(1, num_values))]
    values = [
        {
            "name": name,
            "bytes": rng.randint(1, 9),
            "recompute_s": rng.choice([0.0, 0.25, 0.5, 1.0, 2.0, 3.0]),
            "inputs": [other for other in names[:i] if rng.random() < 0.4],
            "needed": rng.random() < 0.75,
            "offloadable": rng.random() < 0.8,
            "replayable": rng.random() < (0.8 if i else 0.3),
            **({"offload_s": rng.choice([0.25, 0.5, 1.0])} if rng.random() < 0.3 else {}),
        }
        for i, name in enumerate(names)
    ]
    return {
        "forward_s": rng.choice([0.5, 1.0, 2.0, 4.0]),
        "backward_s": rng.choice([0.5, 1.0, 3.0]),
        "working_set_bytes": rng.randint(1, 15),
        "values": values,
        "rerun": rng.random() < 0.2,
        **({"recording_s": rng.choice([0.25, 1.0, 2.0])} if rng.random() < 0.4 else {}),
        **({"rerun_s": rng.choice([0.0, 0.25, 1.0, 6.0])} if rng.random() < 0.5 else {}),
    }


def footprints(block: Table, *, last: bool, pins: dict[str, str]) -> list[Footprint]:
    """Return what each way to treat the values of a block comes to, once each."""
    values = block.get("values", [])
    found: dict[Footprint, None] = {}
    for actions in itertools.product("kor", repeat=len(values)):
        barred = last or any(a == "o" and not v["offloadable"] for a, v in zip(actions, values, strict=True))
        if ("o" in actions and barred) or any(
            pins.get(v["name"], a) != a for a, v in zip(actions, values, strict=True)
        ):
            continue
        held = {v["name"] for a, v in zip(actions, values, strict=True) if a != "r"}
        ways: dict[str, tuple[float, float]] = {}
        is_kept = all(a == "k" for a, v in zip(actions, values, strict=True) if v["needed"])
        replay = _computed_again(values, held, {v["name"] for v in values if v["needed"]})
        if replay is not None:
            again = 0.0 if is_kept else block.get("recompute_bytes", 0.0)
            ways["replay"] = (replay + (0.0 if is_kept else block.get("recording_s", 0.0)), again)
        if block.get("rerun"):
            replay = _computed_again(values, held, {"x0"} & {v["name"] for v in values})
            if replay is not None:
                ways["rerun"] = (block.get("rerun_s", block["forward_s"]) + replay, block.get("rerun_bytes", 0.0))
        for seconds, again in ways.values():
            beside = sum(v.get("offload_s", 0.0) for a, v in zip(actions, values, strict=True) if a == "o")
            sizes = [sum(v["bytes"] for a, v in zip(actions, values, strict=True) if a == which) for which in "ko"]
            found[sizes[0], sizes[1], seconds + beside, again] = None
    return list(found)


def _computed_again(values: list[Table], held: set[str], wanted: set[str]) -> float | None:
    """Return seconds of the smallest set of values that gives what is wanted: `r_v <= k_u + o_u + r_u`."""
    again = wanted - held
    while more := {name for v in values if v["name"] in again for name in v["inputs"]} - held - again:
        again |= more
    if any(v["name"] in again and not v["replayable"] for v in values):
        return None
    return float(sum(v["recompute_s"] for v in values if v["name"] in again))


def best_overhead(table: Table, budget: float, pins: dict[Any, str] | None = None) -> float:
    """Return the least seconds over plain training of any plan, infinite where none fits."""
    return float(overheads(table, budget, all_triples(table, pins)).min(initial=numpy.inf))


def all_triples(table: Table, pins: dict[Any, str] | None = None) -> Any:
    """Return every plan, as an array (block, plan, 4). Pins are letters, by block and name."""
    blocks = [table["classes"][name] for name in table["stack"]]
    ways = []
    for i, block in enumerate(blocks):
        pinned = {name: letter for (index, name), letter in (pins or {}).items() if index == i}
        ways.append(numpy.array(footprints(block, last=i == len(blocks) - 1, pins=pinned)))
    if not all(len(each) for each in ways):
        return numpy.empty((len(blocks), 0, 4))
    numbers = numpy.meshgrid(*(numpy.arange(len(each)) for each in ways), indexing="ij")
    return numpy.stack([each[number.ravel()] for each, number in zip(ways, numbers, strict=True)])


def capacities(table: Table, budget: float) -> tuple[Any, Any]:
    """Return bytes left for what earlier blocks hold, while each block runs forward and backward."""
    blocks = [table["classes"][name] for name in table["stack"]]
    found = []
    for way in ("forward", "backward"):
        gradients = numpy.array([block.get("gradient_bytes", 0) for block in blocks])
        made = numpy.array([gradients[i:].sum() * (way == "backward") for i in range(len(blocks))])
        working = numpy.array([block["working_set_bytes"] for block in blocks])
        found.append(budget - table.get("fixed_bytes", 0) - made - working)
    return found[0], found[1]


def overheads(table: Table, budget: float, plans: Any) -> Any:
    """Return seconds over plain training of each plan, infinite where it does not fit."""
    blocks = [table["classes"][name] for name in table["stack"]]
    again = plans[..., 2]
    before = [plans[:i, :, :2].sum(axis=0) for i in range(len(blocks) + 1)]
    total, zero = before[-1][:, 1], numpy.zeros(plans.shape[1])
    rooms = capacities(table, budget)
    fits = total <= table.get("host_bytes", numpy.inf)
    for i in range(len(blocks)):
        fits &= (before[i][:, 0] <= rooms[0][i]) & (before[i][:, 0] + plans[i, :, 3] <= rooms[1][i])
    seconds = again.sum(axis=0)
    out = zero
    for i, block in enumerate(blocks):
        there = before[i][:, 1]
        must = numpy.clip(before[i][:, 0] + there - rooms[0][i], 0, there) if i < len(blocks) - 1 else there
        wait = numpy.maximum((must - out) / table["d2h_bytes_per_s"] - block["forward_s"], zero)
        seconds, ran = seconds + wait, wait + block["forward_s"]
        out = numpy.minimum(out + table["d2h_bytes_per_s"] * ran, there)
    back = zero
    for i in reversed(range(len(blocks))):
        needed = total - before[i][:, 1]
        left = [rooms[1][j] - plans[j, :, 3] for j in range(i + 1)]
        most = numpy.min([total - before[j][:, 1] - before[j][:, 0] + left[j] for j in range(i + 1)], axis=0)
        wait = numpy.maximum((needed - back) / table["h2d_bytes_per_s"], zero)
        for ran, limit in ((wait, needed), (again[i] + blocks[i]["backward_s"], most)):
            back = numpy.maximum(back, numpy.minimum(back + table["h2d_bytes_per_s"] * ran, limit))
        seconds = seconds + wait
    return numpy.where(fits, seconds, numpy.inf)


def needed_bytes(table: Table) -> Any:
    """Return the smallest budget into which each plan fits, infinite where it fits none."""
    plans = all_triples(table)
    unlimited = overheads(table, numpy.inf, plans)
    rooms = capacities(table, 0.0)
    kept = numpy.cumsum(plans[..., 0], axis=0) - plans[..., 0]
    needed = numpy.maximum(kept - rooms[0][:, None], kept + plans[..., 3] - rooms[1][:, None]).max(axis=0)
    return numpy.where(numpy.isfinite(unlimited), needed, numpy.inf)


def smallest_budget(table: Table) -> float:
    """Return the smallest budget for which any plan fits, infinite where there is none."""
    return float(needed_bytes(table).min())
