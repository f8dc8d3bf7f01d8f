"""Commands that run a script's step: on the device where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import actckpt
from actckpt import cli

_SCRIPT = """
import torch

def model():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return torch.nn.Sequential(*(block() for _ in range(4)))

def step(model):
    x = torch.randn(64, 64, device=next(model.parameters()).device)
    with open(__file__ + ".devices", "a") as devices:
        devices.write(x.device.type + "\\n")
    model(x).square().mean().backward()
"""


@pytest.mark.parametrize(("words", "device"), [([], "sim"), (["--device=sim:0"], "sim"), (["--device=cpu"], "cpu")])
def test_steps_of_scripts_run_on_the_device(
    words: list[str], device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    assert cli.main(["compare", str(script), "--rounds=1", "--json", *words]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert ("offload" in [row["name"] for row in rows]) is (device == "sim")
    assert all(row["same_bits"] for row in rows)
    assert (
        cli.main(["plan", str(script), "--activation-budget=60%", "--save", str(tmp_path / "plan.json"), *words]) == 0
    )
    assert actckpt.Plan.load(tmp_path / "plan.json").blocks
    assert set(Path(f"{script}.devices").read_text().split()) == {device}
    assert torch.accelerator.current_accelerator() == torch.device("sim")
