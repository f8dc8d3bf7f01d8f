"""Private names of torch for fake tensors, which have shapes and no bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._device
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from actckpt._core.torch_private.optional import optional

#: Tensors that have shapes and no bytes.
fake_tensor_type: type = FakeTensor

#: What operators raise that would have to read the numbers of fake tensors; `func` is the operator.
needs_numbers: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)


class _FakeMode(FakeTensorMode):
    """Remembers nothing of operators on storages: torch's cache would hold those storages for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(arg, torch.UntypedStorage) for arg in args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_enabled, self.cache_enabled = self.cache_enabled, False
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = is_enabled


def fake_mode() -> Any:
    """Return a mode under which operators make fake tensors, also of real arguments."""
    return _FakeMode(allow_non_fake_inputs=True)


def new_fake(
    mode: Any,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a fake tensor of the CPU on a storage of the meta device. No mode sees how it is made."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        inner = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, tuple(shape), tuple(stride))
        return FakeTensor(mode, inner, torch.device("cpu"))


#: Returns the functions that make tensors on the default device. Missing: a default device other than the CPU stays.
factories: Callable[[], Any] = optional(torch.utils._device, "_device_constructors") or frozenset
