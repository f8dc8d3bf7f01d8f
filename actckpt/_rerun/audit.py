"""The audit of reruns: what a rerun brings back is compared with what its forward saved.

NOTE [ Audit of reruns ]

A rerun is right if its function is pure, but for random numbers and for buffers of modules. That is checked on calls 1,
2, 4, 8, ... of a call site (`configure(audit=)`), not with `determinism_check="none"`.

Rule 1. In forward each saved tensor leaves a checksum and two sums, computed on its device and not read. A rerun
        computes them again, and they are compared once it ends.
Rule 2. A difference counts where backward asks for that tensor: it raises, or warns if rounding explains it.
Rule 3. Bytes that nobody wrote differ from run to run. Kernels leave such bytes in some results (`_NOT_WRITTEN`). A
        function may do so too (`torch.empty`): before an error, it runs three times with new memory filled, twice with
        the same number and then with another one. A tensor that only the number changes is not compared.
Rule 4. Where hooks around the region give other bytes back for its inputs, nothing is compared.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._C import Paused, storage_of
from actckpt._core import devices, messages, torch_private
from actckpt._core.checksums import are_close, checksum, sums
from actckpt._core.sites import module_name, user_line, warn_user
from actckpt._core.subclasses import plain_parts
from actckpt.errors import RerunMismatchError

__all__ = ["Audit", "begin", "is_due"]

#: What nodes call saved tensors that their operators fill after autograd has saved them, or in part.
_NOT_WRITTEN = frozenset(
    {
        *("noise", "dropout_state"),
        *("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask"),
    }
)
#: The same of results of some operators, by how the names of their nodes begin.
_NOT_WRITTEN_RESULTS = {
    "EmbeddingBag": {"result1", "result2", "result3"},
    "CudnnRnn": {"result3", "result4"},
    "MiopenRnn": {"result3", "result4"},
    "MkldnnRnnLayer": {"result3"},
    "CudnnBatchNorm": {"result3"},
    "ThnnFusedLstmCell": {"result2"},
    "CtcLoss": {"result1"},
}
#: Numbers that fill new memory while a function runs again (Rule 3).
_FILLS = (3, 3, 0)


def is_due(num_calls: int) -> bool:
    """Return whether this call of a call site is audited, if not all are."""
    return num_calls & (num_calls - 1) == 0


def begin(function: Callable[..., Any]) -> "Audit | None":
    """Return an audit of a region that is about to run a function, None where bytes cannot be read."""
    if torch_private.is_tracing() or devices.is_capturing() or torch_private.innermost_transform() is not None:
        return None
    return Audit(messages.name_of(function))


class _Digest(NamedTuple):
    """What is left of a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: Tensor
    sums: Tensor | None


#: Of the plain tensors that a saved tensor is made of.
_Digests = list[_Digest]


class Audit:
    """Checksums of what one region saves. See NOTE [ Audit of reruns ]."""

    __slots__ = ("_close", "_found", "_inputs", "_name", "_places", "_runs", "_wrong")

    def __init__(self, name: str) -> None:
        #: Of the function, for error messages.
        self._name = name
        #: By index of the saved tensor, in forward.
        self._found: dict[int, _Digests] = {}
        #: The same, of each run since backward asked for a tensor.
        self._runs: list[dict[int, _Digests]] = []
        #: Where a rerun saves the tensors: module and line.
        self._places: dict[int, str] = {}
        #: Indices of tensors that came back with other values, and that rounding explains.
        self._wrong: set[int] = set()
        self._close: set[int] = set()
        #: Checksums of the inputs that went through hooks around the region.
        self._inputs: list[Tensor] = []

    def note(self, index: int, tensor: Tensor) -> None:
        """Note a tensor that the forward saves; called by the extension."""
        digests = _digests(tensor)
        if digests is not None:
            self._found[index] = digests

    def note_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Note the inputs that hooks around the region are given."""
        self._inputs = _checksums(tensors)

    def compare_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Stop the audit where hooks gave other inputs back (Rule 4)."""
        if self._inputs and not {int(e) for e in self._inputs} <= {int(e) for e in _checksums(tensors)}:
            self._found.clear()

    def begin_rerun(self) -> None:
        """Forget what the rerun before found."""
        self._runs.clear()
        self._wrong.clear()
        self._close.clear()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to run in the place of `function`."""
        number = len(self._runs)
        self._runs.append({})
        return function if number == 0 else partial(_call_filling, _FILLS[number - 1], function)

    def note_again(self, index: int, tensor: Tensor) -> None:
        """Note a tensor that a rerun saves; called by the extension."""
        if index not in self._found:
            return
        again = _digests(tensor)
        if again is not None:
            self._runs[-1][index] = again
        if len(self._runs) > 1:
            module = module_name()
            self._places[index] = f" in {module}, {user_line()}" if module else f" at {user_line()}"

    def wants_another_run(self) -> bool:
        """Compare what the rerun made with what the forward saved; return whether to run it again (Rule 3)."""
        if len(self._runs) == 1:
            with Paused():
                different = _different(self._found, self._runs[0])
                self._close = {i for i in different if _is_rounded(self._found[i], self._runs[0][i])}
            self._wrong = different - self._close
        if not self._wrong:
            self._runs.clear()
            return False
        if len(self._runs) <= len(_FILLS):
            return True
        _, first, second, third = self._runs
        with Paused():
            self._wrong -= _different(first, third) - _different(first, second)
        self._runs.clear()
        return False

    def check(self, index: int, slot: object) -> None:
        """Raise where backward asks for a tensor that came back with other values (Rule 2); called by the extension."""
        if index not in self._wrong and index not in self._close:
            return
        node = torch_private.current_node()
        if node is None or _is_not_written(node, slot):
            return
        if index in self._wrong:
            raise RerunMismatchError(self._error(min(self._wrong), node))
        warn_user(
            f"{self._words(index, node)} by rounding: an operator is not deterministic. "
            "torch.use_deterministic_algorithms(True) finds such operators, and a policy, such as "
            'policy="matmuls", keeps what they make. Silence this with configure(audit="off").'
        )
        self._close.clear()

    def _words(self, index: int, node: Any) -> str:
        shape, dtype, *_ = self._found[index][0]
        return (
            f"The rerun of {self._name} does not repeat its forward: saved tensor {index} (shape {shape}, {dtype}), "
            f"saved{self._places.get(index, '')}, for {node.name()}, has other values"
        )

    def _error(self, index: int, node: Any) -> str:
        return (
            f"{self._words(index, node)}, so this backward has no right gradient.\n"
            "The function must do the same each time that it runs, but for random numbers and for buffers of modules. "
            "It does not if it changes what it reads: a list, dict or key-value cache that it fills, an attribute, a "
            "global variable, a generator that an object holds.\n"
            'Pass a policy, such as policy="matmuls", or use region: these run no Python twice. Pass rng_trackers= for '
            "random state that is not torch's, and preserve_rng_state=True. Where the difference does no harm: "
            'configure(audit="off").'
        )


def _digests(tensor: Tensor) -> _Digests | None:
    with Paused(), suppress(torch.OutOfMemoryError, NotImplementedError):  # an audit fails nothing: it is left out here
        torch_private.wait_for_collective(tensor)
        return [
            _Digest(tuple(part.shape), part.dtype, checksum(part), sums(part))
            for part in plain_parts(tensor)
            if _has_bytes(part)
        ]
    return None


def _checksums(tensors: Iterable[Tensor]) -> list[Tensor]:
    with Paused():
        return [checksum(part) for tensor in tensors for part in plain_parts(tensor) if _has_bytes(part)]


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a checksum of a tensor says anything."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested or torch_private.is_zero_tangent(tensor):
        return False
    storage = storage_of(tensor)
    return storage is not None and (storage.nbytes() > 0 or tensor.numel() == 0)


def _different(one: dict[int, _Digests], other: dict[int, _Digests]) -> set[int]:
    """Return the indices at which two runs saved other values. Waits for each device once."""
    different: set[int] = set()
    pairs: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
    for index in one.keys() & other.keys():
        first, second = one[index], other[index]
        if len(first) != len(second):
            different.add(index)
        for a, b in zip(first, second, strict=False):
            pairs.setdefault(a.checksum.device, []).append((index, a.checksum, b.checksum))
    for found in pairs.values():
        is_same = torch.stack([a for _, a, _ in found]) == torch.stack([b for *_, b in found])
        different.update(index for (index, *_), same in zip(found, is_same.tolist(), strict=True) if not same)
    return different


def _is_rounded(one: _Digests, other: _Digests) -> bool:
    """Whether rounding explains how two runs differ."""
    return len(one) == len(other) and all(
        torch.equal(a.checksum, b.checksum)
        or (a.sums is not None and b.sums is not None and are_close(a.sums, b.sums, a.dtype))
        for a, b in zip(one, other, strict=True)
    )


def _is_not_written(node: Any, slot: object) -> bool:
    """Whether a tensor that a node saved holds bytes that its operator does not write, or writes later (Rule 3)."""
    kind = node.name()
    results = next((names for begin, names in _NOT_WRITTEN_RESULTS.items() if kind.startswith(begin)), set())
    for name in _NOT_WRITTEN | results:
        saved = getattr(node, f"_raw_saved_{name}", None)
        if saved is not None and saved.data is slot:
            return True
    return False


def _call_filling(number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Filling(number):
        return function(*args, **kwargs)


class _Filling(TorchDispatchMode):
    """Fills the memory that a function asks for and that nobody writes."""

    supports_higher_order_operators = True

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in _EMPTY:
            with torch.no_grad():
                torch.ops.aten.fill_.Scalar(result, self._number)
        return result


_EMPTY = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
