"""`actckpt estimate script.py`: what it prints and how it exits."""

from __future__ import annotations

import json
import textwrap
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


def test_the_example_in_the_help_is_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["estimate", "--help"])
    example = capsys.readouterr().out.partition("For example:\n")[2]
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(example))
    assert cli.main(["estimate", str(script), "--policy", "recompute"]) == 0
    assert "optimizer" in capsys.readouterr().out


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


@pytest.mark.parametrize("what", ["batch", "seq"])
def test_it_finds_the_largest_that_fits(what: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", script, "--find", what, "--budget", "1GiB", "--json", "--policy", "recompute"]
    assert cli.main(words) == 0
    plain, recompute = json.loads(capsys.readouterr().out)["rows"]
    assert 0 < plain["size"] < recompute["size"]
    assert 0.99 * 2**30 < plain["total_peak_bytes"] <= 2**30
    other = "--batch=4" if what == "seq" else "--seq=256"
    for size, fits in ((plain["size"], True), (int(1.02 * plain["size"]), False)):
        assert cli.main(["estimate", script, f"--{what}={size}", other, "--json", "--policy", "recompute"]) == 0
        assert (json.loads(capsys.readouterr().out)["rows"][0]["total_peak_bytes"] <= 2**30) is fits


def test_nothing_fits_and_says_so(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", script, "--find", "batch", "--budget", "1MiB", "--policy", "recompute"]) == 1
    assert capsys.readouterr().out.count("not even 1") == 2


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, "", "is no file"),
        ("x = 1", "", "defines no model() and no step()"),
        ("def model(): ...", "", "defines no step()"),
        ("def model(): return 3\ndef step(model): ...", "", "model() returned a int, no module"),
        (
            _SCRIPT.replace("AdamW(model.parameters())", "AdamW"),
            "",
            "script.py: estimate: optimizer is the class AdamW",
        ),
        (_SCRIPT.replace("AdamW(model", "AdamW(3, model"), "", "script.py:10: TypeError: "),
        (_SCRIPT, "--target h10", "target='h10' is not known"),
        (_SCRIPT, "--flops -1", "flops_per_s=-1.0 is not a rate"),
        (_SCRIPT, "--bandwidth 0", "memory_bytes_per_s=0.0 is not a rate"),
        (_SCRIPT, "--link much", "--link: 'much' is not a number"),
        (_SCRIPT, "--find width", "invalid choice: 'width'"),
        (_SCRIPT, "--batch 0", "--batch is 0, but must be at least 1"),
        (_SCRIPT, "--seq -4", "--seq is -4, but must be at least 1"),
        (_SCRIPT, "--budget 70GiB", "Add --find batch or --find seq"),
        (_SCRIPT, "--find batch --batch 7", "--batch 7 beside --find batch"),
        (_SCRIPT, "--find batch --budget 40", "--budget 40 has no unit. Pass a size like 40GiB"),
        ("import nothing_like_it", "", "script.py:1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def model(:", "", "script.py:1: SyntaxError"),
        (_SCRIPT + "    undefined()", "", "script.py:15: NameError: name 'undefined' is not defined"),
        (_SCRIPT.replace("seq, 256, device", "seq, 255, device"), "", "script.py:14: RuntimeError: "),
        (_SCRIPT, "--policy no.json", "no.json: No such file or directory"),
        (_SCRIPT, "--find batch --budget 3parsecs", "--budget='3parsecs' is not a size"),
        (_SCRIPT, "--policy aten.nothing", "aten.nothing"),
        (None, "--policy matmul", "policy='matmul' is not an action"),
        (None, "--policy matmul", "Did you mean 'matmuls'? See"),
        (None, "--policy mm", "Pass a list of the operators to keep: ['aten.mm']"),
        (_SCRIPT, "--blocks nowhere", "no module of Sequential is named 'nowhere'"),
        (_SCRIPT.replace(", seq=256", ""), "--seq 8", "cannot be called with --seq 8"),
        (_SCRIPT.replace("batch=4", "batch"), "", "cannot be called with no --batch, no --seq: missing"),
        (_SCRIPT.replace(".backward()", ""), "", "the step left no gradients in the 12 parameters"),
        (_SCRIPT.replace(".backward()", ".item()"), "", "aten._local_scalar_dense.default in the step"),
        (
            _SCRIPT.replace("return torch.nn.Seq", "x = torch.ones(2).nonzero(); return torch.nn.Seq"),
            "",
            "aten.nonzero",
        ),
    ],
)
def test_a_mistake_is_one_line(
    content: str | None, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["estimate", str(path), *words.split()])
    captured = capsys.readouterr()
    assert leaving.value.code == 2 and captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


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
