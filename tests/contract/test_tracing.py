"""`trace`: a file for Perfetto with what runs again, and the bytes that are alive."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_budgets import Training

import actckpt
from actckpt.memory import LiveStorages

_AGAIN = "actckpt: again "


def _events(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def _again(events: list[dict[str, Any]]) -> Counter[str]:
    """Count ranges of the program; a GPU's stream has one more for what each of them has it do."""
    ranges = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return Counter(name.removeprefix(_AGAIN) for name in ranges if name.startswith(_AGAIN))


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_what_runs_again_and_live_bytes_are_in_the_trace(policy: str, name: str, tmp_path: Path) -> None:
    training = Training()
    plain_peak = training.peak()
    actckpt.apply(training.model, policy=policy)
    training.step()
    training.model.zero_grad()
    with actckpt.trace(tmp_path / name, parameters=training.model.parameters()):
        training.step()
    events = _events(tmp_path / name)
    again = _again(events)
    assert again["aten.gelu.default"] == 6
    assert again["aten.addmm.default"] == (12 if policy == "recompute" else 0)
    assert "aten.detach.default" not in again
    counter = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C"]
    assert counter == sorted(counter, key=lambda each: each[0])
    assert max(nbytes for _, nbytes in counter) == training.peak() < plain_peak
    starts = [event["ts"] for event in events if event["name"] == "aten::gelu"]  # one for each mode that it passes
    assert counter[0][0] < min(starts) and max(starts) < counter[-1][0] + 1e3  # on one clock
    for event in events:
        if event["name"] == f"{_AGAIN}aten.gelu.default" and event["cat"] == "user_annotation":
            assert any(event["ts"] <= start <= event["ts"] + event["dur"] for start in starts)


def test_a_plain_step_runs_nothing_again_and_an_error_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    with pytest.raises(OSError, match="no more data"), actckpt.trace(path):
        torch.ones(4).exp()
        raise OSError("no more data")
    events = _events(path)
    assert any(event["name"] == "aten::exp" for event in events)
    assert not _again(events)


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), actckpt.trace(tmp_path / "no" / "step.json"):
        pytest.fail("it ran")


def test_it_nests_with_other_counters(tmp_path: Path) -> None:
    with LiveStorages() as live, actckpt.trace(tmp_path / "step.json"):
        kept = torch.ones(256).exp()
    counter = [event["args"]["bytes"] for event in _events(tmp_path / "step.json") if event["ph"] == "C"]
    assert max(counter) == live.peak_bytes == 2 * kept.nbytes
