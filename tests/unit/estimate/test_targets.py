"""Devices that steps are estimated for."""

import dataclasses
import doctest
from pathlib import Path

import pytest

from actckpt._estimate import targets
from actckpt._estimate.targets import Target, named_target


def test_targets_are_found_by_name_in_any_case() -> None:
    assert named_target(" H200 ") is Target.named("h200")
    assert Target.named("h200").memory_bytes_per_s > Target.named("h100").memory_bytes_per_s
    assert named_target("cpu").is_cpu and not named_target("a100").is_cpu


@pytest.mark.parametrize(("name", "near"), [("rtx4091", "rtx4090"), ("mi300", "mi300x")])
def test_an_unknown_target_names_the_known_ones_and_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* is not known. Pass one of h100, h200, .*mean {near!r}"):
        named_target(name)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", True])
@pytest.mark.parametrize("field", ["flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "memory_bytes"])
def test_a_rate_that_is_none_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"target 'h100': {field}=.* is not a rate. Pass a number above 0"):
        dataclasses.replace(named_target("h100"), **{field: value})


def test_the_example_runs() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(Target, "Target", globs={})  # `testmod` takes none of others
    results = doctest.DocTestRunner().run(example)
    assert results.attempted > 0 == results.failed


def test_the_documentation_has_every_target() -> None:
    page = (Path(__file__).parents[3] / "docs/estimate.md").read_text()
    rows = {row[2:].partition(" ")[0]: row for row in page.splitlines() if row.startswith("| ")}
    for name, target in targets._TARGETS.items():
        found = [float(cell.split(" ")[0]) for cell in rows[name].strip("| ").split(" | ")[1:5]]
        rates = (target.flops_per_s, target.float32_flops_per_s, target.memory_bytes_per_s, target.link_bytes_per_s)
        assert found == list(rates), name
        assert rows[name].endswith(f"| {target.memory_bytes / 2**30:.1f} |"), name


@pytest.mark.parametrize(("name", "reported_gib"), [("h100", 79.1), ("h200", 139.8), ("a100", 79.1)])
def test_memory_is_what_cards_report(name: str, reported_gib: float) -> None:
    assert named_target(name).memory_bytes / 2**30 == pytest.approx(reported_gib, abs=0.01)
