"""Audits of reruns: checksums of the tensors that a forward saves, compared with those that its rerun saves.

NOTE [ Audit of reruns ]

A rerun repeats its forward if its function is pure, but for what reruns restore: random state and buffers of modules.
This is checked on calls 1, 2, 4, 8, ... of a function, on every call with `configure(audit="always")`, and never with
`audit="off"` or `determinism_check="none"`.

Rule 1. In forward each saved tensor leaves a checksum and two sums. Its device computes them, and the forward does not
read them. A rerun computes them again. They are compared when backward reads the first tensor of that rerun.
Rule 2. A difference counts when backward reads the tensor. It only warns, once per function, if rounding explains it,
or with `preserve_rng_state=False`. Otherwise the function runs twice more, with deterministic operators and with
uninitialized memory filled, and once more without. If the two runs agree, but neither the first nor the last one agrees
with them, the function is pure, and its operators are not deterministic or read uninitialized memory: this warns too.
All else raises.
Rule 3. Not compared are parameters and views of them (reruns check their versions), tensor subclasses, tensors with
other strides, and what operators leave unwritten or write after autograd saved it (`_UNWRITTEN`).
Rule 4. Nothing is compared if the hooks around the region, or around a region that it is in, belong to others: they may
give other bytes back for its inputs.
Rule 5. Profiles and trials time reruns without audits (`without_audits`).
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._C import Paused
from actckpt._core import devices, messages, torch_private
from actckpt._core.checksums import are_close, checksum, sums, uncounted
from actckpt._core.functions import contents_of
from actckpt._core.hooks import is_ours
from actckpt._core.sites import module_name, warn_once
from actckpt._core.warning_texts import WarningText
from actckpt.errors import ActckptError, RerunMismatchError

__all__ = ["RerunAudit", "audit_of", "without_audits"]

#: Names of saved tensors that operators fill later, or not always.
_UNWRITTEN = frozenset(
    {
        *("noise", "dropout_state", "running_mean", "running_var"),
        *("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"),
    }
)
#: The same for results of some operators, by the start of the names of their nodes.
_UNWRITTEN_RESULTS = {
    "EmbeddingBag": {"result1", "result2", "result3"},
    "CudnnRnn": {"result3", "result4"},
    "MiopenRnn": {"result3", "result4"},
    "MkldnnRnnLayer": {"result3"},
    "CudnnBatchNorm": {"result3"},
    "ThnnFusedLstmCell": {"result2"},
    "CtcLoss": {"result1"},
}
_DIFFERENT = (
    "The rerun of {name} does not repeat its forward: saved tensor {index}{where}, which {node} reads (shape {shape}, "
    "{dtype}), has other values"
)
_ADVICE = (
    "The function must do the same in both runs, but for torch's random numbers and buffers of modules: no Python or "
    "NumPy randomness, no list, cache, attribute or generator of its own that a call changes. Pass a policy, such as "
    'policy="matmuls", whose regions run nothing again, or rng_trackers= for other random state. Where the difference '
    'does no harm, pass determinism_check="none", or call actckpt.configure(audit="off").'
)
_ROUNDED = WarningText(
    f"{_DIFFERENT}. The difference is as small as one of rounding.",
    "Operators that are not deterministic round differently: torch.use_deterministic_algorithms(True) finds them. A "
    'policy, such as policy="matmuls", keeps their results.',
    per="function",
)
_UNREPEATABLE = WarningText(
    f"{_DIFFERENT}. With deterministic operators and no uninitialized memory, it repeats itself.",
    "Gradients are wrong if the difference reaches them. torch.use_deterministic_algorithms(True) avoids it, and "
    'so does a policy, such as policy="matmuls", which keeps results.',
    per="function",
)
_OTHER_NUMBERS = WarningText(
    f"{_DIFFERENT}. With preserve_rng_state=False a rerun draws other random numbers than its forward.",
    "Gradients are wrong where the function draws any: leave out preserve_rng_state=False.",
    per="function",
)


_thread = threading.local()
#: Calls that audits may look at, by module or code.
_num_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
#: torch's switch for filling new memory.
_filling: Any = torch.utils.deterministic


def audit_of(function: Callable[..., Any], *, raises: bool) -> RerunAudit | Literal[False] | None:
    """Return the audit of a call of a function, None if it is not audited, False if none inside of it may be.

    Args:
        raises: whether a difference raises; false if the user chose that reruns draw other random numbers.
    """
    mode = config.settings().audit
    if mode == "off" or getattr(_thread, "is_off", False) or torch_private.is_tracing():
        return None
    if devices.is_capturing() or torch_private.innermost_transform() is not None:
        return None
    hooks = torch_private.outer_hooks()
    if hooks is not None and not _may_audit(hooks):
        return False
    number = _count(function)
    is_due = mode == "always" or number & (number - 1) == 0
    return RerunAudit(messages.name_of(function), raises=raises) if is_due else None


def _count(function: Callable[..., Any]) -> int:
    """Count a call of a function; return its number."""
    owner = _owner(function)
    number = _num_calls[owner] = _num_calls.get(owner, 0) + 1
    return number


def _owner(function: Callable[..., Any]) -> Any:
    """Return what tells a function from others: its module, or its code if it knows no module."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.FunctionType):
        known = [*map(contents_of, function.__closure__ or ()), *(function.__defaults__ or ())]
        return next((value for value in known if isinstance(value, torch.nn.Module)), function.__code__)
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return owner if isinstance(owner, torch.nn.Module) else type(owner)


def _may_audit(hooks: torch_private.Hooks) -> bool:
    owner = getattr(hooks[0], "__self__", None)
    frame = owner.frame if isinstance(owner, _C.Refill) else owner
    return frame.may_audit if isinstance(frame, _C.Frame) else is_ours(hooks)


@contextmanager
def without_audits() -> Iterator[None]:
    """Audit no call in this thread."""
    before = getattr(_thread, "is_off", False)
    _thread.is_off = True
    try:
        yield
    finally:
        _thread.is_off = before


class _Digest(NamedTuple):
    """What is compared of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    checksum: Tensor
    sums: Tensor | None


class RerunAudit:
    """Checksums of what one region saves (NOTE [ Audit of reruns ]). Its methods are called from C++."""

    __slots__ = ("_diagnosis", "_different", "_found", "_modules", "_name", "_raises", "_rerun")

    def __init__(self, name: str, *, raises: bool) -> None:
        #: Of the function, for messages.
        self._name = name
        self._raises = raises
        #: By index of the saved tensor: in forward, and in the last rerun.
        self._found: dict[int, _Digest] = {}
        self._rerun: dict[int, _Digest] = {}
        #: Indices of tensors that differ, and whether that is an error; None: not compared yet.
        self._different: dict[int, bool] | None = None
        #: How the current rerun runs, if it is one of those that explain a difference.
        self._diagnosis: Literal["deterministic", "usual"] | None = None
        #: Modules that saved the tensors.
        self._modules: dict[int, str | None] = {}

    def note(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the forward saves."""
        if (digest := _digest(tensor)) is not None:
            self._found[index] = digest

    def begin_rerun(self) -> None:
        """Forget what an earlier rerun saved."""
        self._rerun = {}
        if self._diagnosis is None:
            self._modules, self._different = {}, None
        elif self._diagnosis == "deterministic":  # here, since a rerun restores the settings of its forward first
            torch.use_deterministic_algorithms(True, warn_only=True)

    def note_again(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the rerun saves."""
        if index not in self._found or (digest := _digest(tensor)) is None:
            return
        self._rerun[index] = digest
        self._modules.setdefault(index, module_name())

    def check(self, index: int, slot: object) -> None:
        """Raise or warn if backward reads a tensor that the rerun did not repeat."""
        if self._different is None:
            self._different = self._compared()
        if index not in self._different:
            return
        node = torch_private.current_node()
        if node is None or _is_unwritten(node, slot):
            return
        found, module = self._found[index], self._modules.get(index)
        where = f" in {module}" if module else ""
        what = {"name": self._name, "index": index, "where": where, "node": node.name()}
        what |= {"shape": found.shape, "dtype": found.dtype}
        text = _ROUNDED if self._raises else _OTHER_NUMBERS
        if self._different[index] and self._raises:
            if not self._is_explained(index, slot):
                message = _DIFFERENT.format(**what)
                raise RerunMismatchError(f"{message}, so this backward has no right gradient.\n{_ADVICE}")
            text, self._different = _UNREPEATABLE, {}
        warn_once(text, self._name, **what)

    def _is_explained(self, index: int, slot: object) -> bool:
        """Whether the function is pure, but for operators that do not repeat their results (Rule 2)."""
        found = [self._rerun[index]]
        try:
            for self._diagnosis in ("deterministic", "deterministic", "usual"):
                with _deterministic() if self._diagnosis == "deterministic" else nullcontext():
                    _C.rerun_again(slot)
                found.append(self._rerun[index])
        except (ActckptError, KeyError):  # another run of the function saves other tensors
            return False
        finally:
            self._diagnosis = None
        first, one, other, last = found
        with Paused(), uncounted():
            repeats = torch.equal(one.checksum, other.checksum)
            return repeats and not _is_same(first, one) and not _is_same(last, one)

    def _compared(self) -> dict[int, bool]:
        """Return the indices of tensors that differ, and whether rounding does not explain it."""
        with Paused(), uncounted():
            pairs = {
                index: (self._found[index], again)
                for index, again in dict(self._rerun).items()
                if self._found[index].strides == again.strides and self._found[index].is_conj == again.is_conj
            }
            by_device: dict[torch.device, list[int]] = {}
            for index, (_, again) in pairs.items():
                by_device.setdefault(again.checksum.device, []).append(index)
            different: list[int] = []
            for indices in by_device.values():  # waits for each device once
                forward, rerun = (torch.stack([pairs[i][run].checksum for i in indices]) for run in (0, 1))
                different += [i for i, same in zip(indices, (forward == rerun).tolist(), strict=True) if not same]
            return {i: not _is_rounded(*pairs[i]) for i in different}


def _digest(tensor: Tensor) -> _Digest | None:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_meta or tensor.is_quantized:
        return None
    base = tensor._base if tensor._is_view() else tensor
    if base is None or (base.is_leaf and base.requires_grad) or torch_private.is_zero_tangent(tensor):
        return None
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return None
    has_sums = tensor.is_floating_point() or tensor.is_complex()
    with Paused(), suppress(torch.OutOfMemoryError, NotImplementedError):  # an audit must not fail the step
        return _Digest(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj() or tensor.is_neg(),
            checksum(tensor),
            sums(tensor) if has_sums else None,
        )
    return None


def _is_rounded(one: _Digest, other: _Digest) -> bool:
    return one.sums is not None and other.sums is not None and are_close(one.sums, other.sums, one.dtype)


def _is_same(one: _Digest, other: _Digest) -> bool:
    return torch.equal(one.checksum, other.checksum) or _is_rounded(one, other)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Run the body, which asks for deterministic operators, without warnings of those that are not."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = _filling.fill_uninitialized_memory
    _filling.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _filling.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _is_unwritten(node: Any, slot: object) -> bool:
    """Whether the tensor that a node reads is one that its operator leaves unwritten (Rule 3)."""
    kind = node.name()
    names = next((names for begin, names in _UNWRITTEN_RESULTS.items() if kind.startswith(begin)), set())
    saved = (getattr(node, f"_raw_saved_{name}", None) for name in _UNWRITTEN | names)
    return any(each is not None and each.data is slot for each in saved)
