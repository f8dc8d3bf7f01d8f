"""Audits of reruns: checksums of the tensors that a forward saves, compared with those that its rerun saves.

NOTE [ Audit of reruns ]

A rerun repeats its forward if its function is pure, but for what reruns restore: random state, buffers of modules, and
the Python objects of NOTE [ Object state ]. With `configure(audit="always")` this is checked, unless
`determinism_check="none"`.

Rule 1. In forward each saved tensor leaves a checksum and two sums. Its device computes them, and the forward does not
read them. A rerun computes them again. They are compared when backward reads the first tensor of that rerun.
Rule 2. A difference counts when backward reads the tensor, and raises. It only warns, once per function, if rounding
explains it, or with `preserve_rng_state=False`. Uninitialized memory differs, too: audits are for finding out
whether a function repeats itself, and so are off by default.
Rule 3. Not compared are parameters and views of them (reruns check their versions), tensor subclasses, tensors with
other strides, and what operators leave unwritten or write after autograd saved it (`_UNWRITTEN`).
Rule 4. Nothing is compared if the hooks around the region belong to others: they may give other bytes back for its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt import config
from actckpt._C import Paused
from actckpt._core import devices, messages, torch_private
from actckpt._core.checksums import are_close, checksum, sums
from actckpt._core.hooks import is_ours
from actckpt._core.sites import module_name, warn_once
from actckpt._core.warning_texts import WarningText
from actckpt.errors import RerunMismatchError

__all__ = ["RerunAudit", "audit_of"]

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
    "NumPy randomness, no state outside of torch that a call changes, no operator that is not deterministic, no "
    'uninitialized memory (torch.empty). Pass a policy, such as policy="matmuls", whose regions run nothing again, or '
    "rng_trackers= for other random state. Where the difference does no harm, leave out "
    'actckpt.configure(audit="always").'
)
_ROUNDED = WarningText(
    f"{_DIFFERENT}. The difference is as small as one of rounding.",
    "Operators that are not deterministic round differently: torch.use_deterministic_algorithms(True) finds them. A "
    'policy, such as policy="matmuls", keeps their results.',
    per="function",
)
_OTHER_NUMBERS = WarningText(
    f"{_DIFFERENT}. With preserve_rng_state=False a rerun draws other random numbers than its forward.",
    "Gradients are wrong where the function draws any: leave out preserve_rng_state=False.",
    per="function",
)


def audit_of(function: Callable[..., Any], *, raises: bool) -> RerunAudit | None:
    """Return the audit of a call of a function, None if it is not audited.

    Args:
        raises: whether a difference raises; false if the user chose that reruns draw other random numbers.
    """
    if config.settings().audit != "always":
        return None
    if torch_private.is_tracing() or devices.is_capturing() or torch_private.innermost_transform() is not None:
        return None
    hooks = torch_private.outer_hooks()
    return None if hooks is not None and not is_ours(hooks) else RerunAudit(messages.name_of(function), raises=raises)


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

    __slots__ = ("_different", "_found", "_modules", "_name", "_raises", "_rerun")

    def __init__(self, name: str, *, raises: bool) -> None:
        #: Of the function, for messages.
        self._name = name
        self._raises = raises
        #: By index of the saved tensor: in forward, and in the last rerun.
        self._found: dict[int, _Digest] = {}
        self._rerun: dict[int, _Digest] = {}
        #: Indices of tensors that differ, and whether that is an error; None: not compared yet.
        self._different: dict[int, bool] | None = None
        #: Modules that saved the tensors.
        self._modules: dict[int, str | None] = {}

    def note(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the forward saves."""
        if (digest := _digest(tensor)) is not None:
            self._found[index] = digest

    def begin_rerun(self) -> None:
        """Forget what an earlier rerun saved."""
        self._rerun, self._modules, self._different = {}, {}, None

    def note_again(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the rerun saves."""
        if index not in self._found or (digest := _digest(tensor)) is None:
            return
        self._rerun[index], self._modules[index] = digest, module_name()

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
        if self._different[index] and self._raises:
            text = _DIFFERENT.format(**what)
            raise RerunMismatchError(f"{text}, so this backward has no right gradient.\n{_ADVICE}")
        warn_once(_ROUNDED if self._raises else _OTHER_NUMBERS, self._name, **what)

    def _compared(self) -> dict[int, bool]:
        """Return the indices of tensors that differ, and whether rounding does not explain it."""
        with Paused():
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


def _is_unwritten(node: Any, slot: object) -> bool:
    """Whether the tensor that a node reads is one that its operator leaves unwritten (Rule 3)."""
    kind = node.name()
    names = next((names for begin, names in _UNWRITTEN_RESULTS.items() if kind.startswith(begin)), set())
    saved = (getattr(node, f"_raw_saved_{name}", None) for name in _UNWRITTEN | names)
    return any(each is not None and each.data is slot for each in saved)
