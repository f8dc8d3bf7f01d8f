"""The store of device tensors: pinned host memory, and disk below it.

Copies go to pinned host memory on side streams. If that is full, they go to disk if `configure(spill_dir=...)` names a
folder. If nothing has room, the tensor stays. csrc/engine/protocol/README.md has the rules of streams and events.
An integrated device uses the host's memory: nothing goes to pinned memory there.
"""

from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.devices import Accelerator
from actckpt._offload import limits
from actckpt._offload.engine_store import EngineStore
from actckpt._offload.spill import spill_file

__all__ = ["DeviceStore", "no_backend"]


def no_backend(device_type: str) -> str:
    """Return why the engine cannot move tensors of such devices, and what to do instead; empty if it can."""
    accelerator = devices.accelerator_of(device_type)
    library = None if accelerator is None else accelerator.driver_library
    why = "it has no backend for them" if library is None else _C.why_no_driver(library)
    return why and (
        f"the engine cannot move tensors of {device_type!r} devices: {why}. Recompute them instead "
        "(policy='recompute', actckpt.checkpoint), or keep them."
    )


class DeviceStore(EngineStore):
    """A store for the tensors of an accelerator."""

    def __init__(self, engine: _C.DeviceEngine, accelerator: Accelerator, host_bytes: int | None = None) -> None:
        super().__init__(engine, accelerator)
        #: Maximum bytes of pinned memory for tensors; None: not limited here.
        self.host_bytes = host_bytes

    @classmethod
    def from_settings(cls, settings: config.Settings, device_type: str) -> "DeviceStore":
        accelerator = devices.accelerator_of(device_type)
        if accelerator is None or accelerator.driver_library is None:
            raise _C.OffloadError(f"offload: {no_backend(device_type)}")
        host = settings.host_limit if settings.host_limit is not None else limits.default_host_limit()
        file = None if settings.spill_dir is None else spill_file(settings)
        bounce, buffer = limits.bounce_sizes(host if file else 0)
        pinned = 0 if accelerator.is_integrated else host - bounce
        engine = _C.DeviceEngine.cuda(
            library=accelerator.driver_library,
            limit_bytes=pinned,
            window_bytes=settings.window_bytes,
            release=_C.TorchStreams(accelerator),
            spill_file=file,
            bounce_bytes=bounce,
            buffer_bytes=buffer,
            num_workers=max(1, settings.num_workers),
        )
        return cls(engine, accelerator, pinned)
