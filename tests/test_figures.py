"""The tables of measured figures, in README.md and docs/, say what the committed results of their benchmarks say."""

import html
import json
import re
import runpy
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_NUMBER = r"\d+(?:\.\d+)?"
#: Pages of docs/, beginnings of rows in their tables, and the numbers in these.
_Rows = Iterator[tuple[str, str, list[float]]]


def _figures(benchmark: str, part: str = "figures") -> dict[str, Any]:
    """Return the figures of the one result of a benchmark."""
    (path,) = (_ROOT / "benchmarks/results").glob(f"{benchmark}_*.json")
    figures: dict[str, Any] = json.loads(path.read_text())[part]
    return figures


def _text(*pages: str) -> str:
    """Return pages as one line, however their paragraphs are wrapped."""
    return " ".join(" ".join((_ROOT / page).read_text().split()) for page in pages)


def _says(page: str, label: str, values: list[float], between: tuple[str, str] = ("", "\0")) -> None:
    """Check the one table row, between two texts, that begins with `label`: it prints these numbers."""
    text = (_ROOT / page).read_text()
    text = text[text.index(between[0]) :].partition(between[1])[0]
    rows = re.findall(rf"^\| {re.escape(label)} \|(.*)$", text, re.MULTILINE)
    assert len(rows) == 1, f"{page} has {len(rows)} rows {label!r}"
    printed = re.findall(_NUMBER, rows[0])
    assert printed == [f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(printed, values, strict=True)]


def _overheads() -> _Rows:
    for result, label, method in (
        ("rerun_overhead", "`torch.utils.checkpoint`", "torch"),
        ("rerun_overhead", "`actckpt.checkpoint`", "actckpt"),
        ("rerun_overhead", "a rerun in plain Python without any check", "bare rerun"),
        ("replay_overhead", "torch's selective contexts", "torch selective"),
        ("replay_overhead", "`actckpt.region([torch.ops.aten.addmm.default])`", "actckpt"),
        ("replay_overhead", "a dispatch mode and hooks that do nothing", "mode and hooks"),
    ):
        found = _figures(result)
        yield "benchmarks", label, [found[f"test_time_over_plain[{n}]"]["ratios"][method] for n in (32, 8, 1)]
    recording = _figures("recording")["gpt2 thin"]["now"]
    for label, method in (
        ("torch's selective contexts, save matmuls and attention", "torch selective"),
        ('`actckpt.apply(model, policy="matmuls")`', "actckpt"),
        ("a dispatch mode and hooks around each block that do nothing", "mode and hooks"),
    ):
        yield "benchmarks", label, [recording[phase][method]["us_per_operator"] for phase in ("forward", "backward")]
    recorders = _figures("dispatcher_recorder")["methods"]
    for label, method in (
        ("a dispatch mode that does nothing", "dispatch mode"),
        ("a fallback that runs them", "fallback"),
        ("that also copies their arguments", "fallback, arguments"),
        ("that also notes what they read and make", "fallback, lineage"),
        ("the same below saved-tensor hooks that do nothing", "fallback, lineage and hooks"),
        ("`actckpt.region`, keeping matmuls", "actckpt"),
    ):
        yield "recorder", label, [recorders[method]["us_per_operator"]]


def _bytes() -> _Rows:
    found = _figures("replay_memory")
    blocks = found["test_four_transformer_blocks"]["figures"]
    for label, method in (
        ("plain", "plain"),
        ("torch's selective contexts, keep attention and matmuls", "torch selective"),
        ("`actckpt`, the same policy", "actckpt keep"),
        ("`torch.utils.checkpoint`, each block", "torch checkpoint"),
        ("`actckpt.checkpoint`, each block, by rerun or by replay", "actckpt rerun"),
        ("`actckpt.checkpoint`, each block, by rerun or by replay", "actckpt recompute"),
    ):
        yield "benchmarks", label, [blocks[method][key] for key in ("held", "peak", "matmuls_in_backward")]
    for name in ("SAM", "Mamba-2", "Funnel"):
        ratios = [ratio for ways in _figures("autocast_peaks")[name].values() for ratio in ways.values()]
        yield "benchmarks", "SAM's encoder" if name == "SAM" else name, ratios
    for name, figures in _figures("added_blocks").items():
        yield "benchmarks", name, [figures["recompute"], figures["added"]]
    wholes = {name: each for name, each in found.items() if "a_whole_model_in_one_region" in name}
    assert len(wholes) == 3
    for name, each in wholes.items():
        plain, *ours = each["figures"].values()
        again = [(one["peak"], one["operators_in_backward"] - plain["operators_in_backward"]) for one in ours]
        yield "how-it-works", name.partition("[")[2][:-1], [number for pair in again for number in pair]
    for kind, row in _figures("distributed").items():
        numbers = [(one["held_bytes"] / 1024, one["collectives_in_backward"]) for one in row.values()]
        yield "collectives", kind, [number for pair in numbers for number in pair]


def _on_gpus() -> _Rows:
    for size, found in _result("gpu_bandwidth")["figures"]["copies, pinned"].items():
        ways = [found[whose][way] / 1e9 for way in ("out", "back", "both") for whose in ("loop", "ours")]
        yield "gpu", size, ways
    for label, method in (
        ("`te.checkpoint`, reentrant", "te.checkpoint, reentrant"),
        ("`te.checkpoint(use_reentrant=False)`", "te.checkpoint, hooks"),
        ("`actckpt.te.checkpoint`", "actckpt checkpoint"),
        ("TransformerEngine's CPU offload", "TransformerEngine's CPU offload"),
    ):
        row = _result("gpu_te")["training"][f"bf16: {method}"]
        yield "gpu", label, [row["step_ms"], row["peak_allocated_bytes"] / 2**30]
    differences = _result("te_training")["te_checkpoint"]
    scalings = [(f"FP8, {kind} scaling", kind) for kind in ("delayed", "current", "block")]
    for label, kind in (("bfloat16", "bf16"), *scalings):
        for variant in ("reentrant", "hooks"):
            row = differences[f"{kind}, {variant}, tracker of generators"]
            yield "te-differences", label, [row["different"], row["of"]]
    for label, of, first in (("Llama", 5, 1), ("UNet", 4, 2)):
        budgets = _result(f"gpu_budgets_{label.lower()}", "h200_2026-11-27")["figures"][label.lower()]
        rows = [budgets[f"budget {number}"] for number in range(first, of + 1)]
        assert all(row["fits"] for row in rows)
        keys = ("peak_to_predicted", "ratio_to_plain", "predicted_ratio_to_plain")
        ends = [end(row[key] for row in rows) for key in keys for end in (min, max)]
        yield "gpu-budgets", label, [len(rows), of, *ends]


@pytest.mark.parametrize("rows", [_overheads, _bytes, _on_gpus])
def test_tables_are_those_of_the_results(rows: Callable[[], _Rows]) -> None:
    for page, label, values in rows():
        _says(f"docs/{page}.md", label, values)


@pytest.mark.parametrize("width", [1024, 256])
def test_steps_with_offload_are_those_of_the_results(width: int) -> None:
    found = _figures("offload_disk")[f"test_fall_of_resident_memory_and_time_of_a_step[{width}]"]
    both = found["plain"], found["offload"]
    peaks, seconds = [one["peak_rss_bytes"] / 2**30 for one in both], [one["step_seconds"] for one in both]
    _says("docs/benchmarks.md", f"width {width}", peaks + seconds)
    longer = f"{100 * (seconds[1] / seconds[0] - 1):.0f} %"
    assert longer in _text("docs/offload.md")


def test_what_parts_of_a_rerun_cost_is_that_of_the_results() -> None:
    ratios = _figures("rerun_overhead")["test_time_over_plain[32]"]["ratios"]
    text = _text("docs/how-it-works.md")
    without = [ratios["actckpt"] - ratios[f"actckpt, no {part}"] for part in ("early stop", "random state")]
    assert f"({ratios['actckpt'] - 1:.2f} x plain training" in text
    assert f"{without[0]:.2f} goes with the early stop" in text and f"{without[1]:.2f} with the random state" in text


def test_bytes_of_models_of_libraries_are_those_of_the_results() -> None:
    figures = _figures("libraries")
    assert len(figures) == 5
    for name, methods in figures.items():
        assert list(methods) == ["plain", "its own", "recompute", "matmuls"]
        sizes = [methods[method][key] / 2**20 for method in methods for key in ("held_bytes", "peak_bytes")]
        _says("docs/libraries.md", name, sizes)
        for key in ("held_bytes", "peak_bytes"):
            assert (
                methods["recompute"][key] <= methods["its own"][key] < methods["matmuls"][key] < methods["plain"][key]
            )


def test_estimates_in_the_documentation_are_those_of_the_results() -> None:
    figures = _figures("estimate")
    for rows in figures["bytes"].values():
        for row in rows:
            assert row["estimated_held_bytes"] == row["measured_held_bytes"]
            assert row["estimated_peak_bytes"] == row["measured_peak_bytes"]
    assert all(row["estimated"] == row["true"] for row in figures["batches"].values())
    text = _text("docs/estimate-accuracy.md")
    assert "all were equal to the byte, the batches equal" in text
    for name, row in figures["longchat"].items():
        if name != "actckpt, replay":  # as recompute
            sizes = [row[f"{key}_bytes"] / 2**30 for key in ("held", "peak", "total_peak")]
            _says("docs/estimate-accuracy.md", name, [*sizes, row["times_none"]])


def test_estimates_for_gpus_are_those_of_the_results() -> None:
    rows = _figures("gpu_estimates")["devices"]
    assert len(rows) == 5
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["model"], []).append(100 * abs(row["estimated_ms"] / row["measured_ms"] - 1))
    (llama, (unet,)) = (values for model, values in sorted(errors.items()))
    ranges = f"{min(llama):.0f} to {max(llama):.0f} % off", f"{unet:.0f} % too short"
    for path in ("docs/estimate-accuracy.md", "actckpt/estimation.py"):
        assert all(text in _text(path) for text in ranges), path
    for row in rows:
        name = "UNet" if row["model"] == "unet" else "Llama"
        policy = "" if row["policy"] == "none" else f"{row['policy']}, "
        sizes = [row[f"{kind}_peak_bytes"] / 2**30 for kind in ("estimated", "measured")]
        times = [row[f"{kind}_ms"] for kind in ("estimated", "measured")]
        error = abs(100 * (times[0] / times[1] - 1))
        _says("docs/estimate-accuracy.md", f"{name}, {policy}{row['gpu'].split()[1]}", [*sizes, *times, error])
        if name == "Llama":
            assert sizes[0] == pytest.approx(sizes[1], rel=0.01) and times[0] == pytest.approx(times[1], rel=0.05)


def _result(name: str, of: str = "h100_2026-11-23") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_ROOT / f"benchmarks/results/{name}_{of}.json").read_text())
    return found


def test_steps_on_a_gpu_are_those_of_the_results() -> None:
    steps = _result("gpu_offload")["figures"]["training, 8192 tokens"]
    for label, method in (
        ("plain", "plain"),
        ("`torch.utils.checkpoint`, each block", "torch checkpoint"),
        ("`actckpt.apply(model)`", "checkpoint"),
        ("torch's selective checkpoint, keeps matmuls", "torch selective, keeps matmuls"),
        ('`actckpt.apply(model, "matmuls")`', "keeps matmuls"),
        ('`actckpt.apply(model, "attention")`', "keeps attention"),
        ('`actckpt.apply(model, activation_budget="50%")`', "half of the activations"),
        ("`actckpt.offload()`", "offload"),
        ("`save_on_cpu(pin_memory=True)`", "save_on_cpu"),
    ):
        row = steps[method]
        moved = [] if method == "save_on_cpu" else [row["moved_bytes_per_step"] / 2**30]
        values = [row["step_ms"], row["peak_allocated_bytes"] / 2**30, *moved]
        _says("docs/gpu.md", label, values, between=("## Ways to train", "A stack of eight"))


def _over_plain(rounds: dict[str, Any], method: str) -> list[float]:
    """Return the step over the plain step of the same round: median and quartiles. Nothing where it ran in no round."""
    seconds = [row["seconds"] for row in rounds.values() if method in row["seconds"]]
    if not seconds:
        return []
    low, median, high = statistics.quantiles([row[method] / row["nothing"] for row in seconds], method="inclusive")
    return [median, low, high]


def _gpu_page() -> str:
    return _text("docs/gpu.md", "docs/gpu-budgets.md")


#: Results of budgets, the model in them, the last round of trials, the numbers of the budgets that are shown, and what
#: their rows begin with.
_BUDGETS = [
    (("gpu_budgets", "h100_2026-11-23"), "llama", "", range(1, 16, 2), ""),
    (("gpu_budgets", "h200_2026-11-26"), "llama", "round 8", range(1, 9), "H200, "),
    (("gpu_budgets_vit", "h200_2026-11-27"), "vit", "round 6", range(1, 7), "ViT, "),
]


@pytest.mark.parametrize(("result", "model", "last_round", "numbers", "begins"), _BUDGETS)
def test_budgets_on_gpus_are_those_of_the_results(
    result: tuple[str, str], model: str, last_round: str, numbers: range, begins: str
) -> None:
    figures = _result(*result)["figures"]
    rounds = figures["in turns"]
    compared = rounds[last_round]["by_now"] if last_round else {}
    for number in numbers:
        row, name = figures[model][f"budget {number}"], f"budget {number}"
        assert row["fits"]
        values = [row[key] / 2**30 for key in ("peak_bytes", "predicted_peak_bytes")]
        values += [*_over_plain(rounds, name), row["predicted_ratio_to_plain"]]
        if name in compared:
            median, (low, high) = compared[name]["ratio_to_best_simple"]
            values += [median, low, high]
        _says("docs/gpu-budgets.md", f"{begins}{row['budget_bytes'] / 2**30:.2f}", values)


def test_what_is_said_of_budgets_on_gpus_is_that_of_the_results() -> None:
    first, second, vit = (_result(*result)["figures"] for result, *_ in _BUDGETS)
    rows = [first["llama"][f"budget {number}"] for number in range(1, 16)]
    ratios = [row["peak_to_predicted"] for row in rows]
    assert all(row["fits"] for row in rows) and (f"{min(ratios):.2f}", f"{max(ratios):.2f}") == ("0.96", "1.00")
    assert f"{_over_plain(first['in turns'], 'keep matmuls')[0]:.2f}" == "1.08"
    smallest = [figures["llama"]["budget 1"] for figures in (first, second)]
    over = [f"{100 * row['over_in_first_steps_bytes'] / row['budget_bytes']:.1f} %" for row in smallest]
    steps = [step["peak_bytes"] for step in smallest[1]["steps"]]
    for text in (
        f"one step exceeded it by {over[0]}",
        f"exceeded it by {over[1]}",
        f"needed {(steps[2] - steps[3]) / 2**20:.0f} MiB more than its later steps",
        f"takes {_over_plain(vit['in turns'], 'torch checkpoint')[0]:.3f} of plain there",
    ):
        assert text in _gpu_page(), text


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    figures = _result("gpu_budgets", "h200_2026-11-26")["figures"]
    llama, rounds = figures["llama"], figures["in turns"]
    others = rounds["round 8"]["by_now"]["budget 1"]["to"]
    _says("README.md", "no checkpointing", [1, llama["plain"]["peak_bytes"] / 2**30])
    for label, method in (
        ("`torch.utils.checkpoint`", "torch checkpoint"),
        ("torch's selective checkpoint, keep matmuls", "torch selective, keeps mm"),
    ):
        _says("README.md", label, [_over_plain(rounds, method)[0], others[method]["peak_bytes"] / 2**30])
    for number in (1, 2, 3):
        row = llama[f"budget {number}"]
        values = [_over_plain(rounds, f"budget {number}")[0], row["peak_bytes"] / 2**30]
        _says("README.md", f"actckpt, budget of {row['budget_bytes'] / 2**30:.2f} GiB", values)


def test_pictures_show_the_results() -> None:
    points = runpy.run_path(str(_ROOT / "scripts/pictures"))["all_points"]()
    pictures = {path.stem: path.read_text() for path in (_ROOT / "docs/pictures").iterdir()}
    assert pictures.keys() == points.keys()
    page = (_ROOT / "docs/frontiers.md").read_text()
    for name, picture in pictures.items():
        (shown,) = re.findall(r"<dc:description>(.*)</dc:description>", picture)
        assert json.loads(html.unescape(shown)) == {method: list(point) for method, point in points[name].items()}
        assert f"](pictures/{name}.svg)" in page, name
    rounds = _result("gpu_budgets", "h200_2026-11-26")["figures"]["in turns"]
    assert points["llama_h200"]["torch checkpoint"][1] == round(_over_plain(rounds, "torch checkpoint")[0], 3)


def test_frontiers_of_a_cpu_are_those_of_the_results() -> None:
    for name, rows in _figures("frontiers", "models").items():
        plain, ratios = rows["plain"]["peak_allocated_bytes"], rows["ratios to plain"]
        for method in ratios:
            row = rows[method]
            assert row["peak_allocated_bytes"] <= row.get("budget_bytes", plain)
            if method != "plain":
                figures = [row["peak_allocated_bytes"] / plain, ratios[method]["median"], *ratios[method]["quartiles"]]
                _says("docs/frontiers.md", f"{name}, {method}", figures)


def test_what_else_ran_on_that_gpu_is_that_of_the_results() -> None:
    found, page = _result("gpu_tests", "h200_2026-11-27"), _gpu_page()
    vit, demo, contract = found["vit"], found["demo"], found["contract"]
    figures = f"of {statistics.median(vit['device_ms']):.0f} ms of a plain one the kernels take {vit['kernels_ms']:.0f}"
    sums = [row for row in found["vit_operators"]["rows"] if row[0] == "aten.sum.dim_IntList"]
    assert max(peak - before for _, shapes, before, peak, _ in sums if "1024" in shapes) == pytest.approx(98, abs=0.2)
    ratios = [peak / smallest for peak, smallest in contract["peak_and_smallest_budget"].values()]
    for text in (
        figures,
        f"{demo['peak_mib']} MiB of {demo['budget_mib']}, steps of {demo['step_over_none']} of plain",
        f"where {demo['predicted_step_over_none']} was predicted",
        f"{found['tests/gpu']['passed']} passed and none failed",
        f"{contract['passed']} passed and {contract['failed']} failed",
        f"up to {max(ratios):.2f} times the smallest budget",
    ):
        assert text in page, text
    assert len(contract["failures"]) == contract["failed"] and found["tests/gpu"]["failed"] == 0


def test_numbers_of_tests_on_a_gpu_are_those_of_the_results() -> None:
    page = _text("docs/gpu.md")
    runs = _result("gpu_tests")["runs"]
    for run in (runs[2], runs[3], runs[5]):
        assert f"{run['passed']:,} passed, {run['failed']} failed" in page
    assert len(_result("te_training")["passed"]) == runs[1]["passed"] == 166


def test_first_cycles_take_what_the_result_says() -> None:
    page = _text("docs/cycles.md")
    words = ("plain steps for the first three cycles", "for those of a further length")
    for figures, text in zip(_figures("first_cycles", "ratios_to_plain").values(), words, strict=True):
        assert "{:.1f}, {:.1f} and {:.1f} ".format(*figures["median"][:3]) + text in page


def test_known_problems_are_those_of_the_results() -> None:
    script, page = runpy.run_path(str(_ROOT / "benchmarks/known_problems.py")), _ROOT / "docs/known-problems.md"
    assert script["table"](_figures("known_problems")) in page.read_text()
    assert script["matmul_table"](_figures("known_problems", "matmuls")) in page.read_text()


def test_growth_is_that_of_the_results_and_linear() -> None:
    figures, page = _figures("growth"), (_ROOT / "docs/growth.md").read_text()
    assert runpy.run_path(str(_ROOT / "benchmarks/growth.py"))["table"](figures) in page
    for name in (name for name in figures if name.startswith("saved tensors")):
        nbytes = [row["bytes"] for row in figures[name].values()]
        assert max(nbytes) < 1.1 * min(nbytes), name


def test_published_tables_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_ROOT / "benchmarks")
    published, figures = runpy.run_path(str(_ROOT / "benchmarks/published.py")), _figures("published")
    page = (_ROOT / "docs/benchmarks.md").read_text()
    assert published["table"](figures) in page and published["partitioner_table"](figures) in page
    rows = [row for found in figures["models"].values() for row in found["rows"] if "peak_share" in row]
    assert len(rows) >= 25 and all(row["peak_share"] <= row["share"] for row in rows)
    over = [row["measured_ratio"] / row["predicted_ratio"] - 1 for row in rows]
    text = f"exceeds what was predicted by {statistics.median(over):.0%} in the median, by {max(over):.0%} at most"
    assert text.replace("%", " %") in _text("docs/benchmarks.md")
    planned = [row for row in figures["activation_memory_budget"]["rows"] if "peak_share" in row]
    assert planned and all(row["peak_share"] <= row["budget"] for row in planned)


def test_every_result_is_cited_by_a_page_or_checked_here() -> None:
    pages = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
    text = "".join(page.read_text() for page in pages)
    checked = re.findall(r'_figures\("(\w+)"', Path(__file__).read_text())
    for path in (_ROOT / "benchmarks/results").iterdir():
        assert path.name in text or path.name.startswith(tuple(checked)), path.name
