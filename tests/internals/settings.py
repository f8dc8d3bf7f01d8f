"""The settings of torch that recorders read, put back after a test that changes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from settings_seen import seen
from torch_settings import EINSUM, backends, entered

from actckpt import _C
from actckpt._core import numerics

__all__ = ["settings_as_before"]

_ALL_PRECISIONS = [
    ("generic", "all"),
    *((backend, operator) for backend in ("mkldnn", "cuda") for operator in ("all", "matmul", "conv", "rnn")),
]


@pytest.fixture
def settings_as_before() -> Iterator[None]:
    """Read what CUDA alone has, too; and put everything back."""
    numerics.connect(on_cuda=True, on_hip=True)
    settings = list(zip(numerics.in_force, _C.numerics(), strict=True))
    raw = [(*pair, torch._C._get_fp32_precision_getter(*pair)) for pair in _ALL_PRECISIONS]
    fastpath, einsum = backends.mha.get_fastpath_enabled(), (EINSUM["enabled"], EINSUM["strategy"])
    seen.clear()
    yield
    entered.close()
    torch.set_default_tensor_type(torch.FloatTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns of the older names of settings
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    for setting, value in settings:
        setting.set(value)
    for backend, operator, value in raw:
        torch._C._set_fp32_precision_setter(backend, operator, value)
    backends.mha.set_fastpath_enabled(fastpath)
    EINSUM["enabled"], EINSUM["strategy"] = einsum
    numerics.connect(on_cuda=torch.backends.cuda.is_built(), on_hip=torch.version.hip is not None)
