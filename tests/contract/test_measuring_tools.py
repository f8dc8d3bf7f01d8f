"""`trace`, `label_memory`, `profile`, and what steps that are run to measure them do not count."""

from __future__ import annotations

import gzip
import json
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Net, chain
from internals.notices import forget_told
from oracle import assert_equal
from test_budgets import Training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformer_block import Block

import actckpt
from actckpt import cli, memory_labels
from actckpt.memory import LiveStorages
from actckpt.statistics import uncounted

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


class Allocator(TorchDispatchMode):
    """Stands for an allocator that takes labels: notes what is set while an operator runs."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.label = label
        self.seen: list[str] = []

    def set(self, label: str) -> None:
        self.label = label

    def get(self) -> str:
        return self.label

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.label)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator("of the program")
    accelerator = types.SimpleNamespace(memory_labels=lambda: allocator)
    monkeypatch.setattr(memory_labels, "devices", types.SimpleNamespace(available=lambda: accelerator))
    actckpt.configure(observers=[Allocator])
    with allocator:
        yield allocator


@pytest.mark.usefixtures("no_audit")
@pytest.mark.parametrize("policy", ["recompute", "matmuls"])
def test_what_is_kept_and_what_is_brought_back_are_labelled(policy: str, allocator: Allocator) -> None:
    training = Training()
    expected = training.gradients()
    actckpt.apply(training.model, policy=policy)
    training.step()
    allocator.seen.clear()
    with actckpt.label_memory():
        found = training.gradients()
    assert_equal(found, expected)
    assert allocator.label == "of the program"
    labels = set(allocator.seen)
    assert "actckpt: aten.addmm.default in blocks.2.up" in labels
    assert any(label.startswith("actckpt: again aten.gelu.default") for label in labels)
    assert any(label.startswith("actckpt: again aten.addmm.default") for label in labels) == (policy == "recompute")


@pytest.mark.usefixtures("no_audit")
def test_what_offloading_brings_back_is_labelled(allocator: Allocator) -> None:
    if on_device.device_type == "cpu":
        pytest.skip("a CPU has no allocator whose memory could be labelled")
    training = Training()
    expected = training.gradients()
    actckpt.apply(training.model, policy="offload", min_bytes=0)
    training.step()
    allocator.seen.clear()
    with actckpt.label_memory():
        found = training.gradients()
    assert_equal(found, expected)
    assert "actckpt: again, offloaded" in allocator.seen


def test_labels_of_the_program_are_back_after_an_error(allocator: Allocator) -> None:
    with pytest.raises(KeyError), actckpt.label_memory():
        torch.ones(2)
        raise KeyError
    assert allocator.label == "of the program" and "actckpt: aten.ones.default" in allocator.seen


def test_where_nothing_is_labelled_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_told(monkeypatch)
    told = pytest.warns(UserWarning, match="nothing is labelled.*(there is no device|labels no memory there)")
    with told as warned:
        for _ in range(2):
            with actckpt.label_memory():
                torch.ones(2)
    assert len(warned) == 1


def _tower() -> nn.Module:
    return Net(chain, [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)])


def _step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: model(x).square().sum().backward()


def test_rows_name_the_modules_and_operators_that_made_what_is_alive() -> None:
    model, x = _tower(), torch.randn(4, 8)
    found = actckpt.profile(_step(model, x), model=model)
    rows = {(row.module, row.operator): row for row in found.rows if row.phase == "forward"}
    wide, narrow = (rows[f"blocks.*.{n}", "aten.addmm.default"] for n in (0, 2))
    gelu = rows["blocks.*.1", "aten.gelu.default"]
    assert (wide.count, wide.nbytes, gelu.count, gelu.nbytes) == (3, 3 * 4 * 32 * 4, 3, 3 * 4 * 32 * 4)
    assert (narrow.count, narrow.nbytes) == (2, 2 * 4 * 8 * 4)  # what the next layer saves
    assert found.parameter_bytes == found.gradient_bytes == sum(4 * p.numel() for p in model.parameters())
    assert found.peak_phase == "backward"


@pytest.mark.parametrize("policy", [None, "recompute", "matmuls", "offload"])
def test_rows_add_up_to_the_peak_of_the_step(policy: str | None) -> None:
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    x = torch.randn(2, 8, 16)
    if policy is not None:
        actckpt.apply(model, policy, **({"min_bytes": 1} if policy == "offload" else {}))
    step = _step(model, x)
    for _ in range(2):
        step()
    with LiveStorages(parameters=model.parameters()) as live:
        step()
    found = actckpt.profile(step, model=model)
    assert sum(row.nbytes for row in found.rows) == found.peak_bytes
    if policy != "offload":  # whose peak depends on threads
        assert found.peak_bytes == live.peak_bytes


def test_tables_sum_rows_up() -> None:
    model = _tower()
    found = actckpt.profile(_step(model, torch.randn(4, 8)), model=model)
    total = json.loads(found.as_json())["peak_bytes"]
    for by in (None, "module", "operator"):
        lines = found.table(by, top=None).splitlines()  # type: ignore[arg-type]
        assert len(lines) > 3 and "others" not in lines[-1]
        assert found.table(by, top=2).splitlines()[3].startswith(f"{len(lines) - 3} others ")  # type: ignore[arg-type]
    assert total == found.peak_bytes and found.summary in str(found)


def test_arguments_that_make_no_sense_raise() -> None:
    model = _tower()
    with pytest.raises(TypeError, match="profile: model"):
        actckpt.profile(lambda: None, model=model.forward)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="profile: step is a Tensor"):
        actckpt.profile(torch.ones(1), model=model)  # type: ignore[arg-type]
    found = actckpt.profile(lambda: None, model=model)
    assert found.rows == () and found.peak_bytes == 0
    with pytest.raises(ValueError, match="by='type'"):
        found.table("type")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top=0"):
        found.table(top=0)


def test_the_command_profiles_the_step_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "def model(): return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())\n"
        "def step(model, batch=4): model(torch.randn(batch, 8)).sum().backward()\n"
    )
    assert cli.main(["profile", str(script), "--batch", "16", "--device", "cpu", "--by", "module"]) == 0
    assert "512 B" in capsys.readouterr().out
    assert cli.main(["profile", str(script), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 0


#: What is held now and was held at most: no sums.
_HELD = ("peak_", "host_", "disk_", "store_", "inflight_")


def _counted_sums(step: Callable[[], Any]) -> dict[str, float]:
    actckpt.reset_stats()
    step()
    found = vars(actckpt.stats())
    return {name: value for name, value in found.items() if not name.startswith(_HELD)}


@pytest.mark.parametrize("store", ["no_store", "small_tensors_on_disk"])
def test_the_first_step_under_a_budget_counts_as_one_in_which_everything_is_recomputed(
    store: str, request: pytest.FixtureRequest
) -> None:
    if store != "no_store":
        request.getfixturevalue(store)
    plain, ours = Training(), Training()
    actckpt.apply(plain.model, policy=[])
    expected = _counted_sums(plain.step)
    assert expected["replayed_operators"] > 0
    actckpt.apply(ours.model, activation_budget="50%")
    assert _counted_sums(ours.step) == expected, "pieces of the link, or moved while profiled"


@pytest.mark.usefixtures("small_tensors_on_disk")
@pytest.mark.parametrize("how", ["plan", "compare", "estimate"])
def test_what_runs_steps_to_measure_them_counts_nothing(how: str) -> None:
    training = Training()
    options: dict[str, Any] = {"model": training.model}
    if how == "plan":
        options |= {"activation_budget": "50%"}
    elif how == "compare":
        options |= {"policies": {"rerun": "recompute", "replay": [], "offload": {"policy": "offload", "min_bytes": 0}}}
    assert not any(_counted_sums(lambda: getattr(actckpt, how)(training.step, **options)).values())


def test_a_step_that_raises_or_resets_while_it_is_measured_leaves_the_sums() -> None:
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))), torch.randn(4, 8)

    def step() -> None:
        actckpt.reset_stats()
        model(x).sum().backward()
        raise OSError("no more data")

    actckpt.apply(model)
    model(x).sum().backward()
    actckpt.remove(model)
    before = actckpt.stats()
    assert before.rerun_regions > 0
    with pytest.raises(OSError, match="no more data"):
        actckpt.compare(step, model=model)
    assert actckpt.stats() == before


def test_two_threads_that_measure_at_once_count_nothing() -> None:
    before = actckpt.stats().rerun_regions
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def rerun() -> None:
        actckpt.checkpoint(torch.sin, torch.randn(2, requires_grad=True), use_reentrant=False).sum().backward()

    def first() -> None:
        with uncounted():
            first_is_in.set()
            second_is_in.wait(60)
            rerun()
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(60)
    with uncounted():
        rerun()
        second_is_in.set()
        first_is_out.wait(60)
        rerun()
    thread.join()
    assert actckpt.stats().rerun_regions == before
    rerun()
    assert actckpt.stats().rerun_regions == before + 1
