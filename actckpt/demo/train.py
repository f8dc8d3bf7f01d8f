"""Train with one method and say what it cost."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from actckpt._blocks.applied import applied_blocks
from actckpt._core import devices
from actckpt._core.training_state import random_state_put_back
from actckpt.blocks import report
from actckpt.demo.data import batches
from actckpt.demo.methods import Method
from actckpt.demo.model import BYTE_VALUES, LanguageModel
from actckpt.demo.settings import DemoSettings
from actckpt.memory import StepMemory, measure_step
from actckpt.planner.plans import Plan

__all__ = ["MethodResult", "train"]

_LEARNING_RATE = 3e-3
_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class MethodResult:
    """What one method's training gave.

    Attributes:
        method: its name.
        losses: of every step.
        step_seconds: of every step: forward, backward and optimizer, without the memory counter. Where plans took turns
            in these steps, of as many afterwards.
        digests: SHA-256 of each parameter's bytes after the last step, by name.
        memory: of one further forward and backward, under the counter.
        plan: what `apply` found for a budget, if the method has one.
    """

    method: str
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    digests: dict[str, str]
    memory: StepMemory
    plan: Plan | None = None

    @property
    def median_step_seconds(self) -> float:
        """Median without the first steps, in which allocators and threads warm up."""
        return statistics.median(self.step_seconds[_WARM_UP_STEPS:] or self.step_seconds)


def train(
    method: Method,
    settings: DemoSettings,
    *,
    text: torch.Tensor,
    device: torch.device,
    on_step: Callable[[float], None],
    on_race: Callable[[], None] = lambda: None,
) -> MethodResult:
    """Train a new model with `method`, then measure the memory of one more step.

    Args:
        method: applied to the model before the first step.
        settings: sizes, steps and seed.
        text: uint8 (N,).
        device: where to train.
        on_step: called with the loss after each step.
        on_race: called before each further step in which plans take turns.

    Returns:
        Losses, times, digests and memory. The global generators are left as they were.
    """
    source = batches(text, batch=settings.batch, seq=settings.seq, seed=settings.seed)
    losses, seconds = [], []
    with random_state_put_back():
        torch.manual_seed(settings.seed)
        model = _make_model(settings).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
        method.apply(model)
        for _ in range(settings.steps):
            loss, step_seconds = _timed_step(model, optimizer, *next(source))
            losses.append(loss)
            seconds.append(step_seconds)
            on_step(loss)
        digests = {name: _digest(parameter) for name, parameter in model.named_parameters()}
        found = report(model) if applied_blocks(model) else None
        if found is not None and found.plan is not None and (found.race_steps_left or found.plan.race):
            for _ in range(found.race_steps_left or 0):
                on_race()
                _timed_step(model, optimizer, *next(source))
            seconds = [_timed_step(model, optimizer, *next(source))[1] for _ in range(settings.steps)]
        inputs, targets = (part.to(device) for part in next(source))
        memory = measure_step(
            lambda: _forward_backward(model, inputs, targets), device=device, parameters=model.parameters()
        )
        plan = None if found is None else report(model).plan
    return MethodResult(method.name, tuple(losses), tuple(seconds), digests, memory, plan)


def _make_model(settings: DemoSettings) -> LanguageModel:
    return LanguageModel(
        layers=settings.layers,
        dim=settings.dim,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        seq=settings.seq,
        dropout=settings.dropout,
    )


def _timed_step(
    model: LanguageModel, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[float, float]:
    """One optimizer step on a batch (B, S) from the CPU; returns loss and seconds, without the copy."""
    device = model.rotation.device
    inputs, targets = inputs.to(device), targets.to(device)
    start_s = _now_s(device)
    loss = _forward_backward(model, inputs, targets)
    optimizer.step()
    optimizer.zero_grad()
    return loss, _now_s(device) - start_s


def _forward_backward(model: LanguageModel, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Run forward and backward on a batch (B, S); returns the mean cross-entropy in nats per byte."""
    device_type = inputs.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=device_type != "cpu"):
        logits = model(inputs)
    loss = functional.cross_entropy(logits.float().view(-1, BYTE_VALUES), targets.reshape(-1))
    loss.backward()
    return loss.item()


def _now_s(device: torch.device) -> float:
    devices.synchronize(device)
    return time.perf_counter()


def _digest(parameter: torch.Tensor) -> str:
    values = parameter.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()
