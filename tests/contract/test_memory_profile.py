"""`profile`: rows are what is alive at the peak, and add up to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformer_block import Block

import actckpt
from actckpt import cli
from actckpt.memory import LiveStorages


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: model(x).square().sum().backward()


def test_rows_name_the_modules_and_operators_that_made_what_is_alive() -> None:
    model, x = Tower(), torch.randn(4, 8)
    found = actckpt.profile(_step(model, x), model=model)
    rows = {(row.module, row.operator): row for row in found.rows if row.phase == "forward"}
    wide, narrow = (rows[f"layers.*.{n}", "aten.addmm.default"] for n in (0, 2))
    gelu = rows["layers.*.1", "aten.gelu.default"]
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
    model = Tower()
    found = actckpt.profile(_step(model, torch.randn(4, 8)), model=model)
    total = json.loads(found.as_json())["peak_bytes"]
    for by in (None, "module", "operator"):
        lines = found.table(by, top=None).splitlines()  # type: ignore[arg-type]
        assert len(lines) > 3 and "others" not in lines[-1]
        assert found.table(by, top=2).splitlines()[3].startswith(f"{len(lines) - 3} others ")  # type: ignore[arg-type]
    assert total == found.peak_bytes and found.summary in str(found)


def test_arguments_that_make_no_sense_raise() -> None:
    model = Tower()
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
