"""Pipelines from GPipe to zero-bubble: many forwards of a stage are alive, and backward may come in halves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import NUM_RANKS
from torch import Tensor, nn
from training import Method, Training, batch, model_of

_MICROBATCHES = 4


class Stage(nn.Module):
    """A part of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _stages(indices: list[int], num_stages: int, method: Method) -> list[Any]:
    from torch.distributed.pipelining import PipelineStage

    model = model_of(depth=8)
    parts = [model.first, *model.blocks, model.last]
    per_stage = len(model.blocks) // num_stages
    found = []
    for index in indices:
        begin, end = 1 + index * per_stage, 1 + (index + 1) * per_stage
        stage = Stage(parts[0 if index == 0 else begin : len(parts) if index == num_stages - 1 else end])
        method(stage)
        found.append(PipelineStage(stage, index, num_stages, torch.device("cpu")))
        if torch.__version__ < (2, 11):  # sends 8 bytes to connect where it receives 4, which ends a process of gloo
            found[-1]._get_init_p2p_neighbors_ops = list  # gloo is connected
    return found


def _pipeline(method: Method, *, schedule: str) -> Training:
    from torch.distributed import pipelining

    kind, rank = getattr(pipelining, schedule), dist.get_rank()
    if schedule in ("ScheduleGPipe", "Schedule1F1B"):
        stages = _stages([rank], NUM_RANKS, method)
        runs = kind(stages[0], _MICROBATCHES, loss_fn=_loss)
    else:
        is_v = schedule == "ScheduleZBVZeroBubble"
        indices = [rank, 2 * NUM_RANKS - 1 - rank if is_v else NUM_RANKS + rank]
        stages = _stages(indices, 2 * NUM_RANKS, method)
        runs = kind(stages, _MICROBATCHES, loss_fn=_loss)
    indices = [stage.stage_index for stage in stages]

    def forward(step: int) -> None:
        x = torch.cat([batch(step, is_same=True)] * (_MICROBATCHES // 2))
        inputs = (x,) if 0 in indices else ()
        target = {"target": torch.ones(_MICROBATCHES, 16, 4)} if stages[-1].num_stages - 1 in indices else {}
        runs.step(*inputs, **target)

    return Training(lambda: [parameter for stage in stages for parameter in stage.submod.parameters()], forward)


KINDS: dict[str, Callable[[Method], Training]] = {
    "GPipe": functools.partial(_pipeline, schedule="ScheduleGPipe"),
    "1F1B": functools.partial(_pipeline, schedule="Schedule1F1B"),
    "interleaved": functools.partial(_pipeline, schedule="ScheduleInterleaved1F1B"),
    "zero bubble": functools.partial(_pipeline, schedule="ScheduleInterleavedZeroBubble"),
    "zero bubble, V": functools.partial(_pipeline, schedule="ScheduleZBVZeroBubble"),
}


#: Kinds that some torch cannot run.
NOT_HERE = {
    "zero bubble, V": pytest.mark.skipif(
        torch.__version__ < (2, 13), reason="torch 2.9 and 2.11 alone send from a rank to itself, which gloo cannot"
    )
}
