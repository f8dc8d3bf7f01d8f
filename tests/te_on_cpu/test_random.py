"""Random programs: layers of all kinds, each run in its own way, microbatches in any order. ACTCKPT_TE_RUNS of them."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from te_on_cpu.methods import METHODS
from te_on_cpu.training import DTYPES, PLACES, RECIPES, TRACKERS, Setting, differing, train

_KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
_STEPS = 3


def _schedule(draw: random.Random) -> tuple[int, ...]:
    """Return forwards, numbered from one on, and backwards, as negative numbers, of one to three microbatches."""
    moves: list[int] = []
    waiting: list[int] = []
    number, count = 0, draw.randint(1, 3)
    while number < count or waiting:
        if number < count and (not waiting or draw.random() < 0.5):
            number += 1
            moves.append(number)
            if number > 1 and draw.random() < 0.15:
                continue  # its backward never runs
            waiting.append(number)
        else:
            moves.append(-waiting.pop(draw.randrange(len(waiting))))
    return tuple(moves)


@pytest.mark.parametrize("seed", range(int(os.environ.get("ACTCKPT_TE_RUNS", "24"))))
def test_a_random_program_gives_the_bits_of_a_plain_run(te: Any, seed: int) -> None:
    draw = random.Random(seed)
    kinds = tuple(draw.choice(_KINDS) for _ in range(draw.randint(1, 3)))
    hows = [METHODS[draw.choice(list(METHODS))] for _ in kinds]
    setting = Setting(
        draw.choice(RECIPES),
        draw.choice(list(DTYPES)),
        draw.choice(TRACKERS),
        kinds=kinds,
        places=tuple(draw.choice(PLACES) for _ in kinds),
        only_inside=draw.random() < 0.2,
        caches_weights=draw.random() < 0.3,
        schedules=tuple(_schedule(draw) for _ in range(_STEPS)),
    )

    def prepare(model: torch.nn.ModuleList) -> None:
        for layer, how in zip(model, hows, strict=True):
            if how.prepare is not None:
                how.prepare(torch.nn.ModuleList([layer]))

    found = train(te, setting, [how.method for how in hows], prepare=prepare)
    assert differing(found, train(te, setting)) == [], setting
