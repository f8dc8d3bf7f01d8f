"""Every public setter of torch that may change numbers: whether its setting is restored, and if not, why not."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.backends

backends = torch.backends


# What torch offers. A new torch must not add a setter without this file noticing.


def _modules() -> Iterator[tuple[str, Any]]:
    yield "torch.backends", torch.backends
    for info in pkgutil.walk_packages(torch.backends.__path__, "torch.backends."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            yield info.name, _imported(info.name)


def _imported(name: str) -> Any:
    module = importlib.import_module(name)
    owner, _, last = name.rpartition(".")
    if hasattr(type(sys.modules[owner]), last):  # torch 2.9: a setting, which the module of the same name now hides
        vars(sys.modules[owner]).pop(last, None)
    return module


def _has_own_setter(kind: type) -> bool:
    return inspect.isfunction(kind.__setattr__)


def _names_it_sets(item: Any) -> set[str]:
    """Return the names that a `__setattr__` compares with."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(item).__setattr__)))
    compares = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    constants = [node for compare in compares for node in ast.walk(compare) if isinstance(node, ast.Constant)]
    return {node.value for node in constants if isinstance(node.value, str)} - {"backend", "op"}


def _public_names(path: str, module: Any) -> Iterator[str]:
    """Yield functions, context managers and attributes that can be set."""
    if type(module) is not types.ModuleType:
        for name in dir(type(module)):
            found = inspect.getattr_static(type(module), name)
            if name.startswith("_"):
                continue
            if hasattr(type(found), "__set__") or inspect.isfunction(found):
                yield f"{path}.{name}"
            elif _has_own_setter(type(found)):
                yield from (f"{path}.{name}.{inner}" for inner in _names_it_sets(found))
    inner_module = getattr(module, "m", module)
    for name, found in vars(inner_module).items():
        if name.startswith("_") or isinstance(found, types.ModuleType):
            continue
        is_own = getattr(found, "__module__", None) == inner_module.__name__
        if inspect.isclass(found):
            if is_own and hasattr(found, "__enter__"):
                yield f"{path}.{name}"
        elif _has_own_setter(type(found)):
            yield from (f"{path}.{name}.{inner}" for inner in _names_it_sets(found))
            if not _names_it_sets(found):
                yield f"{path}.{name}"
        elif (is_own and callable(found)) or (name.islower() and isinstance(found, (bool, int, str, type(None)))):
            yield f"{path}.{name}"


#: Names of functions that read settings and set none.
_TELLS = re.compile(
    r".*\.(is|can_use|get|all|available)_\w+|.*backends\.\w+\.version|.*_(sdp_enabled|sdp_allowed)"
    r"|torch\.backends\.(flags_frozen|quantized\.supported_engines|xnnpack\.enabled)"
)


def all_public_names() -> set[str]:
    """Return the names of all that may set something."""
    found = {f"torch.{name}" for name in dir(torch) if name.startswith(("set_", "use_"))}
    for path, module in _modules():
        found.update(_public_names(path, module))
    return {name for name in found if not _TELLS.fullmatch(name)}


# How they are classed.

_NOT_NUMBERS = "changes no numbers"
_NOT_OPERATORS = "what operators compute does not depend on it: "
#: Name -> why it needs no restoring.
IRRELEVANT: dict[str, str] = {
    "torch.set_vital": "notes a text for statistics; not in newer versions",
    **dict.fromkeys(
        [
            "torch.set_anomaly_enabled",
            "torch.set_printoptions",
            "torch.set_warn_always",
            "torch.backends.disable_global_flags",
            "torch.backends.mkl.verbose",
            "torch.backends.mkldnn.verbose",
            "torch.backends.xeon.run_cpu.create_args",
            "torch.backends.xeon.run_cpu.format_str",
            "torch.backends.xeon.run_cpu.main",
        ],
        _NOT_NUMBERS,
    ),
    **dict.fromkeys(
        [f"torch.set_autocast_{name}" for name in ("cache_enabled", "dtype", "enabled")]
        + [f"torch.set_autocast_{kind}_{name}" for kind in ("cpu", "ipu", "xla") for name in ("dtype", "enabled")]
        + ["torch.set_autocast_gpu_dtype"],
        "autocast is restored for reruns; replay runs below it (test_semantics.py)",
    ),
    "torch.set_grad_enabled": "reruns and replay set grad mode themselves",
    "torch.set_rng_state": "random state is captured apart (test_random_state.py)",
    "torch.set_default_device": "a function mode: restored for reruns; recorded operators name their device",
    "torch.set_num_interop_threads": _NOT_OPERATORS + "of TorchScript's tasks, and set once per process",
    "torch.backends.cudnn.rnn.init_dropout_state": "makes a state for a caller",
    "torch.backends.cudnn.benchmark_limit": "how many algorithms are timed: what was found is remembered for replay",
    **dict.fromkeys(
        [f"torch.backends.cuda.{name}_workspace_size" for name in ("blas", "cublas", "cublaslt")],
        "takes effect on handles made later: what is in use cannot be put back",
    ),
    "torch.backends.cuda.cufft_plan_cache": _NOT_OPERATORS + "how many plans are cached",
    "torch.backends.mkldnn.allow_tf32": _NOT_OPERATORS + "of XPUs alone; the same as fp32_precision there",
    **dict.fromkeys(
        [
            f"torch.backends.python_native.{name}"
            for name in (
                *("disable_dispatch_keys", "disable_operations", "enable_dispatch_keys", "enable_operations"),
                "operations_disabled",
            )
        ],
        "registers other kernels for the whole process, as torch.library does",
    ),
    "torch.backends.cuda.sdp_kernel": "deprecated: sets the flags below",
}


def assign(path: str, value: Any) -> Callable[[], None]:
    """Return a function that assigns to a name of torch."""
    owner, _, name = path.rpartition(".")

    def assign() -> None:
        setattr(eval(owner, {"torch": torch}), name, value)

    return assign


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
    return lambda: function(*args, **kwargs)


#: Contexts that were entered; one that nobody holds leaves at once.
entered = contextlib.ExitStack()


def enter(context: Callable[..., Any], **kwargs: Any) -> Callable[[], None]:
    """Return a function that enters a context, which `entered.close()` leaves."""
    return lambda: entered.enter_context(context(**kwargs))


#: Whether cuBLAS may reduce in bfloat16, and with split-k; before torch 2.11 there is the first one only.
_NO_REDUCTION: Any = (
    (False, False) if isinstance(torch._C._get_cublas_allow_bf16_reduced_precision_reduction(), tuple) else False
)

Pair = tuple[Callable[[], None], Callable[[], None]]
#: Names of torch that are assigned: for the forward, and for the backward.
_ASSIGNED: list[tuple[str, Any, Any]] = [
    ("utils.deterministic.fill_uninitialized_memory", False, True),
    ("backends.fp32_precision", "tf32", "ieee"),
    ("backends.mkldnn.enabled", False, True),
    ("backends.mkldnn.deterministic", True, False),
    ("backends.mkldnn.fp32_precision", "bf16", "ieee"),
    *((f"backends.mkldnn.{name}.fp32_precision", "bf16", "ieee") for name in ("matmul", "conv", "rnn")),
    ("backends.quantized.engine", backends.quantized.supported_engines[0], backends.quantized.supported_engines[-1]),
    ("backends.cuda.matmul.allow_fp16_accumulation", True, False),
    ("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", False, True),
    ("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", _NO_REDUCTION, True),
    ("backends.cuda.matmul.allow_tf32", True, False),
    ("backends.cuda.matmul.fp32_precision", "tf32", "ieee"),
    ("backends.cudnn.allow_tf32", False, True),
    ("backends.cudnn.benchmark", True, False),
    ("backends.cudnn.deterministic", True, False),
    ("backends.cudnn.enabled", False, True),
    ("backends.cudnn.fp32_precision", "tf32", "ieee"),
    ("backends.cudnn.depthwise_kernel", "cudnn", "native"),
    ("backends.cudnn.conv.fp32_precision", "ieee", "tf32"),
    ("backends.cudnn.rnn.fp32_precision", "ieee", "tf32"),
    ("backends.miopen.immediate", True, False),
]
#: The same of functions that are called.
_CALLED: list[tuple[str, Any, Any]] = [
    ("set_default_dtype", torch.bfloat16, torch.float16),
    ("set_default_tensor_type", torch.DoubleTensor, torch.FloatTensor),
    ("set_flush_denormal", True, False),
    ("set_num_threads", 2, 1),
    ("set_deterministic_debug_mode", "error", "warn"),
    ("set_float32_matmul_precision", "medium", "high"),
    ("backends.nnpack.set_flags", False, True),
    *((f"backends.cuda.enable_{name}_sdp", False, True) for name in ("cudnn", "flash", "math", "mem_efficient")),
    ("backends.cuda.allow_fp16_bf16_reduction_math_sdp", True, False),
    ("backends.cuda.preferred_blas_library", "ck", "default"),
    ("backends.cuda.preferred_rocm_fa_library", "ck", "aotriton"),
    ("backends.miopen.set_flags", True, False),
]
_ATTENTION = torch.nn.attention.SDPBackend
#: Name -> what sets it for the forward, and what for the backward.
RESTORED: dict[str, Pair] = {
    **{f"torch.{name}": (assign(f"torch.{name}", a), assign(f"torch.{name}", b)) for name, a, b in _ASSIGNED},
    **{f"torch.{name}": (call(attrgetter(name)(torch), a), call(attrgetter(name)(torch), b)) for name, a, b in _CALLED},
    "torch.use_deterministic_algorithms": (
        call(torch.use_deterministic_algorithms, True, warn_only=True),
        call(torch.use_deterministic_algorithms, False),
    ),
    "torch.backends.set_flags": (lambda: None, call(backends.m.set_flags, "bf16")),
    "torch.backends.flags": (lambda: None, enter(backends.m.flags, fp32_precision="tf32")),
    "torch.backends.mkldnn.set_flags": (
        call(backends.mkldnn.set_flags, False, True),
        call(backends.mkldnn.set_flags, True, False),
    ),
    "torch.backends.mkldnn.flags": (lambda: None, enter(backends.mkldnn.flags, enabled=False, fp32_precision="bf16")),
    "torch.backends.nnpack.flags": (lambda: None, enter(backends.nnpack.flags, enabled=False)),
    "torch.nn.attention.sdpa_kernel": (
        enter(torch.nn.attention.sdpa_kernel, backends=[_ATTENTION.MATH]),
        enter(
            torch.nn.attention.sdpa_kernel,
            backends=[_ATTENTION.EFFICIENT_ATTENTION, _ATTENTION.MATH],
            set_priority=True,
        ),
    ),
    "torch.backends.cuda.preferred_linalg_library": (lambda: None, lambda: None),
    "torch.backends.cudnn.set_flags": (lambda: None, call(backends.cudnn.set_flags, False, True)),
    "torch.backends.cudnn.flags": (enter(backends.cudnn.flags, enabled=False), entered.close),
    "torch.backends.miopen.flags": (lambda: None, enter(backends.miopen.flags, immediate=True)),
}

#: What a CPU refuses to set to anything else.
CANNOT_CHANGE = {"torch.backends.cuda.preferred_linalg_library"}

EINSUM = vars(backends.opt_einsum.m)
#: The same for what reruns find, and what recorded operators do not depend on: Python code that chooses among them.
RESTORED_FOR_RERUNS: dict[str, Pair] = {
    "torch.backends.mha.set_fastpath_enabled": (
        call(backends.mha.set_fastpath_enabled, False),
        call(backends.mha.set_fastpath_enabled, True),
    ),
    # As its own functions do; they refuse where the package is not installed.
    "torch.backends.opt_einsum.flags": (
        call(EINSUM.update, enabled=True, strategy="greedy"),
        call(EINSUM.update, enabled=False, strategy=None),
    ),
    "torch.backends.opt_einsum.set_flags": (lambda: None, call(EINSUM.update, enabled=True, strategy="optimal")),
    "torch.backends.opt_einsum.enabled": (call(EINSUM.update, enabled=True), call(EINSUM.update, enabled=False)),
    "torch.backends.opt_einsum.strategy": (
        call(EINSUM.update, strategy="greedy"),
        call(EINSUM.update, strategy="optimal"),
    ),
}
