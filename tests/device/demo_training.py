"""The demo's model on the simulated device, and the methods by which it trains."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import actckpt
from actckpt.demo import BYTE_VALUES, Block, LanguageModel

#: For copies out, and as much for what is read ahead: an eighth of what the blocks hand to each other.
WINDOW_BYTES = 128 << 10
#: What each block gets.
INPUT_BYTES = 4 * 128 * 64 * 4

_BATCH, _SEQ = 4, 128


class Training:
    """A model and its step. The same numbers each time."""

    def __init__(self, apply: Callable[[LanguageModel], object] = lambda model: None, *, layers: int = 8) -> None:
        gc.collect()  # models that `apply` patched are in cycles
        torch.manual_seed(0)
        self.model = LanguageModel(layers=layers, dim=64, heads=4, kv_heads=2, seq=_SEQ, dropout=0.1).to("sim")
        self.tokens = torch.randint(BYTE_VALUES, (_BATCH, _SEQ)).to("sim")
        self.outputs: Callable[[Tensor], Tensor] = lambda logits: logits
        apply(self.model)

    @property
    def plan(self) -> actckpt.Plan:
        plan = actckpt.report(self.model).plan
        assert plan is not None
        return plan

    def step(self) -> None:
        """Run forward and backward."""
        logits = self.outputs(self.model(self.tokens))
        functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()

    def gradients(self) -> list[Tensor]:
        """Run a step from the same seed and return its gradients, on the CPU."""
        torch.manual_seed(1)
        self.model.zero_grad()
        self.step()
        return [parameter.grad.cpu() for parameter in self.model.parameters() if parameter.grad is not None]

    def peak(self) -> int:
        """Run such a step and return the most that was allocated, with all that lives longer."""
        self.model.zero_grad()
        start_peak()
        self.gradients()
        return torch.accelerator.max_memory_allocated()


def start_peak() -> int:
    """Start the allocator's peak again from what is alive, which is returned."""
    # The device's autograd thread frees a graph shortly after its backward, and before it takes the next one.
    nothing = torch.empty(0, device="sim", requires_grad=True)
    torch.autograd.grad(nothing.view(0), nothing, nothing.detach())
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


def _offload(model: Any) -> None:
    actckpt.apply(model, policy="offload", blocks=Block, min_bytes=0)


METHODS: dict[str, Callable[[LanguageModel], object]] = {
    "plain": lambda model: None,
    "rerun": lambda model: actckpt.apply(model, policy="recompute", blocks=Block),
    "replay": lambda model: actckpt.apply(model, policy=[], blocks=Block),
    "offload": _offload,
    "offloaded inputs": lambda model: actckpt.apply(model, blocks=Block, offload_inputs=True),
}
