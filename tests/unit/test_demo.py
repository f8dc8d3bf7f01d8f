"""The demo at toy size: equal bits, less memory, and a failure where a method is wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from actckpt import demo

CPU = torch.device("cpu")


def _toy(**changes: Any) -> demo.Options:
    sizes = {"steps": 3, "layers": 3, "dim": 64, "heads": 2, "seq": 64, "batch": 2, "activation_budgets": ()}
    return demo.Options(device=CPU, **sizes | changes)


def test_all_methods_are_equal_and_save_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert demo.run(_toy(activation_budgets=["60%"]), out=tmp_path / "new" / "folder") == 0
    out = capsys.readouterr().out
    assert "bit-identical in 5 runs" in out
    content = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    results = content["results"]
    assert content["equal"] is True and all(name in out for name in results)
    peaks = {name: result["peak_bytes"] / results["plain"]["peak_bytes"] for name, result in results.items()}
    assert peaks["torch checkpoint"] < 0.8 and peaks["recompute"] <= peaks["torch checkpoint"]
    assert peaks["recompute"] < peaks["keep matmuls"] < 1
    assert 0.4 < peaks["budget 60%"] <= 0.6
    assert len({(tuple(result["losses"]), result["digest"]) for result in results.values()}) == 1
    assert (tmp_path / "new" / "folder" / "demo.png").read_bytes().startswith(b"\x89PNG")


def _turn_a_gradient(model: demo.LanguageModel) -> None:
    model.head.weight.register_hook(lambda gradient: -gradient)


@pytest.mark.parametrize("steps", [1, 3])  # after one step only a parameter shows it
def test_a_method_with_other_gradients_fails(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_keep_matmuls", _turn_a_gradient)
    assert demo.run(_toy(steps=steps), out=tmp_path, draws=False) == 1
    captured = capsys.readouterr()
    assert "bit-identical" not in captured.out
    assert "FAILED: keep matmuls differs from plain training" in captured.err
    assert json.loads((tmp_path / "demo.json").read_text())["different"] == ["keep matmuls"]


def test_methods_are_not_blamed_where_plain_training_differs_from_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[demo.LanguageModel] = []

    def wrong_once(model: demo.LanguageModel) -> None:
        calls.append(model)
        if len(calls) == 1:
            _turn_a_gradient(model)

    monkeypatch.setattr(demo, "_plain", wrong_once)
    assert demo.run(_toy(), out=tmp_path, draws=False) == 0
    assert len(calls) == 2


def test_the_loss_falls_and_dropout_is_active(tmp_path: Path) -> None:
    def losses(dropout: float, steps: int) -> list[float]:
        assert demo.run(_toy(steps=steps, batch=8, dim=16, dropout=dropout), out=tmp_path, draws=False) == 0
        found: list[float] = json.loads((tmp_path / "demo.json").read_text())["results"]["plain"]["losses"]
        return found

    found = losses(0.1, 30)
    assert found[-1] < found[0] - 1 and found[:2] != losses(0.5, 2)


def test_the_model_is_causal() -> None:
    model = demo.LanguageModel(layers=2, dim=16, heads=4, kv_heads=2, seq=12, dropout=0.0)
    tokens = torch.randint(demo.BYTE_VALUES, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % demo.BYTE_VALUES
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name in ("steps", "layers", "dim", "heads", "seq", "batch") for value in (0, -1, 2**31)]
    + [{"dropout": value} for value in (-0.1, 1.0, math.nan, math.inf)]
    + [{"dim": 100, "heads": 3}],
)
def test_options_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(changes))} is "):
        _toy(**changes)
