"""Transformers' Trainer on a few rows of random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from training import STEPS


def arguments(folder: Path, kind: Any, **options: Any) -> Any:
    return kind(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        **{"use_cpu": True, "save_strategy": "no", **options},
    )


def trainer_of(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    ids = torch.randint(3, 64, (64, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = arguments(folder, transformers.TrainingArguments, **options)
    return transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)


def run(trainer: Any) -> list[torch.Tensor]:
    """Train, and return the losses and then the parameters."""
    trainer.train()
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return [*losses, *(parameter.detach() for parameter in trainer.model.parameters())]
