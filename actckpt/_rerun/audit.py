"""Audits of reruns: checksums of the tensors that a forward saves, compared with those that its rerun saves.

NOTE [ Audit of reruns ]

A rerun repeats its forward if its function is pure, but for what reruns restore: random state and buffers of modules.
This is checked on calls 1, 2, 4, 8, ... of a function, on every call with `configure(audit="always")`, and never with
`audit="off"` or `determinism_check="none"`.

Rule 1. In forward each saved tensor leaves a checksum and two sums. Its device computes them, and the forward does not
read them. A rerun computes them again. They are compared when backward reads the first tensor of that rerun.
Rule 2. A difference counts when backward reads the tensor. It only warns, once per function, if rounding explains it,
or with `preserve_rng_state=False`. Otherwise the function runs four more times: twice with uninitialized memory filled,
once without filling, once with. If the filled runs agree with each other, and no other run agrees with them, the
function depends on uninitialized memory, and this warns, too. All other differences raise.
Rule 3. Not compared are parameters and views of them (reruns check their versions), tensor subclasses, tensors whose
strides differ and let elements share memory, and what operators leave unwritten or write after autograd saved it
(`_UNWRITTEN`).
Rule 4. Nothing is compared if the hooks around the region, or around a region that it is in, belong to others: they may
give other bytes back for its inputs.
Rule 5. Profiles time reruns without audits (`without_audits`). Trials do not: an audited cycle takes longer.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from actckpt import _C, config
from actckpt._C import Paused
from actckpt._core import devices, messages, torch_private
from actckpt._core.checksums import Result, are_close, checksum, sums, uncounted
from actckpt._core.functions import contents_of
from actckpt._core.hooks import is_ours
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.sites import module_name, warn_once
from actckpt._core.storages import tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt.errors import RerunMismatchError

__all__ = ["Digest", "Filling", "RerunAudit", "audit_of", "depends_on_memory", "is_auditing", "without_audits"]

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
    'policy="matmuls", whose regions run nothing again, or rng_trackers= for other random state. With apply, name an '
    "operator that gives other results each time in actckpt.configure(opaque=[...]). Where the difference does no "
    'harm, pass determinism_check="none", or call actckpt.configure(audit="off").'
)
_ROUNDED = WarningText(
    f"{_DIFFERENT}. The difference is as small as one of rounding.",
    "Operators that are not deterministic round differently: torch.use_deterministic_algorithms(True) finds them. A "
    'policy, such as policy="matmuls", keeps their results.',
    per="function",
)
_UNINITIALIZED = WarningText(
    f"{_DIFFERENT}. With uninitialized memory filled, it repeats itself.",
    "Gradients that depend on these values are wrong. Write every element of a tensor from torch.empty, or pass a "
    'policy, such as policy="matmuls", which keeps results.',
    per="function",
)
_OTHER_NUMBERS = WarningText(
    f"{_DIFFERENT}. With preserve_rng_state=False a rerun draws other random numbers than its forward.",
    "Gradients are wrong where the function draws any: leave out preserve_rng_state=False.",
    per="function",
)


_thread = threading.local()
#: Attribute of tensors that stand for a parameter in nested reruns (kParameterMark in csrc/rerun/held.h).
_OF_PARAMETER = "_actckpt_parameter"
_Key = tuple[Any, ...]


class _Calls:
    """The calls of a function: their number, and references to the objects that its key names by id()."""

    __slots__ = ("named", "number")

    def __init__(self, named: tuple[weakref.ref[Any], ...]) -> None:
        self.named = named
        self.number = 0


_known: dict[_Key, _Calls] = {}
#: Maximum nesting of closures that a key looks into, and maximum number of keys.
_DEPTH, _MOST_KEYS = 3, 4096
#: Integers below this, and strings shorter than this, are part of a key; larger ones may count steps.
_FEW = 64


def audit_of(function: Callable[..., Any], *, raises: bool) -> RerunAudit | Literal[False] | None:
    """Return the audit of a call of a function, None if it is not audited, False if none inside of it may be.

    Args:
        raises: whether a difference raises; false if the user chose that reruns draw other random numbers.
    """
    when = config.settings().audit
    if when == "off":
        return None
    hooks = torch_private.outer_hooks()
    if hooks is not None and not _may_audit(hooks):
        return False
    calls = _calls_of(function)
    is_due = when == "always" or calls.number & (calls.number + 1) == 0
    if is_due and not is_auditing():
        return None  # the next call is due
    calls.number += 1
    return RerunAudit(messages.name_of(function), raises=raises) if is_due else None


def is_auditing() -> bool:
    """Return whether calls of this thread may be audited now."""
    if config.settings().audit == "off" or getattr(_thread, "is_off", False):
        return False
    return not (torch_private.is_tracing() or devices.is_capturing() or torch_private.innermost_transform() is not None)


def _calls_of(function: Callable[..., Any]) -> _Calls:
    """Return the calls of a function, or of functions that look the same."""
    known = _known.get((id(function),))  # of a module
    if known is not None and known.named[0]() is function:
        return known
    named: list[Any] = []
    key = _key(function, named)
    known = _known.get(key)
    if known is None or any(one() is not other for one, other in zip(known.named, named, strict=True)):
        if len(_known) >= _MOST_KEYS:
            _known.clear()
        known = _known[key] = _Calls(tuple([weakref.ref(each, functools.partial(_forget, key)) for each in named]))
    return known


def _forget(key: _Key, reference: weakref.ref[Any]) -> None:
    known = _known.get(key)
    if known is not None and any(each is reference for each in known.named):
        del _known[key]


def _key(value: Any, named: list[Any], depth: int = _DEPTH) -> _Key:
    """Return what tells a function from others: itself, or its code with what its closure and defaults hold.

    Args:
        named: gets the objects that the key names by id().
        depth: of functions in closures.
    """
    kind = type(value)
    if (kind in (int, bool) and abs(value) < _FEW) or (kind is str and len(value) < _FEW):
        return (value,)
    if issubclass(kind, functools.partial):
        return _key(value.func, named, depth)
    if kind is types.MethodType:
        value, kind = value.__self__, type(value.__self__)
    if kind is types.FunctionType and depth > 0:
        named.append(value.__code__)
        parts = [*map(contents_of, value.__closure__ or ()), *(value.__defaults__ or ())]
        return (id(value.__code__), *[_key(part, named, depth - 1) for part in parts])
    if not issubclass(kind, torch.nn.Module) and depth < _DEPTH:
        return (kind.__name__,)  # of data, such as a tensor, there may be another one in each call
    try:
        weakref.ref(value)
    except TypeError:
        return (kind.__name__, getattr(value, "__name__", ""))
    named.append(value)
    return (id(value),)


def _may_audit(hooks: torch_private.Hooks) -> bool:
    owner = getattr(hooks[0], "__self__", None)
    frame = owner.frame if isinstance(owner, _C.RecomputedValues) else owner
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


class Digest(NamedTuple):
    """What is compared of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    checksum: Result
    sums: Result | None

    @classmethod
    def of(cls, tensor: Tensor, forward: Digest | None = None) -> Digest | None:
        """Return the digest of a tensor, laid out as in the forward where no elements share memory."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
        if not is_plain or tensor.is_meta or tensor.is_quantized:
            return None
        base = tensor._base if tensor._is_view() else tensor
        is_of_parameter = isinstance(base, torch.nn.Parameter) or hasattr(base, _OF_PARAMETER)
        if base is None or is_of_parameter or torch_private.is_zero_tangent(tensor):
            return None
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            return None
        has_sums = tensor.is_floating_point() or tensor.is_complex()
        with Paused(), suppress(torch.OutOfMemoryError, NotImplementedError):  # an audit must not fail the step
            if forward and forward.strides != tensor.stride() and _are_apart(forward.shape, forward.strides):
                with uncounted():
                    tensor = tensor.new_empty_strided(forward.shape, forward.strides).copy_(tensor)
            return cls(
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                tensor.is_conj() or tensor.is_neg(),
                Result(checksum(tensor)),
                Result(sums(tensor)) if has_sums else None,
            )
        return None

    def has_same_bits(self, other: Digest) -> bool:
        """Waits for the device, as the other comparisons do."""
        with Paused(), uncounted():
            return torch.equal(self.checksum.read(), other.checksum.read())

    def is_close(self, other: Digest) -> bool:
        """Whether rounding may explain a difference."""
        if self.sums is None or other.sums is None:
            return False
        with Paused(), uncounted():
            return are_close(self.sums.read(), other.sums.read(), self.dtype)

    def is_same(self, other: Digest) -> bool:
        """Whether the tensors are the same, but for rounding."""
        return self.has_same_bits(other) or self.is_close(other)


class RerunAudit:
    """Checksums of what one region saves (NOTE [ Audit of reruns ]). Its methods are called from C++."""

    __slots__ = ("_different", "_found", "_is_explaining", "_modules", "_name", "_raises", "_rerun")

    def __init__(self, name: str, *, raises: bool) -> None:
        #: Of the function, for messages.
        self._name = name
        self._raises = raises
        #: By index of the saved tensor: in forward, and in the last rerun.
        self._found: dict[int, Digest] = {}
        self._rerun: dict[int, Digest] = {}
        #: Warnings by index of tensors that differ; None for an error. None: not compared yet.
        self._different: dict[int, WarningText | None] | None = None
        #: Whether the current rerun is one of those that explain a difference.
        self._is_explaining = False
        #: Modules that saved the tensors.
        self._modules: dict[int, str | None] = {}

    def note(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the forward saves."""
        if (digest := Digest.of(tensor)) is not None:
            self._found[index] = digest

    def begin_rerun(self) -> None:
        """Forget what an earlier rerun saved."""
        self._rerun = {}
        if not self._is_explaining:
            self._modules, self._different = {}, None

    def note_again(self, index: int, tensor: Tensor) -> None:
        """Record a tensor that the rerun saves."""
        if index not in self._found or (digest := Digest.of(tensor, self._found[index])) is None:
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
        text = self._different[index]
        if text is None:
            text = self._explain(slot)[index]
        if text is None:
            message = _DIFFERENT.format(**what)
            raise RerunMismatchError(f"{message}, so this backward has no right gradient.\n{_ADVICE}")
        warn_once(text, self._name, **what)

    def _explain(self, slot: object) -> dict[int, WarningText | None]:
        """Find which differences come from uninitialized memory (Rule 2); return the warnings by index."""
        assert self._different is not None
        first, found = self._rerun, []
        self._is_explaining = True
        try:
            for is_filled in (True, True, False, True):
                with Filling() if is_filled else nullcontext():  # type: ignore[no-untyped-call]
                    _C.rerun_again(slot)
                found.append(self._rerun)
        except Exception:
            return self._different
        finally:
            self._rerun, self._is_explaining = first, False
        filled, unfilled = (found[0], found[1], found[3]), (first, found[2])
        for index, text in self._different.items():
            runs = [run.get(index) for run in (*filled, *unfilled)]
            digests = [each for each in runs if each is not None]
            if text is None and len(digests) == len(runs) and depends_on_memory(*digests):
                self._different[index] = _UNINITIALIZED
        return self._different

    def _compared(self) -> dict[int, WarningText | None]:
        """Return the tensors that differ, with a warning where rounding explains it."""
        pairs = {
            index: (self._found[index], again)
            for index, again in dict(self._rerun).items()
            if self._found[index].strides == again.strides and self._found[index].is_conj == again.is_conj
        }
        different = [index for index, pair in pairs.items() if not pair[0].has_same_bits(pair[1])]
        if not self._raises:
            return dict.fromkeys(different, _OTHER_NUMBERS)
        return {i: _ROUNDED if pairs[i][0].is_close(pairs[i][1]) else None for i in different}


class Filling(ObservingMode):
    """Fills uninitialized memory that operators of this thread return, also inside of custom operators."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        if tensors and not types and torch_private.is_custom(func):
            with self:
                return torch_private.call_kernel(func, tensors, args, kwargs)
        result = func(*args, **kwargs)
        if getattr(func, "overloadpacket", None) in _EMPTY and result.numel():
            result.fill_(3 if result.is_floating_point() else 0)  # numbers that do no harm as indices, either
        return result


_ATEN = torch.ops.aten
_EMPTY = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}


def depends_on_memory(one: Digest, other: Digest, third: Digest, *unfilled: Digest) -> bool:
    """Whether runs with filled memory agree, and runs without do not agree with them."""
    are_same = one.has_same_bits(other) and one.has_same_bits(third)
    return are_same and not any(one.is_same(each) for each in unfilled)


def _are_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no elements share memory."""
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def _is_unwritten(node: Any, slot: object) -> bool:
    """Whether the tensor that a node reads is one that its operator leaves unwritten (Rule 3)."""
    kind = node.name()
    names = next((names for begin, names in _UNWRITTEN_RESULTS.items() if kind.startswith(begin)), set())
    saved = (getattr(node, f"_raw_saved_{name}", None) for name in _UNWRITTEN | names)
    return any(each is not None and each.data is slot for each in saved)
