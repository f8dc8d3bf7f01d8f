"""Published closed forms, as far as they speak of what is planned here."""

import math
from typing import Any

import pytest

from actckpt import Action
from actckpt.planner import simulate, solve


def _revolve_forward_steps(num_steps: int, num_checkpoints: int) -> int:
    """Return the forward steps that reversing a chain takes, without those that record.

    Griewank and Walther 2000: r l - C(c + r, c + 1), with r the least number for which C(c + r, c) >= l.
    """
    repeats = next(r for r in range(num_steps + 1) if math.comb(num_checkpoints + r, num_checkpoints) >= num_steps)
    return repeats * num_steps - math.comb(num_checkpoints + repeats, num_checkpoints + 1)


def _chain(num_steps: int) -> dict[str, Any]:
    """Return a chain of equal steps: each needs the state before it, which the step before can make again."""
    state = {"name": "x0", "bytes": 1, "recompute_s": 1, "replayable": True}
    step = {"forward_s": 1, "backward_s": 1, "working_set_bytes": 0, "values": [state]}
    first = {**step, "values": [{**state, "replayable": False}]}
    return {"version": 1, "classes": {"first": first, "step": step}, "stack": ["first", *["step"] * (num_steps - 1)]}


@pytest.mark.parametrize("num_checkpoints", [1, 2, 3, 4, 5])
def test_a_chain_costs_what_revolve_proves_while_no_step_is_run_three_times(num_checkpoints: int) -> None:
    """Compared: forward steps beyond the l - 1 of the first sweep, for c checkpoints including the chain's start.

    A plan recomputes each state at most once, so it is Revolve's for r <= 2, which is l <= (c + 1)(c + 2) / 2. There
    both are l - c - 1. In longer chains Revolve recomputes states twice, as those that were recomputed take the room of
    checkpoints; a plan counts that room in the working set, so it is a lower bound there.
    """
    longest = (num_checkpoints + 1) * (num_checkpoints + 2) // 2
    for num_steps in range(num_checkpoints + 1, longest + 4):
        plan = solve(_chain(num_steps), budget=num_checkpoints)
        more = _revolve_forward_steps(num_steps, num_checkpoints) - (num_steps - 1)
        if num_steps <= longest:
            assert plan.overhead_seconds == pytest.approx(more, abs=1e-6)
        else:
            assert plan.overhead_seconds < more


_SEQUENCE, _BATCH, _HIDDEN, _HEADS = 2048, 4, 12288, 96
#: Bytes of one number per token and feature, and of one per pair of tokens and head; and of both with 16 bits.
_SBH, _AS2B = _SEQUENCE * _BATCH * _HIDDEN, _HEADS * _SEQUENCE**2 * _BATCH
#: What selective recomputation computes again, and what nothing keeps: products that backward does not read.
_CORE = ("softmax", "softmax_mask", "dropped", "scores", "projected")


def _gpt(num_layers: int) -> dict[str, Any]:
    """Return GPT-3's layer as Korthikanti et al. 2022 count it: 16 bits, dropout masks of a byte per number."""
    seconds = {"product": 24 * _SBH * _HIDDEN / 312e12, "pointwise": 8 * _SBH / 1.5e12, "core": 10 * _AS2B / 1.5e12}
    sizes = {
        "x0": (2 * _SBH, "pointwise", ""),
        "norm1": (2 * _SBH, "pointwise", "x0"),
        "q": (2 * _SBH, "product", "norm1"),
        "k": (2 * _SBH, "product", "norm1"),
        "v": (2 * _SBH, "product", "norm1"),
        "scores": (2 * _AS2B, "core", "q k"),
        "softmax": (2 * _AS2B, "core", "scores"),
        "softmax_mask": (_AS2B, "core", ""),
        "dropped": (2 * _AS2B, "core", "softmax softmax_mask"),
        "context": (2 * _SBH, "core", "dropped v"),
        "projected": (2 * _SBH, "product", "context"),
        "mask1": (_SBH, "pointwise", ""),
        "x1": (2 * _SBH, "pointwise", "x0 projected mask1"),
        "norm2": (2 * _SBH, "pointwise", "x1"),
        "up": (8 * _SBH, "product", "norm2"),
        "gelu": (8 * _SBH, "pointwise", "up"),
        "mask2": (_SBH, "pointwise", ""),
    }
    values = [
        {
            "name": name,
            "bytes": size,
            "recompute_s": seconds[kind],
            "inputs": inputs.split(),
            "needed": name not in ("scores", "projected"),
            "replayable": name != "x0",
        }
        for name, (size, kind, inputs) in sizes.items()
    ]
    forward_s = sum(value["recompute_s"] for value in values)
    working = sum(value["bytes"] for value in values if value["needed"])
    layer = {"forward_s": forward_s, "backward_s": 2 * forward_s, "working_set_bytes": working, "values": values}
    return {"version": 1, "classes": {"layer": layer}, "stack": ["layer"] * num_layers}


def _korthikanti_bytes(num_layers: int) -> int:
    """Return s b h L (34 + 5 a s / h), equation 2 without tensor parallelism."""
    return num_layers * _SBH * (34 + 5 * _HEADS * _SEQUENCE // _HIDDEN)


def test_a_transformer_layer_holds_the_bytes_of_korthikantis_formula() -> None:
    table = _gpt(6)
    saved = [value for value in table["classes"]["layer"]["values"] if value["needed"]]
    assert 6 * sum(value["bytes"] for value in saved) == _korthikanti_bytes(6)
    assert solve(table, budget=_korthikanti_bytes(6)).overhead_seconds == 0.0
    assert solve(table, budget=_korthikanti_bytes(6) - 1).overhead_seconds > 0.0


@pytest.mark.parametrize(
    ("recomputed", "per_number"), [(_CORE, 34), (None, 2)], ids=["attention core, selective", "all but the input, full"]
)
def test_recomputation_leaves_the_bytes_of_korthikantis_formulas(recomputed: Any, per_number: int) -> None:
    """Selective recomputation leaves 34 s b h per layer, full recomputation 2 s b h; beside the layer that runs."""
    table = _gpt(6)
    layer = table["classes"]["layer"]
    names = [value["name"] for value in layer["values"]]
    dropped = recomputed or [name for name in names if name != "x0"]
    pins = {name: Action.RECOMPUTE if name in dropped else Action.KEEP for name in names}
    plan = solve(table, budget=10**15, pins=pins)
    assert plan.peak_bytes == 5 * per_number * _SBH + layer["working_set_bytes"]
    assert simulate(table, plan).peak_bytes == plan.peak_bytes
    free = solve(table, budget=plan.peak_bytes)
    assert free.overhead_seconds <= plan.overhead_seconds, "a free hand is no worse at the same peak"
