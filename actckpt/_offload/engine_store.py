"""What the stores of CPU tensors and of device tensors have in common: an engine, whose counters count."""

from actckpt import _C
from actckpt._core.accelerator import Accelerator
from actckpt._offload import counts, sources

__all__ = ["EngineStore"]


class EngineStore(_C.EngineStore):
    """A store over an engine. See csrc/bind/engine_store.h."""

    def __init__(self, engine: _C.DeviceEngine, accelerator: Accelerator | None) -> None:
        super().__init__(engine, accelerator)
        counts.note(self, engine)
        sources.protect(self)

    @property
    def window_bytes(self) -> int:
        """The current maximum of in-flight bytes."""
        return self.engine.stats().window_bytes

    def limit_window(self, nbytes: int | None) -> None:
        """Limit the in-flight bytes from now on; None: the limit of the settings."""
        self.engine.limit_window(nbytes)

    def poll(self) -> None:
        """Release the sources of finished copies. Every other call does so too."""
        self.engine.poll()
