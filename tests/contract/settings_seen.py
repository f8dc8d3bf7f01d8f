"""What operators find of torch's settings, as an operator of our own tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

#: Marks of a module whose tests change settings.
CHANGES_SETTINGS = [
    pytest.mark.usefixtures("settings_as_before"),
    pytest.mark.filterwarnings("ignore:.*torch.set_default_tensor_type.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is an experimental feature.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning"),
]


def flushes() -> bool:
    """Whether this thread of the CPU takes the smallest numbers for zero, which no other device asks."""
    smallest = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
    return bool(smallest * torch.ones((), dtype=torch.float32, device="cpu") == 0)


def _read(path: str) -> Callable[[], Any]:
    def read() -> Any:
        try:
            return eval(path, {"torch": torch})
        except RuntimeError:  # torch refuses to tell an old setting where it and the new one disagree
            return "refused"
        except AttributeError:  # older torch has fewer
            return "missing"

    return read


READ: dict[str, Callable[[], Any]] = {
    "denormals": flushes,
    **{
        path: _read(f"torch.{path}")
        for path in [
            "get_default_dtype()",
            "get_num_threads()",
            "are_deterministic_algorithms_enabled()",
            "is_deterministic_algorithms_warn_only_enabled()",
            "utils.deterministic.fill_uninitialized_memory",
            "get_float32_matmul_precision()",
            *(f"backends.mkldnn.{name}" for name in ("enabled", "deterministic")),
            *(f"backends.mkldnn.{name}.fp32_precision" for name in ("matmul", "conv", "rnn")),
            "_C._get_nnpack_enabled()",
            "backends.quantized.engine",
            *(f"backends.cuda.{name}_sdp_enabled()" for name in ("cudnn", "flash", "math", "mem_efficient")),
            "_C._get_sdp_priority_order()",
            "backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
            *(f"backends.cuda.matmul.allow_{name}" for name in ("tf32", "fp16_accumulation")),
            "backends.cuda.matmul.fp32_precision",
            "_C._get_cublas_allow_fp16_reduced_precision_reduction()",
            "_C._get_cublas_allow_bf16_reduced_precision_reduction()",
            "backends.cuda.preferred_blas_library()",
            "backends.cuda.preferred_rocm_fa_library()",
            *(f"backends.cudnn.{name}" for name in ("allow_tf32", "benchmark", "deterministic", "enabled")),
            *(f"backends.cudnn.{name}.fp32_precision" for name in ("conv", "rnn")),
            "backends.cudnn.depthwise_kernel",
            "backends.miopen.immediate",
        ]
    },
}
READ_BY_CODE = {"backends.mha.get_fastpath_enabled()", "backends.opt_einsum.enabled", "backends.opt_einsum.strategy"}
READ_ABOVE: dict[str, Callable[[], Any]] = {
    **{path: _read(f"torch.{path}") for path in READ_BY_CODE},
    # That of all operators of a backend, or of all backends, is no operator's own.
    **{name: _read(f"torch._C._get_fp32_precision_getter('{name}', 'all')") for name in ("generic", "mkldnn", "cuda")},
}


def found() -> dict[str, Any]:
    """Return what an operator finds. No precision of its own is the highest one."""
    found = {name: read() for name, read in READ.items()}
    return {
        name: "ieee" if name.endswith("fp32_precision") and value == "none" else value for name, value in found.items()
    }


def assert_same(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    differing = {name: (value, expected[name]) for name, value in settings.items() if value != expected[name]}
    wrong = {name: pair for name, pair in differing.items() if "refused" not in pair}
    assert not wrong, f"found, and expected: {wrong}"


seen: list[dict[str, Any]] = []
_library = torch.library.Library("settings_seen", "DEF")
_library.define("look(Tensor x) -> Tensor")
_library.define("fail(Tensor x, int[] calls) -> Tensor")


def _look(x: Tensor) -> Tensor:
    seen.append(found())
    return x.clone()


fails_from_call = [0]


def _fail(x: Tensor, calls: list[int]) -> Tensor:
    seen.append(found())
    if len(seen) > fails_from_call[0]:
        raise ValueError("this kernel fails")
    return x.clone()


_library.impl("look", _look, "CompositeExplicitAutograd")  # of any device
_library.impl("fail", _fail, "CompositeExplicitAutograd")
look = torch.ops.settings_seen.look


def everything() -> dict[str, Any]:
    return {name: read() for name, read in (READ | READ_ABOVE).items()}
