"""Benchmarks that are scripts run, at toy size, and what they show holds there too."""

import runpy
from pathlib import Path
from typing import Any

import pytest

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_SIZE, _PATHS = 32, 10
_MATRIX_BYTES = _SIZE * _SIZE * 4


@pytest.fixture(scope="module")
def memory_order() -> dict[str, Any]:
    return runpy.run_path(str(_BENCHMARKS / "memory_order.py"))


def test_backward_needs_less_than_with_torchs_selective_checkpoint_in_both_orders(memory_order: dict[str, Any]) -> None:
    results = memory_order["compare"](size=_SIZE, num_paths=_PATHS)
    assert list(results) == ["path by path", "layer by layer"]
    for order, figures in results.items():
        ours, torchs = figures["actckpt, keep mm"], figures["torch selective, keep mm"]
        assert ours.held_bytes < torchs.held_bytes, order
        assert ours.extra_bytes < torchs.extra_bytes, order


@pytest.mark.parametrize("order", ["path by path", "layer by layer"])
def test_backward_needs_five_matrices_at_most_in_both_orders(memory_order: dict[str, Any], order: str) -> None:
    program, method = memory_order["ORDERS"][order], memory_order["METHODS"]["actckpt, keep mm"]
    figures = memory_order["measure"](program, method, size=_SIZE, num_paths=_PATHS)
    assert figures.extra_bytes <= 5 * _MATRIX_BYTES


def test_script_prints_every_method_for_both_orders_and_draws(
    memory_order: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert memory_order["main"](["--size", "16", "--paths", "2", "--out", str(tmp_path / "order.svg")]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"  {name} ") == 2 for name in memory_order["METHODS"])
    assert (tmp_path / "order.svg").read_text().startswith("<?xml")
