"""Names of operators: those that the installed torch has, suggestions for unknown ones, and pickling by name, since
operators cannot be pickled.
"""

import difflib
import functools
from collections.abc import Iterator, Set as AbstractSet
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket

from actckpt._text.selectors import matches

__all__ = ["RUNS_AS", "Operator", "Operators", "exists", "is_composite", "known", "named", "nearest", "portable"]

#: An overload (`torch.ops.aten.mul.Tensor`), a higher-order operator, all overloads of an operator
#: (`torch.ops.aten.mul`), or the name of any of these.
Operator = OperatorBase | OpOverloadPacket[..., Any] | str


class _OperatorSequence(Protocol):
    """A list or tuple of operators. To type checkers a str is none, since its `in` takes only str; nor is a dict, which
    has no `count`.
    """

    def __contains__(self, value: object, /) -> bool: ...
    def __iter__(self) -> Iterator[Operator]: ...
    def __getitem__(self, index: int, /) -> Operator: ...
    @property
    def count(self) -> object: ...


Operators = _OperatorSequence | AbstractSet[Operator]

#: What torch runs on the CPU instead of operators that programs call; devices have their own attention kernels.
RUNS_AS = {
    "aten.linear": "aten.addmm, without a bias aten.mm",
    "aten.matmul": "aten.mm, aten.bmm, aten.mv or aten.dot",
    "aten.einsum": "aten.bmm",
    "aten.conv1d": "aten.convolution",
    "aten.conv2d": "aten.convolution",
    "aten.conv3d": "aten.convolution",
    "aten.layer_norm": "aten.native_layer_norm",
    "aten.group_norm": "aten.native_group_norm",
    "aten.batch_norm": "aten.native_batch_norm, on GPUs aten.cudnn_batch_norm",
    "aten.softmax": "aten._softmax",
    "aten.log_softmax": "aten._log_softmax",
    "aten.dropout": "aten.native_dropout, or aten.bernoulli_ and aten.mul",
    "aten.cross_entropy_loss": "aten._log_softmax and aten.nll_loss_forward",
    "aten.scaled_dot_product_attention": "aten._scaled_dot_product_flash_attention_for_cpu, and the like of devices",
}


def known() -> set[str]:
    """Return the names of all operators, with and without their overload: `aten.mul.Tensor`, `aten.mul`.

    torch has no public list.
    """
    names = {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    full = {name if name.count(".") > 1 else f"{name}.default" for name in names}
    return full | {name.rpartition(".")[0] for name in full}


#: Patterns that matched: listing all operators takes milliseconds, and a plan names the same ones in each block.
_found: set[str] = set()


def exists(pattern: str) -> bool:
    """Whether an operator has this name, which may have wildcards."""
    if pattern not in _found:
        names = known()
        if pattern in names or any(matches(pattern, name) for name in names):
            _found.add(pattern)
    return pattern in _found


def is_composite(op: Any) -> bool:
    """Whether torch decomposes an operator before a recorder sees it."""
    if not isinstance(op, OpOverload):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def nearest(name: str) -> str:
    """Return the most similar names, for a message."""
    return ", ".join(difflib.get_close_matches(name, known(), n=3)) or "none"


def named(name: str) -> Any:
    """Return the overload (`aten.mul.Tensor`), packet (`aten.mul`) or higher-order operator with a name.

    Raises:
        ValueError: there is none; suggests similar ones.
    """
    namespace, _, rest = name.replace("::", ".").removeprefix("torch.ops.").partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
    if packet is None:
        near = nearest(f"{namespace}.{base}" if base else f"aten.{namespace}")
        raise ValueError(f"There is no operator {name!r}. Nearest: {near}.")
    if not overload:
        return packet
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    if overload not in overloads:
        raise ValueError(f"{namespace}.{base} has no overload {overload!r}; it has {', '.join(overloads) or 'none'}.")
    return getattr(packet, overload)


class _ByName:
    """Stands for an operator in a pickle or copy, and is restored as the operator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self._name,)


def portable(value: Any) -> Any:
    """Return `value` with operators inside, and in containers and `partial` functions, in a picklable form."""
    if isinstance(value, (OpOverload, OpOverloadPacket)):
        return _ByName(str(value))
    if isinstance(value, HigherOrderOperator):
        return _ByName(f"higher_order.{value.name()}")
    if type(value) in (list, tuple, set, frozenset):
        return type(value)([portable(part) for part in value])
    if type(value) is dict:
        return {portable(key): portable(part) for key, part in value.items()}
    if type(value) is functools.partial:
        return functools.partial(portable(value.func), *portable(value.args), **portable(value.keywords))
    return value
