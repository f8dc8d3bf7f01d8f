"""Every way of ours to run a layer: how it is called, and what is done to the model first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import actckpt
from te_on_cpu.training import Method, plain

__all__ = ["METHODS", "How"]


class How(NamedTuple):
    """One way."""

    method: Method = plain
    prepare: Callable[[torch.nn.ModuleList], Any] | None = None


def _nested(layer: Any, x: Tensor, **options: Any) -> Any:
    return actckpt.checkpoint(lambda x: actckpt.checkpoint(layer, x, **options), x)


def _offload(layer: Any, x: Tensor, **options: Any) -> Any:
    with actckpt.offload(min_bytes=0):
        return layer(x, **options)


def _checkpoint_in_offload(layer: Any, x: Tensor, **options: Any) -> Any:
    with actckpt.offload(min_bytes=0):
        return actckpt.checkpoint(layer, x, **options)


def _offload_in_checkpoint(layer: Any, x: Tensor, **options: Any) -> Any:
    return actckpt.checkpoint(lambda x: _offload(layer, x, **options), x)


def _region(layer: Any, x: Tensor, **options: Any) -> Any:
    with actckpt.region("recompute"):
        return layer(x, **options)


def _wrap(*policy: Any, **options: Any) -> Callable[[torch.nn.ModuleList], Any]:
    return lambda model: actckpt.te.wrap(model, *policy, min_bytes=0, **options)


METHODS = {
    "checkpoint": How(actckpt.checkpoint),
    "te.checkpoint": How(actckpt.te.checkpoint),
    "nested": How(_nested),
    "run to the end": How(lambda layer, x, **o: actckpt.checkpoint(layer, x, early_stop=False, **o)),
    "offloaded inputs": How(lambda layer, x, **o: actckpt.checkpoint(layer, x, offload_inputs=True, **o)),
    "offload": How(_offload),
    "checkpoint in offload": How(_checkpoint_in_offload),
    "offload in checkpoint": How(_offload_in_checkpoint),
    "region": How(_region),
    "apply": How(prepare=lambda model: actckpt.apply(model, blocks=lambda part: any(part is one for one in model))),
    "wrap, keep": How(prepare=_wrap("keep")),
    "wrap, recompute": How(prepare=_wrap("recompute")),
    "wrap, offload": How(prepare=_wrap("offload")),
    "wrap, retain_graph": How(prepare=_wrap(retain_graph=True)),
    "wrap, retain_graph and offload": How(prepare=_wrap("offload", retain_graph=True)),
}
