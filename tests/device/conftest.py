"""What only a device with a capacity shows. Every test starts with a machine at rest, whose work takes time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import demo_training
import pytest
import torch
from sim import device
from sim.device.accelerator import offloading

import actckpt
from actckpt import _checkpointed_call


@pytest.fixture(autouse=True)
def _device_at_rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test leave a fault behind; tensors of the device are offloaded to pinned memory."""
    # `offload_inputs` leaves smaller tensors than this where they are.
    monkeypatch.setattr(_checkpointed_call, "DEFAULT_MIN_BYTES", 0)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    actckpt.reset_stats()
    taking_time = device.timed(link_bytes_per_s=20e6, kernel_bytes_per_s=200e6)
    with device.checked(), taking_time, offloading(max_inflight=demo_training.WINDOW_BYTES):
        yield
