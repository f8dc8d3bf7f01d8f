"""The simulated accelerator of the tests in the place of a GPU: `--rehearse` of the GPU benchmarks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Copies take simulated time; what is computed takes none.
_LINK_BYTES_PER_S = 1e9
#: Less than what toys move.
_WINDOW_BYTES = 8 << 10
#: The smallest tensors that plans offload.
_PLANNED_BYTES = 16 << 10


@contextmanager
def simulated() -> Iterator[None]:
    """Let torch and actckpt have `torch.device("sim")` as their accelerator; raise at the end what broke its order."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from sim import device
    from sim.device.accelerator import offloading

    from actckpt import _checkpointed_call
    from actckpt._offload import session
    from actckpt._replay import active_region

    _checkpointed_call.DEFAULT_MIN_BYTES = 0  # what `offload_inputs` moves; the process ends with the rehearsal
    session.DEFAULT_MIN_BYTES = active_region.DEFAULT_MIN_BYTES = _PLANNED_BYTES
    with device.checked(), device.timed(link_bytes_per_s=_LINK_BYTES_PER_S), offloading(max_inflight=_WINDOW_BYTES):
        yield
