"""Private names of torch for settings that change operator results: their getters and setters.

`numerics` uses them. This module is imported by its own name; the package does not re-export it.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from actckpt._core.torch_private.lookup import lookup, optional
from actckpt._core.torch_private.modes import without_dispatch, without_functions

#: A setting: name, getter, setter.
Flag = tuple[str, Callable[[], Any], Callable[[Any], None]]


def _flags(*names: str) -> tuple[Flag, ...]:
    """Return settings by the common suffix of their getters and setters. A missing one is skipped."""
    flags = []
    for name in names:
        getter, setter = optional(f"torch._C._get_{name}"), optional(f"torch._C._set_{_SETTERS.get(name, name)}")
        if getter is not None and setter is not None:
            flags.append((name, getter, partial(_set_at_once, setter) if name in _TELL_SEVERAL else setter))
    return tuple(flags)


def _set_at_once(setter: Callable[..., None], values: Any) -> None:
    """Set what a getter returned as a tuple; before torch 2.11 it returns one value."""
    if isinstance(values, tuple):
        setter(*values)
    else:
        setter(values)


#: Setters not named like their getters.
_SETTERS = {
    "flash_sdp_enabled": "sdp_use_flash",
    "mem_efficient_sdp_enabled": "sdp_use_mem_efficient",
    "math_sdp_enabled": "sdp_use_math",
    "cudnn_sdp_enabled": "sdp_use_cudnn",
    "overrideable_sdp_enabled": "sdp_use_overrideable",
    "fa3_sdp_enabled": "sdp_use_fa3",
}

#: Getters that return a tuple of their setters' arguments.
_TELL_SEVERAL = ("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction")

#: Settings that change operator results: those that elementwise operators depend on; others; CUDA's; ROCm's. Public
#: getters would cost a Python frame.
NUMERIC_OF_ELEMENTS = ("mkldnn_enabled",)
NUMERIC_OF_CPUS = (
    *("mkldnn_deterministic", "nnpack_enabled", "deterministic_fill_uninitialized_memory", "qengine"),
    *("cpu_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction", "sdp_priority_order"),
    *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled"),
    *("overrideable_sdp_enabled", "fa3_sdp_enabled"),
)
NUMERIC_OF_CUDA = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_depthwise_kernel"),
    *("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "blas_preferred_backend", "linalg_preferred_backend"),
)
NUMERIC_OF_HIP = ("miopen_immediate", "rocm_fa_preferred_backend")
flags_of_elements = _flags(*NUMERIC_OF_ELEMENTS)
flags_of_cpus = _flags(*NUMERIC_OF_CPUS)
flags_of_cuda = _flags(*NUMERIC_OF_CUDA)
flags_of_hip = _flags(*NUMERIC_OF_HIP)

#: Whether algorithms must be deterministic, whether nondeterministic ones only warn, and the setter of both. The public
#: setter also writes settings of the compiler, and imports it.
must_be_deterministic: Callable[[], bool] = lookup("torch._C._get_deterministic_algorithms")
nondeterminism_warns: Callable[[], bool] = lookup("torch._C._get_deterministic_algorithms_warn_only")
set_deterministic: Callable[..., None] = lookup("torch._C._set_deterministic_algorithms")

#: The precision of float32 operators, per backend and operator.
get_precision: Callable[[str, str], str] = lookup("torch._C._get_fp32_precision_getter")
set_precision: Callable[[str, str, str], object] = lookup("torch._C._set_fp32_precision_setter")

#: Older settings that cover several precisions, as (name, getter, setter). If older and newer ones were mixed, their
#: getters raise.
older_precisions = _flags("float32_matmul_precision", "cudnn_allow_tf32")

#: Flags in torch's Python code that select operators: the module's namespace and the flag's name. The second module is
#: the one behind a module whose names are properties.
python_flags: tuple[tuple[dict[str, Any], str], ...] = tuple(
    (names, flag)
    for path, flag in (
        ("torch.backends.mha.__dict__", "_is_fastpath_enabled"),
        ("torch.backends.opt_einsum.m.__dict__", "enabled"),
        ("torch.backends.opt_einsum.m.__dict__", "strategy"),
    )
    if flag in (names := optional(path) or {})
)


#: Getter and setter of the priority order of attention kernels (none before torch has it), and the initial order.
_sdp_order = _flags("sdp_priority_order")
_SDP_ORDER_AT_FIRST = [get() for _, get, _ in _sdp_order]
#: Returns which kernel attention would run. Missing: settings recorded before the first attention of a process may have
#: another order than the one that it runs under.
_choose_sdp: Callable[..., int] | None = optional("torch._fused_sdp_choice")


def settle_sdp_order(device: torch.device) -> None:
    """Let torch choose the GPU order of its attention kernels now; otherwise the first attention of a process does.

    On H100 and later cuDNN's kernels come first then. Settings recorded earlier would have the other order, and a rerun
    would use another kernel than its forward. An order that the program has set stays.
    """
    if _choose_sdp is None:
        return
    orders = [get() for _, get, _ in _sdp_order]
    with without_functions(), without_dispatch():
        query = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device=device)
        with suppress(RuntimeError):  # the program allows no kernel: there is no order
            _choose_sdp(query, query, query)
    for (_, _, put), order, first in zip(_sdp_order, orders, _SDP_ORDER_AT_FIRST, strict=True):
        if order != first:
            put(order)
