"""Known problems of checkpointing elsewhere: each program gives with actckpt what it gives without checkpointing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).parents[2]
_SCRIPT = runpy.run_path(str(_ROOT / "benchmarks/known_problems.py"))
_PROBLEMS = _SCRIPT["PROBLEMS"]
_CASES = [(number, method) for number, problem in _PROBLEMS.items() for method in problem.methods]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles


@pytest.fixture(scope="module")
def recorded() -> Any:
    """The committed result, of one version of torch."""
    (path,) = (_ROOT / "benchmarks/results").glob("known_problems_*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("number", _PROBLEMS)
def test_with_actckpt_the_program_gives_what_plain_training_gives(number: int) -> None:
    assert _SCRIPT["outcome"](_PROBLEMS[number], "actckpt", seed=1) == _SCRIPT["AS_PLAIN"]


@pytest.mark.parametrize(("number", "method"), _CASES)
def test_the_result_says_what_this_torch_does(number: int, method: str, recorded: Any) -> None:
    version = recorded["versions"]["torch"]
    if torch.__version__ != version:
        pytest.skip(f"the result is of torch {version}")
    assert _SCRIPT["outcome"](_PROBLEMS[number], method, seed=2) == recorded["figures"][str(number)][method]


@pytest.mark.parametrize("kept", _SCRIPT["KEPT"])
def test_kept_products_are_not_repeated_and_what_backward_does_not_read_is_freed(kept: str, recorded: Any) -> None:
    matmuls = {
        method: _SCRIPT["matmuls_and_bytes"](_SCRIPT["KEPT"][kept], call)
        for method, call in _SCRIPT["MATMUL_METHODS"].items()
    }
    expected = {method: tuple(row) for method, row in recorded["matmuls"][kept].items()}
    assert matmuls["actckpt"] == expected["actckpt"]
    assert all(ours <= theirs for ours, theirs in zip(matmuls["actckpt"], matmuls["torch"], strict=True))
    if torch.__version__ == recorded["versions"]["torch"]:
        assert matmuls == expected


def test_gradients_under_a_budget_use_the_mask_of_dropout_of_the_forward(recorded: Any) -> None:
    masks = _SCRIPT["masks_of_dropout"]()
    assert masks["actckpt"] == "the forward's mask"
    if torch.__version__ == recorded["versions"]["torch"]:
        assert masks == recorded["figures"]["190758"]


def test_a_smaller_budget_has_a_smaller_peak_and_each_keeps_within_its_budget(recorded: Any) -> None:
    peaks, budgets = _SCRIPT["our_peaks_and_budgets"]()
    for found, limits in (
        (peaks, budgets),
        [recorded["figures"]["197838"][name] for name in ("actckpt", "budgets of actckpt")],
    ):
        assert found == sorted(found) and len(set(found)) == len(found)
        assert all(peak <= limit for peak, limit in zip(found, limits, strict=True))
    torchs = recorded["figures"]["197838"]["torch"]
    assert torchs != sorted(torchs)
