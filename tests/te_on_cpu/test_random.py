"""Random programs: layers of all kinds, each run in its own way, microbatches in any order. ACTCKPT_TE_RUNS of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from te_on_cpu import training
from te_on_cpu.methods import METHODS, How
from te_on_cpu.training import DTYPES, RECIPES, TRACKERS

_KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
_STEPS = 3
#: Where the autocast of a layer stands: around the whole forward, also or only in the layer's region, or off in there.
_PLACES = ("around", "around and inside", "off inside")


class _Program:
    """What one seed stands for; `run` gives the same results plainly and with each layer's method."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.recipe, self.tracker = draw.choice(RECIPES), draw.choice(TRACKERS)
        self.dtype = DTYPES[draw.choice(list(DTYPES))]
        self.kinds = [draw.choice(_KINDS) for _ in range(draw.randint(1, 3))]
        self.methods = [METHODS[draw.choice(list(METHODS))] for _ in self.kinds]
        self.places = [draw.choice(_PLACES) for _ in self.kinds]
        self.only_inside = draw.random() < 0.2
        self.caches_weights = draw.random() < 0.3
        self.schedules = [_schedule(draw) for _ in range(_STEPS)]

    def run(self, te: Any, *, is_plain: bool) -> dict[str, Any]:
        """Train; return all results and states."""
        training.reset()
        with training.tracker_of(self.tracker) as get_tracker:
            torch.manual_seed(3)
            options = {"dtype": self.dtype, "get_rng_state_tracker": get_tracker}
            layers = torch.nn.ModuleList(training.make_layer(te, kind, **options) for kind in self.kinds)
            hows = [How() for _ in self.methods] if is_plain else self.methods
            for layer, how in zip(layers, hows, strict=True):
                if how.prepare is not None:
                    how.prepare(torch.nn.ModuleList([layer]))
            torch.manual_seed(5)
            return self._train(te, layers, hows)

    def _train(self, te: Any, layers: Any, hows: list[How]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        recipe = training.make_recipe(self.recipe)
        for step, schedule in enumerate(self.schedules):
            open_: dict[int, tuple[Tensor, Tensor]] = {}
            for place, move in enumerate(schedule):
                name = f"step {step}, move {place}"
                if move < 0:
                    x, y = open_.pop(-move)
                    y.float().square().mean().backward()
                    found[f"gradient of x, {name}"] = x.grad
                else:
                    open_[move] = self._forward(te, recipe, layers, hows, 10 * step + move)
                    found[f"output, {name}"] = open_[move][1].detach().clone()
                state = {**training.scales(layers), **training.process_state()}
                found |= {f"{key}, {name}": value for key, value in state.items()}
            with torch.no_grad():
                for key, parameter in layers.named_parameters():
                    found[f"gradient of {key}, step {step}"] = parameter.grad
                    parameter -= 0.05 * (0 if parameter.grad is None else parameter.grad)
                    parameter.grad = None
        return found

    def _forward(self, te: Any, recipe: Any, layers: Any, hows: list[How], number: int) -> tuple[Tensor, Tensor]:
        x = training.make_input(self.dtype, number)

        def autocast(enabled: bool = True) -> Any:
            return te.autocast(enabled and recipe is not None, recipe=recipe)

        with nullcontext() if self.only_inside else autocast():
            h = x * 1.0
            for layer, how, place in zip(layers, hows, self.places, strict=True):
                h = how.method(self._placed(layer, place, autocast), h, **self._options(layer, number))
        return x, h

    def _placed(self, layer: Any, place: str, autocast: Callable[..., Any]) -> Any:
        if place == "around" and not self.only_inside:
            return layer

        def function(x: Tensor, **options: Any) -> Any:
            with autocast(place != "off inside"):
                return layer(x, **options)

        return function

    def _options(self, layer: Any, number: int) -> dict[str, Any]:
        return {"is_first_microbatch": number % 10 == 1} if self.caches_weights else {}


def _schedule(draw: random.Random) -> list[int]:
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
    return moves


@pytest.mark.parametrize("seed", range(int(os.environ.get("ACTCKPT_TE_RUNS", "24"))))
def test_a_random_program_gives_the_bits_of_a_plain_run(te: Any, seed: int) -> None:
    program = _Program(seed)
    found, expected = program.run(te, is_plain=False), program.run(te, is_plain=True)
    assert training.differing(found, expected) == [], vars(program)
