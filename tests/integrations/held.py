"""What a training step of a model holds, and the same with the checkpointing of its own library and with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import actckpt
from actckpt.memory import LiveStorages

#: What differs by allocation of a few small tensors.
SLACK = 1.01


class Held:
    """Bytes of one step, its gradients, and the buffers after it."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], **keywords: Any) -> None:
        model.train()
        for is_first in (True, False):  # the first one makes the gradients that stay
            torch.manual_seed(5)
            model.zero_grad(set_to_none=is_first)
            with LiveStorages() as live:
                loss = first_tensor(model(*inputs, **keywords)).float().square().mean()
                self.after_forward = live.live_bytes
                loss.backward()
            self.peak = live.peak_bytes
        self.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.buffers = dict(model.named_buffers())


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor in the result of a model."""
    if isinstance(result, Tensor):
        return result
    return first_tensor(next(iter(result.values())) if isinstance(result, dict) else result[0])


def compare(
    model: nn.Module, inputs: tuple[Any, ...], theirs: Callable[[nn.Module], Any] | None, **keywords: Any
) -> tuple[tuple[str, ...], Held, Held | None, Held]:
    """Return the names of our blocks and what is held without checkpointing, with theirs and with ours.

    Gradients and buffers are bit-equal, and all blocks run.
    """
    plain = Held(copy.deepcopy(model), inputs, **keywords)
    library = None
    if theirs is not None:
        switched = copy.deepcopy(model)
        theirs(switched)
        library = Held(switched, inputs, **keywords)
    applied = copy.deepcopy(model)
    names = actckpt.apply(applied)
    ours = Held(applied, inputs, **keywords)
    assert actckpt.report(applied).blocks_ran == names
    assert ours.gradients.keys() == plain.gradients.keys() and ours.buffers.keys() == plain.buffers.keys()
    assert all(torch.equal(found, plain.buffers[name]) for name, found in ours.buffers.items())
    for name, expected in plain.gradients.items():
        found = ours.gradients[name]
        assert found is expected or torch.equal(found, expected), name
    return names, plain, library, ours


def assert_holds_no_more_than_its_own(
    model: nn.Module, inputs: tuple[Any, ...], switch: Callable[[nn.Module], Any], *, num_blocks: int, of_plain: float
) -> None:
    """Hold and peak no more than checkpointing of the library, which `switch` turns on, over so many blocks.

    That peaks below `of_plain` times the peak without checkpointing.
    """
    names, plain, theirs, ours = compare(model, inputs, switch)
    assert len(names) == num_blocks
    assert theirs is not None
    assert ours.after_forward <= SLACK * theirs.after_forward
    assert ours.peak <= SLACK * theirs.peak < of_plain * plain.peak
