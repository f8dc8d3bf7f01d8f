"""Cost tables of Llama-shaped stacks, from shapes and assumed rates, and a lower bound that needs no solver.

An eager block with fused RMSNorm, rotary embeddings, scaled dot product attention, separate SiLU and multiply,
bfloat16, batch 1. Products and attention take their FLOPs at assumed rates, other operators their memory traffic.
"""

import itertools
from typing import Any

import numpy

#: Assumed rates of one accelerator: matrix products, attention forward and backward, memory, each way of the link.
FLOPS, ATTENTION_FLOPS, ATTENTION_BACKWARD_FLOPS = 790e12, 550e12, 420e12
MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 4.3e12, 55e9
TOKENS, ELEMENT_BYTES = 8192, 2

Table = dict[str, Any]


_NOT_NEEDED = ("q_before_rope", "k_before_rope", "projected")


def _product(rows: int, columns: int) -> float:
    return 2 * TOKENS * rows * columns / FLOPS


def _traffic(nbytes: int) -> float:
    return nbytes / MEMORY_BYTES_PER_S


def _values(*, hidden: int, kv: int, feed_forward: int, heads: int, attention_s: float) -> list[Table]:
    """Return what a block makes, in the order of its forward."""
    wide, narrow, broad = (TOKENS * size * ELEMENT_BYTES for size in (hidden, kv, feed_forward))
    values: list[tuple[str, int, float, str]] = [  # name, bytes, seconds, inputs
        ("x0", wide, 0.0, ""),
        ("norm1", wide, _traffic(2 * wide), "x0"),
        ("q_before_rope", wide, _product(hidden, hidden), "norm1"),
        ("k_before_rope", narrow, _product(hidden, kv), "norm1"),
        ("q", wide, _traffic(2 * wide), "q_before_rope"),
        ("k", narrow, _traffic(2 * narrow), "k_before_rope"),
        ("v", narrow, _product(hidden, kv), "norm1"),
        ("attention", wide + 4 * heads * TOKENS, attention_s, "q k v"),
        ("projected", wide, _product(hidden, hidden), "attention"),
        ("x1", wide, _traffic(3 * wide), "x0 projected"),
        ("norm2", wide, _traffic(2 * wide), "x1"),
        ("gate", broad, _product(hidden, feed_forward), "norm2"),
        ("up", broad, _product(hidden, feed_forward), "norm2"),
        ("silu", broad, _traffic(2 * broad), "gate"),
        ("product", broad, _traffic(3 * broad), "silu up"),
    ]
    return [
        {
            "name": name,
            "bytes": size,
            "recompute_s": seconds,
            "inputs": inputs.split(),
            "needed": name not in _NOT_NEEDED,
            "replayable": name != "x0",
        }
        for name, size, seconds, inputs in values
    ]


def llama_block(*, hidden: int, kv: int, feed_forward: int, heads: int, window: int = TOKENS) -> Table:
    """Return the class of a block: `window` is how many tokens attention looks back."""
    attention_flops = 2 * TOKENS * window * hidden  # causal
    attention_s = attention_flops / ATTENTION_FLOPS
    values = _values(hidden=hidden, kv=kv, feed_forward=feed_forward, heads=heads, attention_s=attention_s)
    products_s = 2 * _product(hidden, hidden) + 2 * _product(hidden, kv) + 3 * _product(hidden, feed_forward)
    last_s = _product(feed_forward, hidden) + _traffic(3 * TOKENS * hidden * ELEMENT_BYTES)  # the next block's input
    forward_s = sum(value["recompute_s"] for value in values) + last_s
    attention_backward_s = 2.5 * attention_flops / ATTENTION_BACKWARD_FLOPS
    return {
        "forward_s": forward_s,
        "backward_s": 2 * products_s + attention_backward_s + 2 * (forward_s - products_s - attention_s),
        "working_set_bytes": sum(value["bytes"] for value in values if value["needed"]),
        "values": values,
    }


def stack(classes: dict[str, Table], num_blocks: int) -> Table:
    """Return a table whose blocks take turns among the classes."""
    names = itertools.islice(itertools.cycle(classes), num_blocks)
    rates = {"d2h_bytes_per_s": LINK_BYTES_PER_S, "h2d_bytes_per_s": LINK_BYTES_PER_S}
    return {"version": 1, "classes": classes, "stack": list(names), **rates}


def shape_8b(num_blocks: int = 32) -> Table:
    """Return a stack of the shape of an 8B Llama."""
    return stack({"block": llama_block(hidden=4096, kv=1024, feed_forward=14336, heads=32)}, num_blocks)


def shape_70b(num_blocks: int = 80) -> Table:
    """Return a stack of the shape of a 70B Llama."""
    return stack({"block": llama_block(hidden=8192, kv=1024, feed_forward=28672, heads=64)}, num_blocks)


def interleaved(num_blocks: int = 96) -> Table:
    """Return a stack of three structures that take turns: grouped queries, a sliding window, all heads with keys."""
    classes = {
        "grouped": llama_block(hidden=4096, kv=1024, feed_forward=14336, heads=32),
        "window": llama_block(hidden=4096, kv=1024, feed_forward=14336, heads=32, window=1024),
        "full": llama_block(hidden=4096, kv=4096, feed_forward=11008, heads=32),
    }
    return stack(classes, num_blocks)


def activation_bytes(table: Table) -> int:
    """Return the bytes that backward needs, of all blocks."""
    saved = {
        name: sum(value["bytes"] for value in block["values"] if value["needed"])
        for name, block in table["classes"].items()
    }
    return sum(saved[name] for name in table["stack"])


def plain_seconds(table: Table) -> float:
    """Return the seconds of a step in which everything is kept."""
    blocks = (table["classes"][name] for name in table["stack"])
    return sum(block["forward_s"] + block["backward_s"] for block in blocks)


def fluid_bound(table: Table, budget: float) -> float:
    """Return seconds that no plan of a stack of one structure can beat.

    All but the last block share the memory that the last one's working set leaves, and what the link carries away
    while they run; every set of values to store is tried, and mixtures of sets: a hull of bytes and seconds.
    """
    ((block,), num) = table["classes"].values(), len(table["stack"]) - 1
    stored = (budget - block["working_set_bytes"]) / num + table["d2h_bytes_per_s"] * block["forward_s"]
    points = _stored_and_recomputed(block)
    most = max(size for size, _ in points)
    waiting = [(size - most, seconds + most / table["d2h_bytes_per_s"]) for size, seconds in points]
    hull = _lower_hull([*points, *waiting])
    return num * float(numpy.interp(stored, *zip(*hull, strict=True)))


def _stored_and_recomputed(block: Table) -> list[tuple[float, float]]:
    """Return bytes and seconds of every set of values to store."""
    found = []
    by_name = {value["name"]: value for value in block["values"]}
    droppable = [value["name"] for value in block["values"] if value["replayable"]]
    for choice in itertools.product((False, True), repeat=len(droppable)):
        held = set(by_name) - {name for name, drop in zip(droppable, choice, strict=True) if drop}
        wanted = [name for name, value in by_name.items() if value["needed"]]
        again: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in held and name not in again:
                again.add(name)
                wanted.extend(by_name[name]["inputs"])
        seconds = sum(by_name[name]["recompute_s"] for name in again)
        found.append((sum(by_name[name]["bytes"] for name in held), seconds))
    return found


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of what mixtures of points can reach with the least seconds, by growing bytes."""
    hull: list[tuple[float, float]] = []
    for point in sorted(points):
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    return hull


def _turn(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> float:
    return (second[0] - first[0]) * (third[1] - first[1]) - (second[1] - first[1]) * (third[0] - first[0])
