"""Methods side by side on a CPU, and their pictures."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_Script = Callable[[str], dict[str, Any]]
_POINTS = {
    "plain": (1.0, 1.0),
    "actckpt checkpoint": (0.4, 1.3),
    "torch checkpoint": (0.4, 1.35),
    "torch selective, keeps matmuls": (0.7, 1.25),
    "actckpt budget 0.5": (0.7, 1.1),
    "actckpt budget 0.2": (0.5, 1.2),
    "compiled, actckpt budget 0.2": (0.5, 1.0),
    "save_on_cpu": (0.3, 4.5),
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> _Script:
    """Returns the names of a script."""
    monkeypatch.syspath_prepend(_BENCHMARKS)
    return lambda name: runpy.run_path(str(_BENCHMARKS / f"{name}.py"))


def test_methods_run_in_turns_with_their_peaks(script: _Script) -> None:
    rows = script("frontiers")["measure"]("unet", shares=(0.3,), rounds=2)
    ratios, plain = rows.pop("ratios to plain"), rows["plain"]["peak_allocated_bytes"]
    assert list(rows) == [*ratios, "load"] and len(ratios) == 6
    assert all(row["rounds"] == 2 and row["quartiles"][0] > 0 for row in ratios.values())
    peaks = {name: row["peak_allocated_bytes"] for name, row in rows.items() if name in ratios}
    assert all(peak < plain for name, peak in peaks.items() if name != "plain")
    assert peaks["actckpt checkpoint"] <= peaks["torch checkpoint"] < peaks["torch selective, keeps matmuls"]
    assert peaks["actckpt budget 0.3"] <= rows["actckpt budget 0.3"]["budget_bytes"] < plain


def test_a_picture_has_a_marker_for_each_method_and_a_line_for_budgets_and_is_dark_where_pages_are(
    script: _Script, tmp_path: Path
) -> None:
    for path in (tmp_path / "one.svg", tmp_path / "same.svg"):
        script("frontier_pictures")["draw"](_POINTS, "a model", path)
    picture = (tmp_path / "one.svg").read_text()
    assert picture == (tmp_path / "same.svg").read_text()
    texts = re.findall(r"<text [^>]*>(.*?)</text>", picture)
    others = [name for name in _POINTS if "budget" not in name and name != "save_on_cpu"]
    assert {"a model", "peak over plain", "step over plain", *others} <= set(texts)
    assert {"actckpt, budgets", "compiled, actckpt, budgets", "save_on_cpu (0.30, 4.50: not shown)"} <= set(texts)
    assert not [text for text in texts if text.startswith("actckpt budget")]
    style = re.findall(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", picture, re.DOTALL)[0]
    assert '[style*="fill: #ffffff"]' in style and '[style*="stroke: #000000"]' in style and "text {" in style
    # Nothing else is black: other colours are legible on both.
    body = picture.partition("</style>")[2]
    assert 'fill: #000000"' not in body and not re.search(r'<text [^>]*style="[^"]*fill:', body)
    assert {"#ffffff"} == set(re.findall(r"fill: (#\w+)", body)) - set(script("frontier_pictures")["_COLORS"].values())


def test_where_actckpt_loses_is_what_the_results_say() -> None:
    points = runpy.run_path(str(_BENCHMARKS.parent / "scripts/pictures"))["all_points"]()
    vit, decoder, models = points["vit_h200"], points["decoder_h100"], ("llama_h200", "decoder_h100", "vit_h200")
    save, experts = decoder["save_on_cpu"], points["moe_cpu"]
    offload = [points[model]["actckpt offload"][1] for model in models]
    (path,) = (_BENCHMARKS / "results").glob("frontiers_*.json")
    rows = json.loads(path.read_text())["models"]
    third, half = "actckpt budget 0.3", "actckpt budget 0.5"
    predicted = [rows["moe"][name]["predicted_ratio"] for name in (third, half)]
    page = " ".join((_BENCHMARKS.parent / "docs/frontiers.md").read_text().split())
    for text in (
        f"`torch.utils.checkpoint` takes {_both(vit['torch checkpoint'])} of the peak",
        f"keeping attention {_both(vit['actckpt keeps attention'])},",
        f"offloading the inputs {vit['actckpt checkpoint, offloaded inputs'][1]:.2f}",
        f"keeping matmuls {_both(vit['actckpt keeps matmuls'])}",
        f"({min(offload):.1f} to {max(offload):.1f})",
        f"({decoder['actckpt offload'][0]} against {save[0]}), which takes {save[1]:.1f}",
        f"from {experts[third][0]:.2f} to {experts[half][0]:.2f} of the peak ({experts[third][1]:.2f} and "
        f"{experts[half][1]:.2f}), where {predicted[0]:.2f} and {predicted[1]:.2f} were predicted",
    ):
        assert text in page, text
    for model in rows.values():
        quartiles = {name: found["quartiles"] for name, found in model["ratios to plain"].items()}
        budgets = [found for name, found in quartiles.items() if "budget" in name]
        assert all(found[1] < quartiles["torch checkpoint"][0] for found in budgets)


def _both(point: tuple[float, float]) -> str:
    return f"{point[1]:.2f} at {point[0]:.2f}"
