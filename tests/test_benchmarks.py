"""Benchmarks that are scripts run, at toy size, and what they show holds there too."""

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_SIZE, _PATHS = 32, 10
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_MATRIX_BYTES = _SIZE * _SIZE * 4


@pytest.fixture(scope="module")
def memory_order() -> dict[str, Any]:
    return runpy.run_path(str(_BENCHMARKS / "memory_order.py"))


@pytest.mark.parametrize("order", ["path by path", "layer by layer"])
def test_backward_needs_five_matrices_at_most_and_less_than_with_torchs_selective_checkpoint(
    memory_order: dict[str, Any], order: str
) -> None:
    program, found = memory_order["ORDERS"][order], {}
    for method in ("torch selective, keep mm", "actckpt, keep mm"):
        for _ in range(2):  # the first run is audited, which takes some bytes
            found[method] = memory_order["measure"](
                program, memory_order["METHODS"][method], size=_SIZE, num_paths=_PATHS
            )
    torchs, ours = found.values()
    assert ours.extra_bytes <= 5 * _MATRIX_BYTES < torchs.extra_bytes
    assert ours.held_bytes < torchs.held_bytes


def test_script_prints_every_method_for_both_orders(
    memory_order: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert memory_order["main"](["--size", "16", "--paths", "2"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"  {name} ") == 2 for name in memory_order["METHODS"])


@pytest.fixture(scope="module")
def gpu_offload() -> dict[str, Any]:
    return runpy.run_path(str(_BENCHMARKS / "gpu_offload.py"))


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_torchs_selective_checkpoint_keeps_the_matmuls_that_the_models_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    kept = runpy.run_path(str(_BENCHMARKS / "gpu_beside.py"))["KEPT_BY_TORCH"]
    models = runpy.run_path(str(_BENCHMARKS / "gpu_models.py"))
    made = models["made"](name, models["TOY"], torch.device("cpu"))
    with torch.profiler.profile() as profile:
        made.loss()
    matmuls = {event.key for event in profile.key_averages() if event.key.removeprefix("aten::") in _MATMULS}
    assert matmuls and matmuls <= {operator.name().partition(".")[0] for operator in kept}


@pytest.mark.parametrize("name", ["gpu_offload", "gpu_te", "gpu_budgets"])
def test_gpu_benchmarks_explain_themselves_and_measure_nothing_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    main = runpy.run_path(str(_BENCHMARKS / f"{name}.py"))["main"]
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 0 and "--minutes" in capsys.readouterr().out
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "out.json")])
        assert main() == 0
        assert "nothing measured" in capsys.readouterr().out and not (tmp_path / "out.json").exists()


def _raise() -> dict[str, Any]:
    raise RuntimeError("CUDA error: out of luck")


def test_a_gpu_part_that_fails_or_has_no_time_is_written_down_and_the_rest_goes_on(
    gpu_offload: dict[str, Any], tmp_path: Path
) -> None:
    part, out = gpu_offload["Part"], tmp_path / "new folder" / "out.json"
    report = gpu_offload["Report"](out, {"layers": 2})
    written: list[Any] = []

    def look() -> dict[str, Any]:
        written.append(json.loads(out.read_text()))
        return {"bytes": 3}

    report.run([part("a", "one", _raise), part("a", "two", look)], time.monotonic() + 60)
    report.run([part("b", "three", look)], time.monotonic() - 1)
    assert "out of luck" in written[0]["figures"]["a"]["one"]["failed"], "known before the next part begins"
    found = json.loads(out.read_text())
    assert found["layers"] == 2 and found["figures"]["a"]["two"]["bytes"] == 3
    assert found["figures"]["b"] == {"three": {"skipped": "out of time"}}
    assert report.failed == ["a, one"] and len(written) == 1


@pytest.mark.parametrize("missing", ["copies", "row", "base", "nothing"])
def test_the_hidden_share_needs_its_parts(gpu_offload: dict[str, Any], missing: str) -> None:
    good = {"loop": {"out": 1e9, "back": 1e9}}
    figures = {
        "copies, pinned": {"64 MiB": {"failed": "x"} if missing == "copies" else good},
        "training": {
            "offload": {"skipped": "x"} if missing == "row" else {"step_ms": 120.0, "moved_bytes_per_step": 10**8},
            "plain": {"out_of_memory": True} if missing == "base" else {"step_ms": 100.0},
        },
    }
    found = gpu_offload["_hidden"](figures, "training", "offload", "plain")
    if missing == "nothing":
        assert found == {"copy_ms": pytest.approx(200.0), "hidden_share": pytest.approx(0.9)}
    else:
        assert found["hidden_share"] is None and found["because"]


@pytest.fixture(scope="module")
def gpu_budgets() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_BENCHMARKS)
        yield runpy.run_path(str(_BENCHMARKS / "gpu_budgets.py"))


def test_gpu_parts_come_in_the_order_of_their_value_and_make_no_model(
    gpu_offload: dict[str, Any], gpu_budgets: dict[str, Any]
) -> None:
    parts = list(gpu_offload["plan"](8, [8192, 32768], 6, "folder", {}))
    assert len({(part.section, part.name) for part in parts}) == len(parts)
    of_tokens = ("training", "hidden copies", "bounds of peaks")
    sections = [f"{section}, {tokens} tokens" for tokens in (8192, 32768) for section in of_tokens]
    assert list(dict.fromkeys(part.section for part in parts)) == ["copies, pinned", *sections, "copies, disk"]
    parts = list(gpu_budgets["parts"](gpu_budgets["REAL"], 15, 5, 8))
    assert len({(part.section, part.name) for part in parts}) == len(parts)
    sections = ["llama", "choices", "in turns", "other budgets", "gradients", "estimate", "vit", "unet"]
    assert list(dict.fromkeys(part.section for part in parts)) == sections
    assert [part.name for part in parts[:3]] == ["plain", "smallest", "budget 1"]
    assert [part.name for part in parts if part.section == "gradients"] == [
        *("budget 1", "budget 5", "budget 8", "budget 11", "budget 15")
    ]


def test_budgets_are_evenly_between_the_smallest_and_the_plain_peak(gpu_budgets: dict[str, Any]) -> None:
    assert gpu_budgets["spread"](100, 200, 5) == [100, 125, 150, 175, 200]
    assert gpu_budgets["spread"](100, 200, 1) == [100]


def test_gradients_are_compared_bit_for_bit(gpu_budgets: dict[str, Any]) -> None:
    compare = gpu_budgets["same_gradients"].__globals__["_differing"]
    expected = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([float("nan")])}
    assert compare({name: tensor.clone() for name, tensor in expected.items()}, expected) == {}
    assert compare({**expected, "a": torch.tensor([-0.0, 1.0])}, expected) == {"a": 0.0}
    assert compare({**expected, "a": torch.tensor([0.0, 1.5])}, expected) == {"a": 0.5}
    with pytest.raises(RuntimeError, match="other parameters"):
        compare({"a": expected["a"]}, expected)


@pytest.fixture(scope="module")
def gpu_suite() -> dict[str, Any]:
    return runpy.run_path(str(_BENCHMARKS / "gpu_suite.py"))


def test_the_gpu_suite_is_rehearsed_without_hardware(gpu_suite: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, str(_BENCHMARKS / "gpu_suite.py"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [part.name for part in gpu_suite["parts"](rehearses=True)]
    assert names == [part.name for part in gpu_suite["parts"](rehearses=False)]
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in names}
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(names)
    assert all(each["exit_status"] == 0 for each in found.values())

    loops = found["bandwidth"]["result"]["figures"]["copies, pinned"]
    assert all(row["share"]["out"] == pytest.approx(1.0) for row in loops.values())
    figures = found["frontier"]["result"]["figures"]
    rows = figures["training, 64 tokens"]
    assert {"plain", "offload", "torch checkpoint", "keeps matmuls", "half of the activations"} <= set(rows)
    plain = rows["plain"]["peak_allocated_bytes"]
    assert all(0 < row["peak_allocated_bytes"] < plain for name, row in rows.items() if name != "plain")
    assert all(row["within"] is True for row in figures["bounds of peaks, 64 tokens"].values())
    assert all(0 <= row["hidden_share"] <= 1 for row in figures["hidden copies, 64 tokens"].values())
    _check_budgets(found["budgets"]["result"]["figures"])
    assert "training, 128 tokens" in found["long_context"]["result"]["figures"]
    assert set(found["disk"]["result"]["figures"]) == {"copies, disk"}
    assert "nothing measured" in found["transformer_engine"]["output"] and "skipped" in found["tests"]["output"]


def _check_budgets(figures: dict[str, Any]) -> None:
    """What holds of budgets on the simulated device, where computing takes no time."""
    llama = figures["llama"]
    assert list(llama) == ["plain", "smallest", "budget 1", "budget 2"]
    assert llama["smallest"]["bytes"] == llama["budget 1"]["budget_bytes"]
    assert llama["plain"]["peak_bytes"] == llama["budget 2"]["budget_bytes"]
    rows = [llama["budget 1"], llama["budget 2"], *figures["other budgets"].values()]
    for row in rows:
        assert row["fits"] and 0 < row["peak_bytes"] <= row["budget_bytes"]
        assert row["peak_to_predicted"] == pytest.approx(1.0, abs=0.1) and row["left_bytes"] == 0
        assert sum(row["actions"]["values"].values()) == sum(rows[0]["actions"]["values"].values())
    assert llama["budget 1"]["peak_bytes"] < llama["budget 2"]["peak_bytes"]
    assert "recompute" in llama["budget 1"]["actions"]["values"]
    assert set(figures["other budgets"]["budget='auto'"]["actions"]["values"]) == {"keep"}
    assert all(row["same_bits"] for row in figures["gradients"].values()) and len(figures["gradients"]) == 6
    beside = figures["in turns"]["round 1"]["by_now"]
    assert all({"ratio_to_best_simple", "to"} <= set(row) for row in beside.values())
    assert set(beside["budget 1"]["to"]) == {"torch checkpoint", "torch selective, keeps matmuls"}
    assert figures["estimate"]["llama"]["recompute"]["to_peak"] == pytest.approx(1.0, abs=0.1)
    assert set(figures["vit"]) == set(figures["unet"]) == {"plain", "smallest", "budget 1"}


def test_the_parts_of_the_gpu_suite_fit_into_nine_minutes_even_where_each_takes_all_of_its_time(
    gpu_suite: dict[str, Any],
) -> None:
    limits = [part.seconds for part in gpu_suite["parts"](rehearses=False)]
    assert sum(limits) < gpu_suite["_SECONDS"] == 9 * 60


def test_a_part_of_the_suite_that_fails_hangs_or_has_no_time_is_written_down(
    gpu_suite: dict[str, Any], tmp_path: Path
) -> None:
    part, python = gpu_suite["Part"], sys.executable
    hangs = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('{\"known\": 3}'); time.sleep(9999)"
    parts = [
        part("raises", [python, "-c", "raise ValueError('no luck')"], 999),
        part("missing", [str(tmp_path / "no program")], 999),
        part("hangs", [python, "-c", hangs, "{result}"], 5),
        part("good", [python, "-c", "print('all well')"], 999),
    ]
    assert gpu_suite["run"](parts, tmp_path / "out", 9999) == ["raises", "missing", "hangs"]
    found = {each.name: json.loads((tmp_path / "out" / f"{each.name}.json").read_text()) for each in parts}
    assert found["raises"]["error"] == "exit status 1: ValueError: no luck"
    assert "FileNotFoundError" in found["missing"]["error"]
    assert "time limit" in found["hangs"]["error"] and found["hangs"]["result"] == {"known": 3}
    assert "error" not in found["good"] and "all well" in found["good"]["output"]
    assert gpu_suite["run"](parts[3:], tmp_path / "late", 0) == ["good"]
    assert "out of time" in json.loads((tmp_path / "late" / "good.json").read_text())["error"]


def test_a_checkout_compared_with_itself_gives_a_ratio_for_every_row(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    root = str(_BENCHMARKS.parent)
    options = ["--rounds=1", "--warm-ups=1", f"--out={out}"]
    subprocess.run([sys.executable, str(_BENCHMARKS / "compare_checkouts.py"), root, root, *options], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 21
    assert all(
        row["before_us"] > 0 and row["ratio"] > 0 for name, row in rows.items() if not name.startswith("offload")
    )


def test_plans_for_three_budgets_fit_as_predicted(tmp_path: Path) -> None:
    command = [sys.executable, str(_BENCHMARKS / "budgets.py"), "--models", "unet", "--budgets", "3", "--pairs", "1"]
    subprocess.run([*command, "--out", str(tmp_path / "budgets.json")], check=True, capture_output=True)
    found = json.loads((tmp_path / "budgets.json").read_text())["models"]["unet"]
    assert [row["fits"] for row in found["rows"]] == [True] * 3
    for row in found["rows"]:
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)
        assert row["ratio_to_plain"] > 0.0
    peaks = [row["peak_bytes"] for row in found["rows"]]
    assert peaks[0] <= found["smallest_bytes"] <= 1.01 * peaks[0] + 2**13  # it has a reserve
    assert peaks == sorted(peaks) and peaks[-1] == found["plain_peak_bytes"]
    assert found["rows"][-1]["best_simple"] in ("nothing", "recompute", "keep attention", "keep matmuls")


def test_estimates_of_the_shape_that_is_too_large_to_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other parts run in tests/contract/test_estimation.py."""
    main = runpy.run_path(str(_BENCHMARKS / "estimate.py"))["main"]
    out = tmp_path / "out.json"
    assert main(["--parts", "longchat", "--tokens", "1024", "--out", str(out)]) == 0
    assert "torch checkpoint" in capsys.readouterr().out
    figures = json.loads(out.read_text())["figures"]
    held = {name: row["held_bytes"] for name, row in figures["longchat"].items()}
    assert held["actckpt, recompute"] <= held["torch checkpoint"] < held["actckpt, keep matmuls"]


def test_estimates_are_put_beside_what_gpus_needed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    main = runpy.run_path(str(_BENCHMARKS / "estimate.py"))["main"]
    plain = {"model": "budget_models", "peak_bytes": 12265179648, "ms": 94.6}
    result = {"machine": {"gpu": "NVIDIA H200"}, "versions": {}, "figures": {"unet": {"plain": plain}}}
    measured, out = tmp_path / "measured.json", tmp_path / "out.json"
    measured.write_text(json.dumps(result))
    assert main(["--parts", "devices", "--measured", str(measured), "--out", str(out)]) == 0
    assert "NVIDIA H200, unet, none" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["figures"]["devices"]
    # What is missing are workspaces of convolutions.
    assert 0.94 * row["measured_peak_bytes"] < row["estimated_peak_bytes"] < row["measured_peak_bytes"]


def test_the_cost_of_recording_is_measured_by_every_method(tmp_path: Path) -> None:
    out = tmp_path / "recording.json"
    command = [sys.executable, str(_BENCHMARKS / "recording.py"), "--models", "vit-tiny thin", "--pairs", "1"]
    subprocess.run([*command, "--against", str(_BENCHMARKS.parent), "--out", str(out)], check=True)
    figures = json.loads(out.read_text())["figures"]["vit-tiny thin"]
    assert list(figures) == ["before", "now"]
    for found in figures.values():
        assert found["operators"] == 12 * 32
        for phase in ("forward", "backward"):
            assert list(found[phase]) == ["plain", "mode and hooks", "actckpt", "torch selective"]
            assert found[phase]["plain"]["us_per_operator"] == 0.0 < found[phase]["actckpt"]["seconds"]


def test_first_cycles_of_each_length_are_compared_with_plain_steps() -> None:
    measure = runpy.run_path(str(_BENCHMARKS / "first_cycles.py"))["measure"]
    figures = measure(layers=6, width=64, tokens=[32, 48], models=2)
    assert list(figures) == ["32", "48"]
    for rows in figures.values():
        columns = zip(rows["least"], rows["median"], rows["most"], strict=True)
        assert all(0 < least <= median <= most for least, median, most in columns)
