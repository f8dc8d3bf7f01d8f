"""Private names of torch for fake tensors, which have shapes but no bytes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from actckpt._core.torch_private.lookup import lookup, optional
from actckpt._core.torch_private.modes import without_dispatch, without_functions

#: Tensors that have shapes but no bytes.
fake_tensor_type: type = lookup("torch._subclasses.fake_tensor.FakeTensor")

#: Raised by operators that would have to read the numbers of fake tensors; `func` is the operator.
needs_numbers: tuple[type[Exception], ...] = (
    lookup("torch._subclasses.fake_tensor.DataDependentOutputException"),
    lookup("torch._subclasses.fake_tensor.DynamicOutputShapeException"),
)

_fake_mode: Any = lookup("torch._subclasses.fake_tensor.FakeTensorMode")


class _FakeMode(_fake_mode):  # type: ignore[misc]
    """Disables torch's cache of operators on storages, which would hold those storages forever."""

    cache_enabled: bool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(arg, torch.UntypedStorage) for arg in args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_enabled: bool = self.cache_enabled
        self.cache_enabled = False
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = is_enabled


def fake_mode() -> Any:
    """Return a mode under which operators make fake tensors, also from real arguments."""
    return _FakeMode(allow_non_fake_inputs=True)


def new_fake(
    mode: Any,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a CPU fake tensor on a storage of the meta device, created below all modes."""
    with without_functions(), without_dispatch():
        inner = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, tuple(shape), tuple(stride))
        fake: torch.Tensor = fake_tensor_type(mode, inner, torch.device("cpu"))
        return fake


#: Returns the factory functions that use the default device. Missing: a default device other than the CPU stays.
factories: Callable[[], Any] = optional("torch.utils._device._device_constructors") or frozenset
