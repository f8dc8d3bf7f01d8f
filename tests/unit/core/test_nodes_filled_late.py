"""Which nodes of autograd read what their kernel fills after it was saved."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name

from actckpt._core import torch_private


def test_nodes_tell_whether_they_read_what_is_filled_late() -> None:
    told = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        told.append((torch_private.current_node().name(), torch_private.reads_filled_late()))
        return tensor

    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = F.rrelu(x.sin(), training=True)
    y.sum().backward()
    assert told == [("RreluWithNoiseBackward0", True)] * 2 + [("SinBackward0", False)]
    assert torch_private.reads_filled_late() is None
