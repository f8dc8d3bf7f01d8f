"""Steps with quantized modules give every reference back: internals/references.py tells how."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals.references import assert_references_flat

from te_on_cpu import training
from te_on_cpu.methods import METHODS


@pytest.mark.parametrize("name", ["checkpoint", "offload", "region"])
def test_quantized_modules_give_every_reference_back(te: Any, name: str) -> None:
    layer, recipe = training.make_layer(te, "Linear"), training.make_recipe("delayed")
    x = training.make_input(torch.float32, 1)

    def step() -> None:
        with te.autocast(True, recipe=recipe):
            y = METHODS[name].method(layer, x)
        y.sum().backward()

    assert_references_flat(step)
