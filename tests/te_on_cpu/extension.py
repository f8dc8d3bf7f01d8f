"""The module `transformer_engine_torch`, of emulated kernels."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from te_on_cpu import kernels, quantization

__all__ = ["build", "not_emulated"]

_DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
_FORWARD = [f"GEMM{gemm}_{kind}" for gemm in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{kind}{gemm}" for gemm in (1, 2, 3) for kind in ("OUTPUT", "INPUT")]


class _AnyMember(type):
    """An enumeration of which every member that is asked for exists: nothing here depends on its values."""

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("__")}

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(cls.__members__))
        return cls.__members__[name]


def not_emulated(name: str) -> Any:
    """Return what raises when it is called."""
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)

    def call(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is not emulated")

    return call


def _as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide what a function does from modes, autograd and autocast, as the kernels of an extension are hidden."""

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return kernel


def _kernels() -> dict[str, Callable[..., Any]]:
    named = [*kernels.products, *kernels.norms, *(getattr(quantization, name) for name in _OF_QUANTIZATION)]
    found = {function.__name__: function for function in named}
    return {**found, **kernels.activations(), **kernels.attention()}


_OF_QUANTIZATION = (
    "bgrad_quantize",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "fused_amax_and_scale_update_after_reduction",
    "quantize",
    "split_quantize",
)


def build() -> types.ModuleType:
    """Return the module."""
    module = types.ModuleType("transformer_engine_torch")
    attributes: dict[str, Any] = {name: _as_kernel(function) for name, function in _kernels().items()}
    attributes |= {
        "DType": enum.IntEnum("DType", _DTYPES),  # type: ignore[misc]
        "FP8FwdTensors": enum.IntEnum("FP8FwdTensors", {name: i for i, name in enumerate(_FORWARD)}),  # type: ignore[misc]
        "FP8BwdTensors": enum.IntEnum("FP8BwdTensors", {name: i for i, name in enumerate(_BACKWARD)}),  # type: ignore[misc]
        "get_cublasLt_version": lambda: 130000,
        "get_cudnn_version": lambda: 91300,
        "get_num_cublas_streams": lambda: 4,
        "device_supports_multicast": lambda *args: False,
        "ubuf_built_with_mpi": lambda: False,
    }

    def other(name: str) -> Any:
        if name.startswith("NVTE") or name in ("CommOverlapType", "Float8BlockScaleTensorFormat"):
            value: Any = _AnyMember(name, (), {})
        elif name[0].isupper():
            value = type(name, (), {})
        else:
            value = not_emulated(f"transformer_engine_torch.{name}")
        setattr(module, name, value)
        return value

    module.__dict__.update(attributes)
    module.__getattr__ = other  # type: ignore[method-assign]
    return module
