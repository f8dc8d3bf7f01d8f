"""The engine of a CpuStore, with tensors of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actckpt._C import Kept, OffloadError
from actckpt._offload.cpu import CpuStore


def test_a_tensor_makes_the_round_trip(tmp_path: Path) -> None:
    store = CpuStore.on_disk(str(tmp_path))
    tensor = torch.randn(300, 300)
    expected = tensor.clone()
    ticket = store.engine.put(tensor.data_ptr(), tensor.nbytes, tensor)
    assert not isinstance(ticket, Kept)
    assert ticket.nbytes == tensor.nbytes
    store.flush()
    store.poll()
    assert ticket.get() is None
    buffer = torch.empty(300, 300)
    assert ticket.load(buffer.data_ptr(), buffer) is buffer
    assert torch.equal(buffer, expected)
    ticket.unload()
    assert ticket.get() is None
    ticket.drop()
    store.engine.shutdown()


def test_an_unwritable_folder_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="spill_dir"):
        CpuStore.on_disk(str(tmp_path / "missing"))
