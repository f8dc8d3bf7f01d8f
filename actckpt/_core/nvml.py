"""Facts about a GPU from NVIDIA's management library: memory, PCI Express link, nearest NUMA node.

The package `nvidia-ml-py` (module `pynvml`) is imported at the first query. If it, its library or an answer is missing,
the fact is None; nothing else depends on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuFacts", "facts_of"]

#: Words of the NUMA node mask, 64 nodes each.
_NODE_WORDS = 16


@dataclass(frozen=True)
class GpuFacts:
    """Facts about a GPU; None: unknown.

    Attributes:
        free_bytes: device memory that no process uses.
        total_bytes: all device memory.
        link_generation: highest PCI Express generation that device and machine support.
        link_width: highest number of lanes that both support.
        numa_node: the NUMA node nearest to the device.
    """

    free_bytes: int | None
    total_bytes: int | None
    link_generation: int | None
    link_width: int | None
    numa_node: int | None


def facts_of(uuid: str) -> GpuFacts | None:
    """Return the facts about the GPU with this UUID, as torch or the driver reports it; None if NVML is unavailable.

    Cost: some milliseconds; creates no GPU context.
    """
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml

    def query(ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except nvml.NVMLError:  # unknown, unsupported, or the library is too old
            return None

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return None
    try:
        handles = (query(nvml.nvmlDeviceGetHandleByUUID, name) for name in _names_of(uuid))
        handle = next((candidate for candidate in handles if candidate is not None), None)
        if handle is None:
            return None
        memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
        nodes = query(nvml.nvmlDeviceGetMemoryAffinity, handle, _NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
        return GpuFacts(
            free_bytes=None if memory is None else int(memory.free),
            total_bytes=None if memory is None else int(memory.total),
            link_generation=query(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            link_width=query(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            numa_node=None if nodes is None else _first_bit(nodes),
        )
    finally:
        query(nvml.nvmlShutdown)


def _names_of(uuid: str) -> tuple[str, ...]:
    """Return possible NVML names of a device: CUDA's UUID omits whether it is a full GPU or a MIG instance."""
    return (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")


def _first_bit(words: Any) -> int | None:
    numbers = (64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)
    return next(numbers, None)
