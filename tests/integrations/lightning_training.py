"""A module of Lightning that trains a part of itself, and how it is fit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from training import STEPS

import actckpt
from actckpt.memory import LiveStorages


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Trains a part of itself, and records the bytes that its steps held."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: torch.nn.Sequential(  # noqa: E731
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * width, width)
        )
        self.width = width
        self.net = torch.nn.Sequential(*(block() for _ in range(4)))
        self.losses: list[torch.Tensor] = []
        self.held: list[int] = []
        self.blocks_ran: tuple[str, ...] = ()
        self.plan: Any = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no more")
        torch.manual_seed(index)
        live = LiveStorages(parameters=self.parameters())
        with live if self.device.type == "cpu" else contextlib.nullcontext():
            loss = self.net(batch[0]).float().square().mean()
            self.held.append(live.live_bytes)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if any("forward" in vars(module) for module in self.net):
            report = actckpt.report(self)
            self.blocks_ran, self.plan = report.blocks_ran, report.plan

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def trained(self) -> list[torch.Tensor]:
        """Losses and parameters."""
        return [*self.losses, *(parameter.detach() for parameter in self.parameters())]


def fit(module: Module, folder: Path, *callbacks: Any, accelerator: str = "cpu", precision: Any = "32-true") -> Any:
    trainer = lightning.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator=accelerator,
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    rows = torch.randn(32, module.width, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8))
    assert len(module.losses) == STEPS
    return trainer
