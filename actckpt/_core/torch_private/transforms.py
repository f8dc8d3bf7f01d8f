"""Private names of torch for `torch.func` transforms and forward-mode AD."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from actckpt._core.torch_private.lookup import lookup, reader

#: Whether operators compute tangents in this thread.
set_tangents_enabled: Callable[[bool], None] = lookup("torch._C._set_fwd_grad_enabled")
_are_enabled: Callable[[], bool] = lookup("torch._C._is_fwd_grad_enabled")
_level: Callable[[], int] = reader("torch.autograd.forward_ad._current_level")

#: The active `torch.func` transforms.
innermost_transform: Callable[[], Any] = lookup("torch._C._functorch.peek_interpreter_stack")
_pop_transform: Callable[[], Any] = lookup("torch._C._functorch.pop_dynamic_layer_stack")
_push_transform: Callable[[Any], object] = lookup("torch._C._functorch.push_dynamic_layer_stack")

#: Whether a tensor is one that a `torch.func` transform wrapped, and the tensor inside, perhaps wrapped again.
is_wrapped: Callable[[torch.Tensor], bool] = lookup("torch._C._functorch.is_functorch_wrapped_tensor")
unwrapped: Callable[[torch.Tensor], torch.Tensor] = lookup("torch._C._functorch.get_unwrapped")
#: Whether a tensor is a zero tangent, which has no bytes.
is_zero_tangent: Callable[[torch.Tensor], bool] = lookup("torch.Tensor._is_zerotensor")


def tangents_enabled() -> bool:
    """Whether tensors may have tangents now (`torch.autograd.forward_ad`, `torch.func.jvp`)."""
    return _level() >= 0 and _are_enabled()


@contextmanager
def below_transforms() -> Iterator[None]:
    """Run the body outside of all `torch.func` transforms: it works on the tensors that autograd saved."""
    taken = []
    try:
        while innermost_transform() is not None:
            taken.append(_pop_transform())
        yield
    finally:
        while taken:
            _push_transform(taken.pop())
