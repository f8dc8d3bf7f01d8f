"""Work that ran out of memory runs once more: in backward, and forwards of blocks (actckpt/_blocks/second_attempt.py).

A rerun, a replay and a reload run once more if an allocation failed (csrc/core/rescue.h). Before that, the first
attempt and its error are freed, all holders release bytes (NOTE [ Pressure ]), and the allocator returns its cached
memory, which also helps against fragmentation. If the second attempt fails too, its error is raised, with the first one
at the end of its `__context__`.

A rerun that communicated with other ranks does not run once more: they would hang, or match it with another operation.
The operation counters of process groups show that. NCCL does not count sends, so with NCCL no rerun runs once more.
Replays and reloads do not communicate. One during which a rerun ran does not run once more, even on a single rank.
Nothing runs once more while a stream is being captured.
"""

from __future__ import annotations

import torch

from actckpt import config
from actckpt._core import devices, pressure, ranks, torch_private
from actckpt._core.counters import counters

__all__ = ["add_first_error", "is_out_of_memory", "may_run_again", "num_operations", "release_caches"]

_ALL = 1 << 62
#: Messages of allocators that raise a plain RuntimeError: the CPU's, and CUDA outside of torch's allocator.
_TEXTS = ("DefaultCPUAllocator: ", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def num_operations() -> tuple[int | None, ...]:
    """Return the number of operations of each process group, None: unknown; empty for a single rank."""
    return torch_private.operations_of_groups() if ranks.has_others() else ()


def may_run_again(error: BaseException, begun: tuple[int | None, ...] | None) -> bool:
    """Whether work that raised an error runs once more.

    Args:
        begun: result of `num_operations` before a rerun; None: it is a replay or a reload.
    """
    if not config.settings().rescue or not is_out_of_memory(error) or devices.is_capturing():
        return False
    return begun is None or (None not in begun and begun == num_operations())


def release_caches(counter: str = "rescued_recomputations") -> None:
    """Release the memory of caches before a second attempt.

    Args:
        counter: of such attempts.
    """
    counters.add(counter, 1)
    pressure.release(_ALL)
    accelerator = devices.current()
    if accelerator is not None and accelerator.current_index() is not None:
        accelerator.empty_cache()


def add_first_error(error: BaseException, first: str) -> None:
    """Add the text of the first attempt's error to the error of the second one."""
    while error.__context__ is not None:
        error = error.__context__
    error.__context__ = torch.OutOfMemoryError(first)
