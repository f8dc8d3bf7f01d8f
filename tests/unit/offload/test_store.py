"""CpuStore fulfils the Store protocol, with tensors of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actckpt._offload.native import CpuStore, Kept, SpillWriteError
from actckpt._offload.store import Store


def make(kind: str, folder: Path) -> CpuStore:
    return CpuStore.on_disk(str(folder)) if kind == "disk" else CpuStore.in_memory()


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_tensor_makes_the_round_trip_through_the_protocol(kind: str, tmp_path: Path) -> None:
    store: Store = make(kind, tmp_path)
    tensor = torch.randn(300, 300)
    expected = tensor.clone()
    ticket = store.put(tensor.data_ptr(), tensor.nbytes, tensor)
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
    store.close()


def test_an_unwritable_folder_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SpillWriteError, match="spill_dir"):
        CpuStore.on_disk(str(tmp_path / "missing"))
