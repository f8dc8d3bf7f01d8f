"""The demo at toy size, and that it fails loudly when a method is wrong."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actckpt import cli
from actckpt._core import devices
from actckpt.demo import run as demo_run
from actckpt.demo.comparison import find_differences
from actckpt.demo.data import read_text
from actckpt.demo.methods import METHODS, Method
from actckpt.demo.model import LanguageModel
from actckpt.demo.output import describe_plan
from actckpt.demo.run import prepare_demo, run_demo
from actckpt.demo.settings import DemoSettings
from actckpt.demo.train import MethodResult, train
from actckpt.memory import StepMemory
from actckpt.planner import solve


def _toy(out: Path, **changes: object) -> DemoSettings:
    toy = DemoSettings(steps=3, layers=3, dim=16, heads=2, seq=32, batch=2, device="cpu", out=out, plot=False)
    return replace(toy, **changes)  # type: ignore[arg-type]


def _train(method: Method, settings: DemoSettings) -> MethodResult:
    device = torch.device("cpu")
    return train(method, settings, text=read_text(), device=device, on_step=lambda loss: None)


def _wrong(model: LanguageModel) -> None:
    """Turn one gradient around: losses differ from the second step on."""
    model.head.weight.register_hook(lambda grad: -grad)


def test_toy_run_reports_equal_methods_a_saving_and_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run_demo(prepare_demo(_toy(tmp_path / "new" / "folder", plot=True))) == 0
    out = capsys.readouterr().out
    assert "Equal bit for bit" in out
    content = json.loads((tmp_path / "new" / "folder" / "demo.json").read_text())
    assert content["equal"] is True
    results = {result["method"]: result for result in content["results"]}
    assert list(results) == [method.name for method in METHODS]
    assert all(name in out for name in results)
    assert results["none"]["saved_percent"] == 0
    assert results["torch-checkpoint"]["saved_percent"] > 20
    assert results["actckpt-checkpoint"]["saved_percent"] > 20
    assert results["recompute-by-replay"]["saved_percent"] >= results["actckpt-checkpoint"]["saved_percent"]
    assert results["keep-matmuls"]["saved_percent"] > results["torch-keep-matmuls"]["saved_percent"] > 0
    # Equal where all that is moved is less than what wakes a worker.
    assert results["offload-matmuls"]["saved_percent"] >= results["keep-matmuls"]["saved_percent"]
    assert len({tuple(result["losses_hex"]) for result in results.values()}) == 1
    assert len({result["parameters_sha256"] for result in results.values()}) == 1
    assert (tmp_path / "new" / "folder" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_shows_plan_prediction_race_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _toy(tmp_path, methods=("none",), dim=64, seq=64, activation_budget="60%")
    assert run_demo(prepare_demo(settings)) == 0
    out = capsys.readouterr().out
    assert "Plan of 'budget'" in out and "Predicted: peak" in out
    assert "Raced, time over the plan's: plan 1.000, recompute " in out
    assert "Recomputed:" in out or "Run again as a whole:" in out
    results = {result["method"]: result for result in json.loads((tmp_path / "demo.json").read_text())["results"]}
    assert 30 < results["budget"]["saved_percent"] < 75
    with pytest.raises(ValueError, match="activation_budget='lots' is not a size"):
        prepare_demo(_toy(tmp_path, activation_budget="lots"))


def test_a_budget_that_is_too_small_says_so_before_any_other_method_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def noted(method: Method, *args: Any, **kwargs: Any) -> MethodResult:
        trained.append(method.name)
        return train(method, *args, **kwargs)

    monkeypatch.setattr(demo_run, "train", noted)
    sizes = {"steps": 2, "layers": 3, "dim": 64, "heads": 2, "seq": 64, "batch": 2, "device": "cpu"}
    words = ["demo", "--no-plot", *(f"--{name}={value}" for name, value in sizes.items())]
    words += ["--out", str(tmp_path), "--methods", "none", "--activation-budget"]
    assert cli.main([*words, "1%"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and trained == ["budget"]
    line = told.err.splitlines()[-1]
    assert line.startswith("actckpt demo: No plan fits into ") and "(--activation-budget '1%')" in line
    smallest = re.fullmatch(r".* Try --activation-budget (\d+KiB)\.", line)
    assert smallest is not None
    assert cli.main([*words, smallest[1]]) == 0
    assert trained == ["budget", "budget", "none"]
    results = json.loads((tmp_path / "demo.json").read_text())["results"]
    assert [result["method"] for result in results] == ["none", "budget"]


def test_a_wrong_method_fails_loudly_with_method_step_and_both_losses_in_hex(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = prepare_demo(_toy(tmp_path))
    demo = replace(demo, methods=(*demo.methods[:2], Method("broken", "turns a gradient around", _wrong)))
    assert run_demo(demo) == 1
    captured = capsys.readouterr()
    assert "Equal bit for bit" not in captured.out
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["equal"] is False
    assert len(content["differences"]) == 1
    expected, got = (content["results"][index]["losses_hex"][1] for index in (0, 2))
    assert f"FAILED: broken differs from none at step 2: loss {got}" in captured.err
    assert expected in captured.err


def test_parameters_that_differ_after_equal_losses_are_found(tmp_path: Path) -> None:
    # With one step the wrong gradient reaches the parameters but no loss.
    settings = _toy(tmp_path, steps=1)
    results = [
        _train(METHODS[0], settings),
        _train(Method("broken", "turns a gradient around", _wrong), settings),
    ]
    assert results[0].losses == results[1].losses
    (message,) = find_differences(results)
    assert "broken differs from none after step 1: head.weight has SHA-256 " in message
    assert all(result.digests["head.weight"] in message for result in results)


def test_the_sign_of_zero_and_nan_are_compared_as_bits(tmp_path: Path) -> None:
    result = _train(METHODS[0], _toy(tmp_path, steps=1))
    zero, minus, nan = (replace(result, losses=(loss,)) for loss in (0.0, -0.0, float("nan")))
    assert len(find_differences([zero, minus])) == 1
    assert find_differences([nan, nan]) == []


def test_loss_falls_and_dropout_is_active(tmp_path: Path) -> None:
    settings = _toy(tmp_path, steps=30, batch=8)
    result = _train(METHODS[0], settings)
    assert result.losses[-1] < result.losses[0] - 1
    assert result.losses != _train(METHODS[0], replace(settings, dropout=0.5)).losses


def test_training_leaves_the_callers_random_state_alone_and_repeats_itself(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    first, second = (_train(METHODS[0], _toy(tmp_path)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert find_differences([first, second]) == []
    assert first.memory.peak_bytes == second.memory.peak_bytes


def test_without_matplotlib_one_line_says_so_and_the_rest_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run_demo(prepare_demo(_toy(tmp_path, plot=True, steps=1, methods=("none",)))) == 0
    assert "No picture: matplotlib is not installed" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json"]


def test_a_device_that_is_not_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: None)
    for name in ("cuda", "cuda:7", "tpu", ""):
        with pytest.raises(ValueError, match=rf"The device '{name}' cannot.*usable are auto, cpu\."):
            prepare_demo(_toy(tmp_path, device=name))
    assert prepare_demo(_toy(tmp_path, device="auto")).device == torch.device("cpu")


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out is .*file.*cannot be written \(File exists\); name a folder"):
        prepare_demo(_toy(tmp_path / "file"))


def test_running_out_of_memory_says_what_to_make_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(demo_run, "train", exhaust)
    with pytest.raises(MemoryError, match=r"method none does not fit.*9 bytes\. Try a smaller --batch"):
        run_demo(prepare_demo(_toy(tmp_path)))


def test_methods_are_not_blamed_where_plain_training_does_not_repeat_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times: list[int] = []

    def wrong_once(model: LanguageModel) -> None:
        times.append(1)
        if len(times) == 1:
            _wrong(model)

    demo = prepare_demo(_toy(tmp_path))
    plain, other = demo.methods[:2]
    broken = Method("broken", "turns a gradient around", _wrong)
    assert run_demo(replace(demo, methods=(replace(plain, apply=wrong_once), other))) == 0
    captured = capsys.readouterr()
    assert "Equal bit for bit" in captured.out and "plain training, which no method touches, gave" in captured.err
    times.clear()
    assert run_demo(replace(demo, methods=(replace(plain, apply=wrong_once), other, broken))) == 1
    assert "FAILED: broken differs from none at step 2" in capsys.readouterr().err


@pytest.mark.parametrize(("measured", "is_off"), [(1.0, False), (1.08, False), (1.2, True), (0.8, True)])
def test_a_prediction_that_does_not_hold_is_pointed_out(measured: float, is_off: bool) -> None:
    block = {"forward_s": 1.0, "backward_s": 2.0, "working_set_bytes": 10, "values": []}
    plan = solve({"version": 1, "classes": {"block": block}, "stack": ["block"]}, budget=100)
    memory = StepMemory(10, ())
    reference = MethodResult("none", (1.0,), (1.0,), {}, memory)
    result = MethodResult("budget", (1.0,), (measured,), {}, memory, plan)
    assert ("another time than was predicted" in describe_plan(result, reference, torch.device("cpu"))) == is_off
