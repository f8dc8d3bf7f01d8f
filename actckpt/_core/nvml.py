"""What NVIDIA's management library tells of a GPU: its memory, its link to the host, and the host memory nearest to it.

The package `nvidia-ml-py` (module `pynvml`) is imported at the first question. Where it, the library behind it, or an
answer is missing, that answer is None: nothing else depends on it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuFacts", "facts_of"]

#: Numbers of NUMA nodes that are looked at, 64 to a word.
_NODE_WORDS = 16


@dataclass(frozen=True)
class GpuFacts:
    """What is known of a GPU; None: what nobody tells.

    Attributes:
        free_bytes: device memory that no process uses.
        total_bytes: all device memory.
        link_generation: of PCI Express, the highest that device and machine can use.
        link_width: most lanes that both can use.
        numa_node: the node of host memory nearest to the device.
    """

    free_bytes: int | None
    total_bytes: int | None
    link_generation: int | None
    link_width: int | None
    numa_node: int | None


def facts_of(uuid: str) -> GpuFacts | None:
    """Return what is known of the GPU with a UUID, as torch or the driver tells it; None where nobody can be asked.

    Cost: some milliseconds; no GPU context is made.
    """
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml

    def told(ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except nvml.NVMLError:  # unknown, not supported, or the library is too old
            return None

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return None
    try:
        handles = (told(nvml.nvmlDeviceGetHandleByUUID, name) for name in _names_of(uuid))
        handle = next((found for found in handles if found is not None), None)
        if handle is None:
            return None
        memory = told(nvml.nvmlDeviceGetMemoryInfo, handle)
        nodes = told(nvml.nvmlDeviceGetMemoryAffinity, handle, _NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
        return GpuFacts(
            free_bytes=None if memory is None else int(memory.free),
            total_bytes=None if memory is None else int(memory.total),
            link_generation=told(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            link_width=told(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            numa_node=None if nodes is None else _first_bit(nodes),
        )
    finally:
        told(nvml.nvmlShutdown)


def _names_of(uuid: str) -> tuple[str, ...]:
    """Return what the library may call a device: CUDA leaves out whether it is a whole one or a part."""
    return (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")


def _first_bit(words: Any) -> int | None:
    numbers = (64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)
    return next(numbers, None)
