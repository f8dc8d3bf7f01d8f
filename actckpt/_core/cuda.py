"""CUDA devices: the only file that uses `torch.cuda`."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from actckpt._core import nvml, torch_private
from actckpt._core.accelerator import Accelerator, MemoryLabels
from actckpt._core.nvml import GpuFacts
from actckpt._core.torch_private import settings as torch_settings

__all__ = ["CUDA_LIBRARY", "Cuda"]

#: The soname of NVIDIA's driver.
CUDA_LIBRARY = "libcuda.so.1"


class Cuda(Accelerator):
    """NVIDIA's devices. AMD's have the same device type; the engine has no backend for them."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.driver_library = CUDA_LIBRARY if torch.version.hip is None else None
        self._has_order = False
        if torch_private.cuda_stream_handle is not None:
            self.stream_handle = torch_private.cuda_stream_handle  # type: ignore[method-assign, assignment]

    def current_index(self) -> int | None:
        index = super().current_index()
        if index is not None and not self._has_order and not torch.cuda.is_current_stream_capturing():
            self._has_order = True
            torch_settings.settle_sdp_order(self.device_at(index))
        return index

    @functools.cached_property
    def is_integrated(self) -> bool:
        """`cudaDevAttrIntegrated`, as of GB10 and Jetson."""
        return {bool(torch.cuda.get_device_properties(i).is_integrated) for i in range(self.device_count())} == {True}

    @torch_private.untraced
    def stream_handle(self, index: int) -> int:
        return torch.cuda.current_stream(index).cuda_stream

    @torch_private.untraced
    def stream_at(self, handle: int, index: int) -> torch.Stream:
        return torch.cuda.ExternalStream(handle, device=index)

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]  # one of CUDA's, made above

    def memory_info(self, device: torch.device) -> tuple[int, int] | None:
        free, total = torch.cuda.mem_get_info(device)
        if not self.counts_memory:
            return free, total
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))  # the limit of this process
        return min(free, max(0, limit - torch.cuda.memory_reserved(device))), min(total, limit)

    def is_used(self, index: int) -> bool:
        has_context = torch_private.cuda_has_context
        return has_context is None or has_context(index)

    def memory_labels(self) -> MemoryLabels | None:
        set_label, get_label = torch_private.set_memory_label, torch_private.get_memory_label
        return None if set_label is None or get_label is None else MemoryLabels(set_label, get_label)

    def facts_of(self, device: torch.device) -> GpuFacts | None:
        return nvml.facts_of(str(torch.cuda.get_device_properties(device).uuid)) if torch.version.hip is None else None
