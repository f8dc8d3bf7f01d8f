"""A mistake on the command line is one line that says what to write instead, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_estimate_command import _SCRIPT as _FOR_A_GPU
from test_script_commands import _SCRIPT

from actckpt import cli

_COSTS = {
    "version": 1,
    "classes": {"block": {"forward_s": 1, "backward_s": 2, "working_set_bytes": 3}},
    "stack": ["block"],
}
_FILES = {
    "costs.json": json.dumps(_COSTS),
    "plan.json": '{"plan_version": 2}',
    "text.json": "no JSON",
    "list.json": "[]",
}

#: What is said while the command line is read, without "error".
_OF_OPTIONS = [
    ("", "COMMAND"),
    ("dmo", "'dmo'"),
    ("dmo", "Did you mean demo?"),
    ("demo --activaton-budget 30%", "unknown option --activaton-budget. Did you mean --activation-budget? See actckpt"),
    ("demo --budget 30%", "unknown option --budget. Did you mean --activation-budget?"),
    ("demo --activation-budget lots --steps 1 --layers 1", "--activation-budget 'lots' is not a size"),
    ("plan costs.json --bugdet=3GiB", "unknown option --bugdet. Did you mean --budget? See actckpt plan --help"),
    ("estimate script.py --polcy keep", "unknown option --polcy. Did you mean --policy?"),
    ("compare script.py --policies matmuls", "Did you mean --policy?"),
    ("doctor everything", "unexpected everything: it stands for no option and no argument"),
    ("doctor --spill-dir /nonexistent", "/nonexistent"),
    ("demo --steps 0", "--steps is 0"),
    ("demo --steps many", "--steps: 'many' is not a whole number"),
    ("demo --layers 1.5", "--layers: '1.5' is not a whole number"),
    ("demo --batch -4", "--batch is -4"),
    ("demo --dropout high", "--dropout: 'high' is not a number"),
    ("demo --dropout 1", "--dropout is 1.0"),
    ("demo --dim 100 --heads 3", "--dim is 100, but must be a multiple of 6"),
    ("demo --seq 2000000000", "--seq is 2000000000; the text has "),
    ("demo --device abacus", "usable are auto, cpu"),
    ("demo --out /dev/null", "/dev/null: File exists"),
    ("demo --colour red", "--colour"),
    ("run --budget 3GiB --policy matmuls script.py", "A budget and --policy are both given"),
    ("run --budget 3GiB --activation-budget 60% script.py", "--budget and --activation-budget are both given"),
    ("run --activation-budget lots script.py", "lots"),
    ("run --policy matmul script.py", "matmul"),
    ("run no/such.py", "no/such.py is not a file"),
]
_OF_FILES = [
    ("plan no/such.json", "no/such.json: No such file or directory. See"),
    ("plan costs.json", "Pass --budget"),
    ("plan costs.json", "--budget 24GiB"),
    ("plan costs.json --budget 2", "--budget 2 has no unit. Pass a size like 2GiB"),
    ("plan costs.json --budget 30%", "--budget 30% is a share, and here nothing is known"),
    ("plan costs.json --budget 2GX", "budget"),
    ("plan costs.json --budget 2GiB --batch 3", "costs.json is a table of costs, and --batch for scripts"),
    ("plan costs.json --activation-budget 50%", "is a table of costs, and --activation-budget for scripts"),
    *((f"plan costs.json --budget 2GiB --save {name}", name) for name in ("no_folder/plan.json", "folder.svg")),
    *((f"plan costs.json --budget 2GiB --plot {name}", name) for name in ("no_folder/file.svg", "folder.svg")),
    ("plan plan.json", "plan.json is a plan. To show it: actckpt explain plan.json"),
    ("plan text.json --budget 2GiB", "text.json is no JSON: "),
    ("plan list.json --budget 2GiB", "list.json is a list in JSON, and no table of costs; see docs/planning.md"),
    ("explain missing.json", "missing.json: No such file"),
    ("explain text.json", "text.json is no JSON"),
    ("explain costs.json", "costs.json: This is no plan"),
    ("explain plan.json", "plan.json: This plan makes no sense"),
    ("explain script.py", "script.py --save plan.json"),
    ("compare script.py --rounds 0", "rounds=0. Pass a whole number from 1 on"),
    ("compare script.py --policy matmul", "Did you mean 'matmuls'? See"),
    *((f"{command} script.py --policy no.json", "no.json: No such file") for command in ("compare", "estimate")),
    ("plan script.py", "Pass --budget 24GiB, or --activation-budget 60%"),
    ("estimate script.py --policy matmul", "policy='matmul' is not an action"),
    ("estimate script.py --policy matmul", "Did you mean 'matmuls'? See"),
    ("estimate script.py --policy mm", "Pass a list of the operators to keep: ['aten.mm']"),
]

#: Scripts, and what `compare`, `plan` and `estimate` say of them; None: there is no such file.
_OF_SCRIPTS = [
    (None, "is no file"),
    ("x = 1", "defines no model() and no step()"),
    ("def model(): ...", "defines no step()"),
    ("def model(): ...\nstep = 3", "defines no step()"),
    ("def model(): return 3\ndef step(model): ...", "model() returned a int, no module"),
    ("import torch\nmodel = torch.nn.Linear(2, 2)\ndef step(model): ...", "model is a Linear, not a func"),
    ("def model(n): ...\ndef step(model): ...", "model() takes arguments (missing a required argument"),
    ("import sys\nsys.exit(3)", "script.py ended itself (sys.exit, status 3)"),
    ("import nothing_like_it", "script.py:1: ModuleNotFoundError: No module named 'nothing_like_it'"),
    ("def model(:", "script.py:1: SyntaxError"),
    (_SCRIPT.replace("(64, 256)", "(64, -1)"), "script.py:5: RuntimeError: "),
    (_SCRIPT.replace("model(x)", "model(y)"), "script.py:13: NameError: name 'y' is not defined"),
    (_SCRIPT.replace("AdamW(model", "AdamW(3, model"), "script.py:9: TypeError: "),
    (_SCRIPT.replace("AdamW(model.parameters())", "AdamW"), "optimizer is the class AdamW"),
]
#: The same of the words beside a script.
_OF_WORDS = [
    ("--batch 0", "--batch is 0, but must be at least 1"),
    ("--seq -4", "--seq is -4, but must be at least 1"),
    ("--blocks nowhere", "no module of Sequential is named 'nowhere'"),
]
#: Scripts that train without an optimizer, and on the meta device.
_NO_OPTIMIZER = _SCRIPT.replace("def optimizer", "def unused").replace(
    "    model(x)", "    model[0][0].weight.data.add_(1)\n    model(x)"
)
_ON_META = _SCRIPT.replace("def model():", 'def model():\n    torch.set_default_device("meta")')
#: What `compare` and `plan` are given, and say.
_OF_MEASURING = [
    (_SCRIPT.replace(".backward()", ""), "--budget 1GiB", "Pass a step with its backward"),
    (
        _NO_OPTIMIZER,
        "--budget 1GiB",
        "changed '0.0.weight', and no optimizer was given, so that a second step would",
    ),
    (_NO_OPTIMIZER, "--budget 1GiB", "Pass what it runs, by optimizer(model) in the script, several in a list"),
    (_SCRIPT.replace(", seq=64", ""), "--budget 1GiB --seq 8", "cannot be called with --seq 8"),
    (_SCRIPT, "--budget 1GiB --device abacus", "The device 'abacus' cannot be used here; usable are auto, cpu"),
    (_SCRIPT, "--budget 1GiB --activation-budget 50%", "--budget and --activation-budget are both given"),
    (_SCRIPT, "--budget 40", "--budget '40' has no unit"),
    (_SCRIPT, "--activation-budget 0.4", "--activation-budget '0.4' has no unit. Pass a share like '40%'"),
]
#: What `estimate` is given, and says.
_OF_ESTIMATES = [
    (_FOR_A_GPU, "--target h10", "target='h10' is not known"),
    (_FOR_A_GPU, "--flops -1", "flops_per_s=-1.0 is not a rate"),
    (_FOR_A_GPU, "--bandwidth 0", "memory_bytes_per_s=0.0 is not a rate"),
    (_FOR_A_GPU, "--link much", "--link: 'much' is not a number"),
    (_FOR_A_GPU, "--find width", "invalid choice: 'width'"),
    (_FOR_A_GPU, "--find batch --batch 7", "--batch 7 beside --find batch"),
    (_FOR_A_GPU, "--find batch --budget 40", "--budget '40' has no unit. Pass a share like '40%'"),
    (_FOR_A_GPU, "--find batch --budget 3parsecs", "--budget '3parsecs' is not a size"),
    (_FOR_A_GPU, "--policy aten.nothing", "aten.nothing"),
    (_FOR_A_GPU.replace("seq, 256, device", "seq, 255, device"), "", "script.py:14: RuntimeError: "),
    (_FOR_A_GPU.replace(", seq=256", ""), "--seq 8", "cannot be called with --seq 8"),
    (_FOR_A_GPU.replace("batch=4", "batch"), "", "cannot be called with no --batch, no --seq: missing"),
    (_FOR_A_GPU.replace(".backward()", ""), "", "the step left no gradients in the 12 parameters"),
    (_FOR_A_GPU.replace(".backward()", ".item()"), "", "aten._local_scalar_dense.default in the step"),
    (_FOR_A_GPU.replace("return torch.nn.Seq", "x = torch.ones(2).nonzero(); return torch.nn.Seq"), "", "aten.nonzero"),
]
_SAVES = "plan script.py --activation-budget=60% --save missing/plan.json"
_COMMANDS = ("compare script.py", "plan script.py --budget 1GiB", "estimate script.py")

CASES: list[tuple[str, str, str | None]] = [
    *((words, message, _SCRIPT) for words, message in [*_OF_OPTIONS, *_OF_FILES]),
    *((command, message, content) for command in _COMMANDS for content, message in _OF_SCRIPTS),
    *((f"{command} {words}", message, _SCRIPT) for command in _COMMANDS for words, message in _OF_WORDS),
    *((f"{each} script.py {words}", text, code) for each in ("compare", "plan") for code, words, text in _OF_MEASURING),
    *((f"estimate script.py {words}", message, content) for content, words, message in _OF_ESTIMATES),
    ("compare script.py", "on the meta device", _ON_META),
    (_SAVES, "--save missing/plan.json: there is no folder ", "raise RuntimeError('nothing of the script runs')\n"),
]


@pytest.mark.parametrize(("words", "message", "script"), CASES)
def test_a_mistake_is_one_line(
    words: str,
    message: str,
    script: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("folder.svg").mkdir()
    for name, content in (_FILES if script is None else {**_FILES, "script.py": script}).items():
        Path(name).write_text(content)
    try:
        with pytest.raises(SystemExit) as leaving:
            cli.main(words.split())
    finally:
        torch.set_default_device(None)
    captured = capsys.readouterr()
    assert leaving.value.code == 2 and (captured.out == "" or "--plot" in words)  # a plan is shown before it is drawn
    is_parsed = (words, message) in _OF_OPTIONS
    assert captured.err.startswith("actckpt" if is_parsed else f"actckpt {words.split()[0]}: error: ")
    assert message in captured.err and captured.err.count("\n") == 1
