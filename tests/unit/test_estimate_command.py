"""`actckpt estimate script.py`: what it prints and how it exits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import actckpt
from actckpt import cli

_SCRIPT = """
import torch

def model():
    with torch.device("cuda"):
        block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
        return torch.nn.Sequential(block(), block(), block()).bfloat16().cuda()

def optimizer(model):
    return torch.optim.AdamW(model.parameters())

def step(model, batch=4, seq=256):
    x = torch.zeros(batch, seq, 256, device="cuda", dtype=torch.bfloat16)
    model(x).float().square().mean().backward()
"""
_PARAMETERS = 3 * 2 * (2 * 256 * 1024 + 1024 + 256)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return str(path)


def test_it_prints_a_table_and_allocates_nothing(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--batch", "1000000", "--target", "h200"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["policy", "none", "recompute", "keep", "offload"]
    assert "TiB" in out and "Estimated for h200" in out
    assert torch.ones(1).device.type == "cpu"


def test_json_has_everything(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", script, "--json", "--policy", "recompute", "--policy", "aten.addmm,aten.mm", "--flops", "1e12"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["none", "recompute", "aten.addmm,aten.mm"]
    assert found["target"]["flops_per_s"] == 1e12
    assert (found["model_bytes"], found["gradient_bytes"]) == (_PARAMETERS, _PARAMETERS)
    assert 2 * _PARAMETERS <= found["optimizer_bytes"] <= 2.01 * _PARAMETERS


def test_policies_have_the_names_that_apply_takes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["keep", "recompute", "matmuls", "keep matmuls", "dots_with_no_batch_dims", "aten.mm,aten.addmm", "offload"]
    words = [word for name in names for word in ("--policy", name)]
    assert cli.main(["estimate", script, "--json", *words]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["none", *names]
    assert rows["keep"]["held_bytes"] == rows["none"]["held_bytes"]
    matmuls, *others = (rows[name]["held_bytes"] for name in names[2:6])
    assert others == [matmuls] * 3 and rows["recompute"]["held_bytes"] < matmuls < rows["none"]["held_bytes"]


def test_a_search_has_a_row_for_a_budget(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--find", "batch", "--budget", "256MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["none", "recompute", "keep matmuls", "offload", "budget"]
    planned = rows["budget"]
    assert planned["size"] >= rows["recompute"]["size"] > rows["none"]["size"]
    assert planned["total_peak_bytes"] <= found["budget_bytes"] == 2**28
    words = ["estimate", script, "--budget", "256MiB", "--json", "--policy", "none", "--batch"]
    assert cli.main([*words, str(planned["size"])]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert [row[name] for name in ("seconds", "total_peak_bytes")] == [planned["seconds"], planned["total_peak_bytes"]]
    assert cli.main([*words, str(planned["size"] * 11 // 10)]) == 2
    capsys.readouterr()
    words = ["estimate", script, "--json", "--policy", "offload", "--batch", str(rows["offload"]["size"])]
    assert cli.main(words) == 0
    none, offload = json.loads(capsys.readouterr().out)["rows"]
    assert offload["host_bytes"] == rows["offload"]["host_bytes"]
    assert 0.9 * none["held_bytes"] < offload["host_bytes"] <= none["held_bytes"]
    assert [none["host_bytes"], planned["host_bytes"]] == [0, 0]


@pytest.mark.parametrize(("budget", "share"), [("50%", 0.5), ("0.5", 0.5), ("auto", 0.95), (None, 0.95)])
def test_the_limit_of_a_search_may_be_a_share_of_the_target(
    budget: str | None, share: float, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [] if budget is None else ["--budget", budget]
    assert cli.main(["estimate", script, "--find", "seq", "--json", "--policy", "none", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget_bytes"] == int(share * actckpt.Target.named("h100").memory_bytes)


def test_a_step_that_no_budget_takes_has_a_search_without_it(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    forward = "model(x).float().square().mean().backward()"
    Path(script).write_text(_SCRIPT.replace(forward, f"{forward}\n    {forward}"))
    assert cli.main(["estimate", script, "--find", "batch", "--budget", "256MiB"]) == 0
    out = capsys.readouterr().out
    assert "\nbudget" not in out and "No row for a budget: plan: block '0' ran 2 times" in out


def test_tables_say_what_of_a_step_runs(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer, is_named in (("", True), ("    torch.optim.SGD(model.parameters(), 0.0).step()\n", False)):
        Path(script).write_text(_SCRIPT + optimizer)
        for words in (["--policy", "none"], ["--policy", "none", "--find", "batch", "--budget", "64MiB"]):
            assert cli.main(["estimate", script, *words]) == 0
            assert ("the step runs no optimizer" in capsys.readouterr().out) is is_named


def test_a_budget_without_a_search_is_a_row(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--budget", "21MiB", "--json", "--policy", "recompute"]) == 0
    plain, recompute, planned = json.loads(capsys.readouterr().out)["rows"]
    assert planned["name"] == "budget 21MiB"
    assert recompute["total_peak_bytes"] < planned["total_peak_bytes"] <= 21 * 2**20 < plain["total_peak_bytes"]
    assert cli.main(["estimate", script, "--budget", "1MiB"]) == 2
    assert "No plan fits into 1.00 MiB" in capsys.readouterr().err


def test_a_search_says_the_time_of_each_sample(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--find", "batch", "--budget", "1GiB", "--policy", "recompute"]) == 0
    heads, plain, *_ = capsys.readouterr().out.splitlines()
    assert heads.split() == ["policy", "largest", "batch", "all", "host", "step", "step", "/", "batch"]
    size, step, unit, each, unit_of_each = (plain.split()[at] for at in (1, -4, -3, -2, -1))
    factor = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    assert float(each) * factor[unit_of_each] == pytest.approx(float(step) * factor[unit] / int(size), rel=0.01)


def test_the_page_has_what_its_script_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/estimate.md").read_text()
    script = tmp_path / "script.py"
    script.write_text(next(block for block in page.split("```python\n") if "# script.py" in block).partition("```")[0])
    words = ["estimate", str(script), "--seq", "4096"]
    assert cli.main([*words, "--batch", "64", "--budget", "75GiB", "--policy", "recompute"]) == 0
    rows = capsys.readouterr().out.splitlines()[:4]
    assert cli.main([*words, "--find", "batch", "--policy", "none"]) == 0
    rows.append(capsys.readouterr().out.splitlines()[1])
    shown = [line.split() for line in page.splitlines()]
    assert [row for row in rows if row.split() not in shown] == []


def test_nothing_fits_and_says_so(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--find", "batch", "--budget", "1MiB", "--policy", "recompute"]) == 1
    assert capsys.readouterr().out.count("not even 1") == 2


def test_a_model_that_copies_its_layers_is_no_reason_for_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "def model(): return torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 128), 3)\n"
        "def step(model): model(torch.zeros(2, 8, 64)).sum().backward()\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["estimate", str(script), "--policy", "recompute"]) == 0
    assert not [each for each in recwarn if "data pointer" in str(each.message)]
    assert "recompute" in capsys.readouterr().out


def test_a_plan_that_was_saved_is_a_policy(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))  # noqa: E731
    model, x = torch.nn.Sequential(block(), block(), block()), torch.randn(1024, 256)
    # Not every processor has products of bfloat16.
    Path(script).write_text(_SCRIPT.replace(".bfloat16()", "").replace("torch.bfloat16", "torch.float32"))
    saved = tmp_path / "plan.json"
    step = lambda: model(x).square().mean().backward()  # noqa: E731
    actckpt.plan(step, model=model, activation_budget="80%", race=False).save(saved)
    assert (
        cli.main(["estimate", script, "--json", "--policy", "none", "--policy", str(saved), "--policy", "recompute"])
        == 0
    )
    none, plan, recompute = json.loads(capsys.readouterr().out)["rows"]
    assert plan["name"] == str(saved) and recompute["held_bytes"] < plan["held_bytes"] < none["held_bytes"]
    with pytest.raises(SystemExit):
        cli.main(["estimate", str(saved)])
    assert f"{saved} is no Python script. To show a plan: actckpt explain" in capsys.readouterr().err
