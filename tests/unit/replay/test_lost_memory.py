"""Which memory counts as lost when it is overwritten."""

from __future__ import annotations

import torch

import actckpt
from actckpt._replay import active_region


def test_memory_that_nothing_read_is_not_lost_when_it_is_overwritten() -> None:
    x, unread, read = torch.randn(6, 8, requires_grad=True), torch.zeros(6, 8), torch.zeros(6, 8)
    with actckpt.region():
        tape = active_region._local.tape
        assert tape is not None
        y = torch.nn.functional.dropout(x.sin(), 0.5)
        unread.fill_(2.0)
        assert tape.num_lost == 0
        result = read.sin()  # may be saved yet
        read.fill_(2.0)
        assert tape.num_lost == 1
        y = y * result
    y.sum().backward()
