"""Private names of torch for accelerators: the one in use, and whether CUDA has a context."""

from collections.abc import Callable

import torch

from actckpt._core.torch_private.lookup import optional

#: `torch.accelerator.current_accelerator` without its Python frame, which would cost time in every region.
current_accelerator: Callable[[], torch.device | None] = (
    optional("torch._C._accelerator_getAccelerator") or torch.accelerator.current_accelerator
)

#: Whether a CUDA device has a context; does not create one. Only if torch was built for CUDA.
cuda_has_context: Callable[[int], bool] | None = optional("torch._C._cuda_hasPrimaryContext")

#: Returns the driver's handle of a device's current stream. Only if torch was built for CUDA.
cuda_stream_handle: Callable[[int], int] | None = optional("torch._C._cuda_getCurrentRawStream")

#: Sets and gets the label of the next allocations. Missing if torch was not built for CUDA.
set_memory_label: Callable[[str], None] | None = optional("torch._C._cuda_setMemoryMetadata")
get_memory_label: Callable[[], str] | None = optional("torch._C._cuda_getMemoryMetadata")
