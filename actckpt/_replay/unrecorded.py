"""Tensors made inside a region without recorded operators, by compiled code or an autograd.Function with its own
kernels.

They are not inputs: a policy may want them recomputed, but replay cannot make them (NOTE [ Replay ], Rule 4).
"""

import sys
from typing import Any

from torch import Tensor

from actckpt._C import strided_storage_of
from actckpt._core import torch_private
from actckpt._replay.lineage import Value
from actckpt._replay.tape import COMPILED, Tape
from actckpt.action import Action

__all__ = ["made_by_function", "saved_by_function"]


def made_by_function(tape: Tape, value: Value, node: Any) -> None:
    """Record a value that the autograd.Function behind `node` returned, if it ran inside the region."""
    if node._sequence_nr() < tape.began_at:
        return
    function = type(node)._forward_cls
    is_compiled = torch_private.is_compiled_function(function)
    _note(tape, value, COMPILED if is_compiled else f"made by {function.__qualname__}, whose kernels are not recorded")


def saved_by_function(tape: Tape, value: Value, tensor: Tensor) -> None:
    """Record a value that compiled code saves and did not get as an argument.

    Called below the `apply` of an autograd.Function. Other functions may save what they keep over many steps
    (workspaces,
    casts of parameters).
    """
    args = torch_private.compiled_call(sys._getframe(1))
    if args is None:
        return
    storage = tensor.untyped_storage()
    if not any(isinstance(argument, Tensor) and strided_storage_of(argument) is storage for argument in args):
        _note(tape, value, COMPILED)


def _note(tape: Tape, value: Value, why_opaque: str) -> None:
    value.is_input = False
    value.why_opaque = why_opaque
    if value.choice.for_value is None:
        value.action = tape.choice.default or Action.RECOMPUTE
