"""What is common to everything that ran out of memory and runs once more.

NOTE [ Rescue ]

Rule 1. The forward of a block runs again once, checkpointed (actckpt/_blocks/rescue.py). A rerun, a replay and a reload
        in backward run again once, as they are (csrc/core/rescue.h).
Rule 2. Before it runs again, what the first run made is freed, caches are asked (NOTE [ Pressure ]), and the allocator
        returns its cached memory, which also answers fragmentation.
Rule 3. It runs under the state that the first run began with. Where that cannot be had, the error is raised.
Rule 4. A collective that ran is not run again: other ranks would wait, or pair it with another one.
Rule 5. While a stream is being captured nothing runs again.
"""

from __future__ import annotations

import torch

from actckpt import config
from actckpt._core import agreement, devices, pressure, torch_private
from actckpt._core.counters import counters

__all__ = ["add_text", "empty_caches", "is_out_of_memory", "make_room", "may_run_again", "num_collectives"]

_ALL = 1 << 62
#: How the allocator of the CPU begins its error, a RuntimeError like many others.
_CPU_ALLOCATOR = "DefaultCPUAllocator: "
#: Attribute of an error after which nothing runs again (Rule 4).
_IS_FINAL = "_actckpt_is_final"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had not as much memory as it was asked for."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return _CPU_ALLOCATOR in text and "you tried to allocate" in text


def num_collectives() -> tuple[int | None, ...] | None:
    """Return how many operations each process group has run; None: this process is the only rank."""
    return torch_private.operations_of_groups() if agreement.has_others() else None


def may_run_again(error: BaseException, begun: tuple[int | None, ...] | None) -> bool:
    """Whether what raised an error runs once more.

    Args:
        begun: what `num_collectives` returned before it; None: it runs none.
    """
    if not config.settings().rescue or not is_out_of_memory(error) or hasattr(error, _IS_FINAL):
        return False
    if begun is not None and (None in begun or begun != num_collectives()):
        setattr(error, _IS_FINAL, True)  # what is around it must not run again either
        return False
    return not devices.is_capturing()


def make_room() -> None:
    """Give back what caches hold (Rule 2); called by the extension for backwards."""
    counters.add("rescued_recomputations", 1)
    empty_caches()


def empty_caches() -> None:
    """Ask all holders for their bytes, and the allocator for its cached memory."""
    accelerator = devices.current()
    on_device = accelerator is not None and accelerator.current_index() is not None
    pressure.release(_ALL, of_host=not on_device)
    if accelerator is not None and on_device:
        accelerator.empty_cache()


def add_text(error: BaseException, text: str) -> None:
    """Add a text to the message of an error."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(text)
    else:
        error.args = (f"{error}\n{text}",)
