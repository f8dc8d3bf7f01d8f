"""The machine that is measured: a GPU, or the simulated accelerator of the tests in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from actckpt._core import devices
from gpu_parts.rows import Machine

__all__ = ["machine"]

#: Copies take simulated time; computing takes none.
_LINK_BYTES_PER_S = 1e9
#: Less than what toys move.
_WINDOW_BYTES = 8 << 10
#: The smallest tensors that plans offload.
_PLANNED_BYTES = 16 << 10


@contextmanager
def machine(*, is_rehearsal: bool) -> Iterator[Machine | None]:
    """Yield the machine; None: there is no GPU. A rehearsal raises at the end what broke the order of streams."""
    accelerator = devices.available()
    if is_rehearsal:
        with _simulated() as simulated:
            yield simulated
    elif accelerator is None:
        yield None
    else:
        yield Machine(accelerator, is_rehearsal=False, capped=_capped)


@contextmanager
def _capped(nbytes: int) -> Iterator[None]:
    """Let the process allocate no more device memory than this."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _simulated() -> Iterator[Machine]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from sim import device
    from sim.device.accelerator import offloading

    from actckpt import _checkpointed_call
    from actckpt._offload import session
    from actckpt._replay import active_region

    _checkpointed_call.DEFAULT_MIN_BYTES = 0  # what `offload_inputs` moves; the process ends with the rehearsal
    session.DEFAULT_MIN_BYTES = active_region.DEFAULT_MIN_BYTES = _PLANNED_BYTES
    with device.checked(), device.timed(link_bytes_per_s=_LINK_BYTES_PER_S), offloading(max_inflight=_WINDOW_BYTES):
        accelerator = devices.available()
        assert accelerator is not None
        yield Machine(accelerator, is_rehearsal=True, capped=lambda nbytes: device.capacity(0, nbytes))
