"""Benchmarks that are scripts run, at toy size, and what they show holds there too."""

import html
import importlib
import json
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actckpt

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_SIZE, _PATHS = 32, 10
_MATMULS = ("mm", "addmm", "bmm", "baddbmm")
_MATRIX_BYTES = _SIZE * _SIZE * 4


def _run(script: str, *options: str, out: Path) -> Any:
    """Return what a script writes as its result."""
    command = [sys.executable, str(_BENCHMARKS / f"{script}.py"), *options, "--out", str(out / "result.json")]
    subprocess.run(command, check=True, capture_output=True)
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("order", ["path by path", "layer by layer"])
def test_backward_needs_five_matrices_at_most_and_less_than_with_torchs_selective_checkpoint(
    order: str, capsys: pytest.CaptureFixture[str]
) -> None:
    memory_order = runpy.run_path(str(_BENCHMARKS / "memory_order.py"))
    assert memory_order["main"](["--size", "16", "--paths", "2"]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"  {name} ") == 2 for name in memory_order["METHODS"])
    program, found = memory_order["ORDERS"][order], {}
    for method in ("torch selective, keep mm", "actckpt, keep mm"):
        for _ in range(2):  # the first run is audited, which takes some bytes
            found[method] = memory_order["measure"](
                program, memory_order["METHODS"][method], size=_SIZE, num_paths=_PATHS
            )
    torchs, ours = found.values()
    assert ours.extra_bytes <= 5 * _MATRIX_BYTES < torchs.extra_bytes
    assert ours.held_bytes < torchs.held_bytes


@pytest.fixture(scope="module")
def gpu_parts() -> Iterator[dict[str, Any]]:
    """The modules of `benchmarks/gpu_parts` by name."""
    names = ("__main__", "methods", "models", "rows", "training")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_BENCHMARKS)
        yield {name: importlib.import_module(f"gpu_parts.{name}") for name in names}


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_torchs_selective_checkpoint_keeps_the_matmuls_that_the_models_run(
    name: str, gpu_parts: dict[str, Any]
) -> None:
    models = gpu_parts["models"]
    built = models.build(models.toy({"llama": models.LLAMA, "vit": models.VIT}[name]), torch.device("cpu"))
    with torch.profiler.profile() as profile:
        built.loss(built.model)
    matmuls = {event.key for event in profile.key_averages() if event.key.removeprefix("aten::") in _MATMULS}
    assert matmuls and {name.removeprefix("aten::") for name in matmuls} <= set(gpu_parts["methods"].MATMULS)


def test_parts_explain_themselves_and_measure_nothing_without_a_gpu(
    gpu_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main = gpu_parts["__main__"].main
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # put back afterwards
    monkeypatch.setattr(sys, "argv", ["gpu_parts", "--help"])
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 0 and "--seconds" in capsys.readouterr().out
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["gpu_parts", "llama", "--out", str(tmp_path / "out")])
        assert main() == 0
        assert "nothing measured" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_methods_train_copies_that_share_parameters(gpu_parts: dict[str, Any]) -> None:
    models, methods = gpu_parts["models"], gpu_parts["methods"]
    built = models.build(models.toy(models.LLAMA), torch.device("cpu"))
    copies = [models.shared_copy(built.model) for _ in range(2)]
    for copy in copies:
        assert all(a is b for a, b in zip(copy.parameters(), built.model.parameters(), strict=True))
    methods.CHECKPOINT.prepare(copies[0], built.blocks(copies[0]))
    changed = ["forward" in vars(built.blocks(model)[0]) for model in (copies[0], copies[1], built.model)]
    assert changed == [True, False, False]


def _out_of_memory() -> dict[str, Any]:
    try:
        raise torch.OutOfMemoryError("no room")
    except torch.OutOfMemoryError as error:
        raise ValueError("the block does not run") from error


def _raise() -> dict[str, Any]:
    raise RuntimeError("CUDA error: out of luck")


def _not_installed() -> dict[str, Any]:
    importlib.import_module("a_library_that_nobody_has")
    return {}


class _Cpu:
    """The CPU in the place of a device."""

    device = torch.device("cpu")

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def calibration(self) -> dict[str, float]:
        return {"launch_us": 1.0}

    def free_memory(self) -> None:
        pass


def test_a_row_that_fails_or_has_no_time_is_written_down_and_the_rest_goes_on(
    gpu_parts: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "new folder" / "part.jsonl"
    rows = gpu_parts["rows"].Rows(path, _Cpu(), time.monotonic() + 60)
    written: list[Any] = []

    def look() -> dict[str, Any]:
        written.extend(json.loads(line) for line in path.read_text().splitlines())
        return {"bytes": 3}

    assert rows.part == "part" and rows.measure("one", _raise) is None
    assert rows.measure("two", look, size=2) == {"bytes": 3}
    assert rows.measure("three", _out_of_memory) is None and rows.measure("four", _not_installed) is None
    rows.deadline = time.monotonic() - 1
    assert rows.measure("five", look) is None
    assert "out of luck" in written[0]["failed"] and len(written) == 1, "known before the next row begins"
    found = {row["row"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert (found["two"]["bytes"], found["two"]["size"]) == (3, 2)
    assert "the block does not run" in found["three"]["out_of_memory"]
    assert found["four"]["not_installed"] == "a_library_that_nobody_has" and found["five"]["skipped"] == "out of time"
    assert all(row["versions"] == {"torch": torch.__version__} and row["host"] for row in found.values())
    assert rows.failed == ["one"]


def test_medians_are_those_of_steps_and_peaks_the_highest(gpu_parts: dict[str, Any]) -> None:
    peaks_and_ms = ((3, 1.0), (5, 9.0), (4, 2.0))
    steps = [{"peak_allocated_bytes": peak, "device_ms": ms, "joules": None} for peak, ms in peaks_and_ms]
    assert gpu_parts["rows"].medians(steps) == {"peak_allocated_bytes": 5, "device_ms": 2.0, "joules": None}


def test_gradients_are_compared_bit_for_bit(gpu_parts: dict[str, Any]) -> None:
    compare = gpu_parts["training"].differing
    expected = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([float("nan")])}
    assert compare({name: tensor.clone() for name, tensor in expected.items()}, expected) == {}
    assert compare({**expected, "a": torch.tensor([-0.0, 1.0])}, expected) == {"a": 0.0}
    assert compare({**expected, "a": torch.tensor([0.0, 1.5])}, expected) == {"a": 0.5}
    with pytest.raises(RuntimeError, match="other parameters"):
        compare({"a": expected["a"]}, expected)


@pytest.fixture(scope="module")
def gpu_run(gpu_parts: dict[str, Any]) -> dict[str, Any]:
    return runpy.run_path(str(_BENCHMARKS / "gpu_run.py"))


def test_the_gpu_run_is_rehearsed_without_hardware(gpu_run: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, str(_BENCHMARKS / "gpu_run.py"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [part.name for part in gpu_run["parts"](is_rehearsal=True)]
    assert names == [part.name for part in gpu_run["parts"](is_rehearsal=False)]
    found = json.loads((tmp_path / "result.json").read_text())["parts"]
    assert list(found) == names and all(part["exit_status"] == 0 for part in found.values())
    assert "skipped" in found["gpu_tests"]["output"] and "passed" in found["contract_tests"]["output"]
    rows = {name: part["rows"] for name, part in found.items() if "rows" in part}
    assert rows.keys() == set(names) - {"build", "gpu_tests", "contract_tests"}
    for part in rows.values():
        assert all(row["host"]["launch_us"] > 0 and row["versions"]["torch"] for row in part.values())
    _check_rows_of_methods(rows)
    _check_rows_of_budgets(rows, tmp_path / "plans")
    _check_pictures(rows, tmp_path)


def _check_rows_of_methods(rows: dict[str, Any]) -> None:
    """What holds of methods on the simulated device, where computing takes no time."""
    assert all(row["share"]["out"] == pytest.approx(1.0) for row in rows["link"].values())
    llama = rows["llama"]
    plain = llama["plain"]["peak_allocated_bytes"]
    for name in ("torch checkpoint", "torch selective, keeps matmuls", "actckpt checkpoint", "save_on_cpu"):
        row = llama[name]
        assert 0 < row["peak_allocated_bytes"] < plain and row["peak_reserved_bytes"] >= row["peak_allocated_bytes"]
        assert row["host_ms"] > 0 and row["device_ms"] >= 0 and row["joules"] is None
        assert llama[f"round 1, {name}"]["host_ms"] > 0
    assert llama["actckpt checkpoint, offloaded inputs"]["moved_bytes"] > 0
    for name, library in (("TRL offload", "trl"), ("torchtune offload", "torchtune"), ("Unsloth", "unsloth_zoo")):
        assert "peak_allocated_bytes" in llama[name] or llama[name]["not_installed"] == library
    compiled = rows["llama_compiled"]
    by_budget = compiled["compiled, activation_memory_budget=0.2"]["peak_allocated_bytes"]
    assert by_budget < compiled["compiled"]["peak_allocated_bytes"] < compiled["plain"]["peak_allocated_bytes"]
    assert all(row["compiled_graphs"] > 0 for name, row in compiled.items() if name.startswith("compiled"))
    assert rows["llama_8b"]["rate, torch checkpoint"]["mfu"] is None
    assert "not_installed" in rows["transformer_engine"]["TransformerEngine"]
    captured = {name: row for name, row in rows["cuda_graphs"].items() if name.startswith("captured, ")}
    assert len(captured) == 4 and all(row["host_ms"] > 0 for row in captured.values())
    assert all(row["captured_peak_bytes"] is None for row in captured.values()), "the simulated device has no graphs"


def _check_pictures(rows: dict[str, Any], folder: Path) -> None:
    """A picture per part has each method that was timed in turns, with its peak over the plain one."""
    pictures = {path.stem: path.read_text().partition("</metadata>") for path in folder.glob("*.svg")}
    assert set(pictures) == {"llama", "llama_compiled", "vit", "llama_2k", "moe"}
    for name, (metadata, _, picture) in pictures.items():
        (shown,) = re.findall(r"<dc:description>(.*)</dc:description>", metadata)
        points, part = json.loads(html.unescape(shown)), rows[name]
        timed = [method for method in part["ratios to plain"] if f"round 1, {method}" in part]
        assert set(points) == set(timed) and points["plain"] == [1.0, 1.0]
        for method, (peak, ratio) in points.items():
            assert peak == pytest.approx(
                part[method]["peak_allocated_bytes"] / part["plain"]["peak_allocated_bytes"], abs=1e-3
            )
            assert ratio == pytest.approx(part["ratios to plain"][method]["median"], abs=1e-3) and ratio > 0
            assert (method in picture) == ("actckpt budget" not in method), "budgets are a line"


def _check_rows_of_budgets(rows: dict[str, Any], plans: Path) -> None:
    """Budgets hold on the simulated device, and plans and their costs are saved."""
    budgets = {
        (part, name): row
        for part, part_rows in rows.items()
        for name, row in part_rows.items()
        if "budget_bytes" in row
    }
    assert {part for part, _ in budgets} >= {"capped", "llama", "llama_compiled", "llama_8b", "vit", "llama_2k", "moe"}
    for row in budgets.values():
        assert row["fits"] and row["is_settled"]
        tolerance = 2**20 + 0.01 * row["predicted_peak_bytes"]  # the promise of budgets
        assert row["peak_allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], abs=tolerance)
        assert actckpt.Plan.load(plans / row["plan"]).costs.blocks
    assert rows["llama"]["smallest budget"]["bytes"] < rows["llama"]["plain"]["peak_allocated_bytes"]
    gradients = rows["gradients"]
    assert len(gradients) == len({row["plan"] for row in budgets.values()})
    assert all(row["same_bits"] for row in gradients.values())


def test_the_parts_of_the_gpu_run_fit_into_nine_minutes_even_if_each_takes_all_of_its_time(
    gpu_run: dict[str, Any],
) -> None:
    limits = [part.seconds for part in gpu_run["parts"](is_rehearsal=False)]
    assert sum(limits) < gpu_run["_SECONDS"] == 9 * 60


def test_a_part_that_fails_hangs_or_has_no_time_is_written_down(gpu_run: dict[str, Any], tmp_path: Path) -> None:
    part, python = gpu_run["Part"], sys.executable
    hangs = """import pathlib, sys, time
pathlib.Path(sys.argv[1], "hangs.jsonl").write_text('{"row": "known", "bytes": 3}\\n{"row": "cut')
time.sleep(9999)"""
    parts = [
        part("raises", [python, "-c", "raise ValueError('no luck')"], 999),
        part("missing", [str(tmp_path / "no program")], 999),
        part("hangs", [python, "-c", hangs, "{out}"], 5),
        part("good", [python, "-c", "print('all well')"], 999),
    ]
    assert gpu_run["run"](parts, tmp_path / "out", 9999) == ["raises", "missing", "hangs"]
    found = json.loads((tmp_path / "out" / "result.json").read_text())["parts"]
    assert found["raises"]["error"] == "exit status 1: ValueError: no luck"
    assert "FileNotFoundError" in found["missing"]["error"]
    assert "time limit" in found["hangs"]["error"] and found["hangs"]["rows"] == {"known": {"bytes": 3}}
    assert "error" not in found["good"] and "all well" in found["good"]["output"]
    assert gpu_run["run"](parts[3:], tmp_path / "late", 0) == ["good"]
    late = json.loads((tmp_path / "late" / "result.json").read_text())["parts"]
    assert "out of time" in late["good"]["error"]


def test_a_checkout_compared_with_itself_gives_a_ratio_for_every_row(tmp_path: Path) -> None:
    root = str(_BENCHMARKS.parent)
    rows = _run("compare_checkouts", root, root, "--rounds=1", "--warm-ups=1", out=tmp_path)["rows"]
    assert len(rows) == 21
    assert all(
        row["before_us"] > 0 and row["ratio"] > 0 for name, row in rows.items() if not name.startswith("offload")
    )


def test_plans_for_three_budgets_fit_as_predicted(tmp_path: Path) -> None:
    found = _run("budgets", "--models", "unet", "--budgets", "3", "--pairs", "1", out=tmp_path)["models"]["unet"]
    assert [row["fits"] for row in found["rows"]] == [True] * 3
    for row in found["rows"]:
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.03)
        assert row["ratio_to_plain"] > 0.0
    peaks = [row["peak_bytes"] for row in found["rows"]]
    assert peaks[0] <= found["smallest_bytes"] <= 1.01 * peaks[0] + 2**13  # it has a reserve
    assert peaks == sorted(peaks) and peaks[-1] == found["plain_peak_bytes"]
    assert found["rows"][-1]["best_simple"] in ("keep everything", "recompute", "keep attention", "keep matmuls")


def test_estimates_of_the_shape_that_is_too_large_to_run_and_of_what_gpus_needed(tmp_path: Path) -> None:
    """The other parts run in tests/contract/test_estimation.py."""
    figures = _run("estimate", "--parts", "longchat", "--tokens", "1024", out=tmp_path)["figures"]
    held = {name: row["held_bytes"] for name, row in figures["longchat"].items()}
    assert held["actckpt, recompute"] <= held["torch checkpoint"] < held["actckpt, keep matmuls"]
    plain = {"model": "budget_models", "peak_bytes": 12265179648, "ms": 94.6}
    result = {"machine": {"gpu": "NVIDIA H200"}, "versions": {}, "figures": {"unet": {"plain": plain}}}
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(result))
    (row,) = _run("estimate", "--parts", "devices", "--measured", str(measured), out=tmp_path)["figures"]["devices"]
    # What is missing are workspaces of convolutions.
    assert 0.94 * row["measured_peak_bytes"] < row["estimated_peak_bytes"] < row["measured_peak_bytes"]


def test_the_cost_of_recording_is_measured_by_every_method(tmp_path: Path) -> None:
    options = ["--models", "vit-tiny thin", "--pairs", "1", "--against", str(_BENCHMARKS.parent)]
    figures = _run("recording", *options, out=tmp_path)["figures"]["vit-tiny thin"]
    assert list(figures) == ["before", "now"]
    for found in figures.values():
        assert found["operators"] == 12 * 32
        for phase in ("forward", "backward"):
            assert list(found[phase]) == ["plain", "mode and hooks", "actckpt", "torch selective"]
            assert found[phase]["plain"]["us_per_operator"] == 0.0 < found[phase]["actckpt"]["seconds"]


class _IdleRecorder:
    """Stands for the compiled one."""

    def __init__(self) -> None:
        self.levels: list[int] = []

    def enter(self, level: int) -> None:
        self.levels.append(level)

    def leave(self) -> int:
        return 38


def test_recorders_in_the_dispatcher_take_turns_with_a_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_BENCHMARKS)
    measure = runpy.run_path(str(_BENCHMARKS / "dispatcher_recorder.py"))["measure"]
    recorder = _IdleRecorder()
    figures = measure(recorder, rounds=2, warm_ups=1)
    methods = figures["methods"]
    recorded = [name for name, row in methods.items() if row["recorded_operators"] == 12 * 38]
    assert figures["operators"] == 12 * 40
    assert recorded == [name for name in methods if name.startswith("fallback")]
    assert sorted(recorder.levels) == sorted([0, 1, 2, 2] * 12 * 3)
    assert methods["plain"]["us_per_operator"] == 0.0 < methods["actckpt"]["us_per_operator"]


def test_growth_is_measured_for_every_row() -> None:
    growth = runpy.run_path(str(_BENCHMARKS / "growth.py"))
    figures = growth["measure"](most=1000, only=("parts", "saved tensors, a policy", "operators of a block, a policy"))
    assert list(figures["operators of a block, a policy"]) == ["100", "1000"]
    for row in figures.values():
        assert all(found.get("plain_us", 1.0) > 0.0 and found.get("bytes", 100.0) >= 100.0 for found in row.values())
    assert growth["table"](figures).count("\n") == 2 + len(figures) == 7


def test_first_cycles_of_each_length_are_compared_with_plain_steps() -> None:
    measure = runpy.run_path(str(_BENCHMARKS / "first_cycles.py"))["measure"]
    figures = measure(layers=6, width=64, tokens=[32, 48], models=2)
    assert list(figures) == ["32", "48"]
    for rows in figures.values():
        columns = zip(rows["least"], rows["median"], rows["most"], strict=True)
        assert all(0 < least <= median <= most for least, median, most in columns)


@pytest.fixture(scope="module")
def published() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_BENCHMARKS)
        yield runpy.run_path(str(_BENCHMARKS / "published.py"))


def test_models_of_published_tables_have_the_parameters_of_theirs(published: dict[str, Any]) -> None:
    counts = {"ResNet-50": 25_557_032, "GoogLeNet": 6_624_904, "VGG-16": 138_357_544}
    for name, count in counts.items():
        with torch.device("meta"):
            model = published["MODELS"][name][0]()
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


def test_plans_keep_the_shares_of_a_published_table(published: dict[str, Any]) -> None:
    rows = published["published"]("Tree-LSTM", 1)["rows"]
    assert [row["published_ratio"] for row in rows] == pytest.approx([1.651, 1.847, 2.091, 3.020], abs=1e-3)
    planned = [row for row in rows if "predicted_ratio" in row]
    assert [row["predicted_ratio"] for row in planned] == sorted(row["predicted_ratio"] for row in planned)
    assert len(planned) == 3 and all(row["peak_share"] <= row["share"] for row in planned)
    assert planned[-1]["share"] < rows[-1]["smallest_share"] + 0.2 and rows[-1]["share"] < rows[-1]["smallest_share"]
