"""What ranks compare before they repeat collectives; tests/distributed has several of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from actckpt._core import agreement, torch_private

REPEATED = agreement.Repeated("file.py:1", "layers.0", None, ((0, "_c10d_functional.all_reduce.default"),))


class _Group:
    """Stands for a process group of two ranks."""


def test_a_group_without_a_store_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = _Group()
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "mpi")
    monkeypatch.setattr(torch_private, "group_store", lambda group: None)
    agreement.agree(group, REPEATED)
    assert agreement.exchanges_of(group).number == 0
