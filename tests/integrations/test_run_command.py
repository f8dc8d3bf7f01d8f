"""`actckpt run` with programs of Transformers' and Lightning's Trainer, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TRANSFORMERS = """
import sys

import torch
import transformers


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(32) * (index + 1) % 50
        return {"input_ids": ids, "labels": ids}


def main():
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=4, n_head=2)
    arguments = transformers.TrainingArguments(
        sys.argv[1], max_steps=4, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    model = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(model, arguments, train_dataset=Texts()).train()
    print("sum", sum(parameter.double().sum() for parameter in model.parameters()).item())


if __name__ == "__main__":
    main()
"""
_LIGHTNING = """
import sys

import lightning.pytorch as lightning
import torch


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        self.net = torch.nn.Sequential(*(block() for _ in range(4)))

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 16)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, data)
    print("sum", sum(parameter.double().sum() for parameter in module.parameters()).item())
"""
_RANKS = """
import os

import torch

torch.manual_seed(0)
block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
model = torch.nn.Sequential(*(block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("sum", os.environ["RANK"], sum(parameter.double().sum() for parameter in model.parameters()).item(), flush=True)
"""  # without a process group, whose threads can end a process with an abort


def _output(words: list[str], folder: Path) -> tuple[list[str], str]:
    """Run Python; return what it printed of sums, and all that went to the standard error stream."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, cwd=folder, timeout=300
    )
    assert found.returncode == 0, found.stderr
    return [line for line in found.stdout.splitlines() if line.startswith("sum")], found.stderr


@pytest.mark.parametrize("text", [_TRANSFORMERS, _LIGHTNING], ids=["Transformers", "Lightning"])
def test_a_program_of_a_trainer_trains_as_without_it(text: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(text)
    plain, _ = _output([str(program), str(tmp_path)], tmp_path)
    words = ["-m", "actckpt.run", "--activation-budget", "80%", str(program), str(tmp_path)]
    found, said = _output(words, tmp_path)
    assert found == plain and len(plain) == 1
    assert "4 blocks of" in said and "4 of 4 blocks ran (activation_budget='80%')" in said


def test_torchrun_launches_it_and_one_rank_reports(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain, _ = _output([*launcher, str(program)], tmp_path)
    found, said = _output([*launcher, "-m", "actckpt.run", "--policy", "matmuls", str(program)], tmp_path)
    assert sorted(found) == sorted(plain) and len(plain) == 2
    assert said.count("4 of 4 blocks ran (policy='matmuls')") == 1
