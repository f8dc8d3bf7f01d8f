"""How the rows of a model's report are called."""

from __future__ import annotations

import pytest

from actckpt._blocks.model_report import folded


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.3"], "layers.3"),
        (["layers.0", "layers.1", "layers.2"], "layers.0-2"),
        (["layers.0", "layers.2"], "layers.{0, 2}"),
        (["layers.0", "layers.1", "layers.3"], "layers.{0-1, 3}"),
        (["encoder.0.layers.0", "encoder.1.layers.0"], "encoder.0-1.layers.0"),
        (["down.0.0", "down.0.1", "down.1.0", "down.1.1"], "down.0-1.0-1"),
        (["down.0.0", "down.1.1"], "down.*.*"),
        (["encoder.block", "decoder.block"], "*.block"),
        (["first", "layers.0", "layers.1"], "first and 2 more"),
        (["9", "10", "11"], "9-11"),
    ],
)
def test_names_of_blocks_become_one(names: list[str], expected: str) -> None:
    assert folded(names) == expected
