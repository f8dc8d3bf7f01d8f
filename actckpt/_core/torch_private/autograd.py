"""Private names of torch for autograd: the current backward, saved-tensor hooks, and graph nodes."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from actckpt._core.torch_private.lookup import attribute, lookup, optional, reader

#: Pack and unpack.
Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

#: Id of this thread's current backward, -1 outside of one. torch's own checkpoint identifies backwards by it.
current_graph_task_id: Callable[[], int] = lookup("torch._C._current_graph_task_id")

#: The node whose backward runs in this thread, None outside of one. torch has public names for nodes, not for this.
current_node: Callable[[], Any] = lookup("torch._C._current_autograd_node")

#: The active `torch.utils.checkpoint.GraphExecGroup`. Missing before torch 2.10: there are no such groups.
current_graph_exec_group: Callable[[], Any] | None = optional("torch._C._get_graph_exec_group")

#: Queues a callback for the end of the current backward. Caches of the backward are released then
#: (csrc/core/task_end.h).
queue_callback: Callable[[Callable[[], None]], None] = lookup(
    "torch.autograd.Variable._execution_engine.queue_callback"
)

#: The hooks that a tensor saved now would go through.
top_hooks: Callable[[bool], Hooks | None] = lookup("torch._C._autograd._top_saved_tensors_default_hooks")

#: Whether `torch.autograd.graph.allow_mutation_on_saved_tensors` is active: its hooks clone what programs overwrite.
allows_mutation: Callable[[], bool] = reader("torch.autograd.graph._allow_mutation_on_saved_tensors_enabled")

#: What `torch.autograd.graph.saved_tensors_hooks` calls on entry and exit, without its Python frames; and the setter
#: behind `torch.set_grad_enabled`.
push_hooks: Callable[[Any, Any], None] = lookup("torch._C._autograd._push_saved_tensors_default_hooks")
pop_hooks: Callable[[], None] = lookup("torch._C._autograd._pop_saved_tensors_default_hooks")
set_grad_enabled: Callable[[bool], None] = lookup("torch._C._set_grad_enabled")

#: Disables autograd in this thread, whatever the grad mode.
below_autograd: Callable[[], Any] = lookup("torch._C._AutoDispatchBelowAutograd")

#: Whether the current backward retains the graph.
keeps_graph: Callable[[], bool] = lookup("torch._C._autograd._get_current_graph_task_keep_graph")

#: The sequence number of this thread's next node.
next_sequence_number: Callable[[], int] = lookup("torch._C._autograd._get_sequence_nr")

#: Base class of the nodes of Python autograd.Functions.
function_node_type: type = lookup("torch._C._FunctionBase")

#: The code of `torch.autograd.Function.apply`, the innermost Python frame while autograd saves for a Function. Missing
#: from torch 2.14 on, where it is no Python function; its caller's frame is innermost then (`compiled_call`).
apply_code: CodeType | None = optional("torch.autograd.Function.apply.__func__.__code__")

#: The function that runs hooks and forward of every module call.
_call_module = lookup("torch.nn.Module._call_impl")

_backward_hooks = lookup("torch.Tensor._backward_hooks.__get__")
_without_functions = lookup("torch._C.DisableTorchFunctionSubclass")


def outer_hooks() -> Hooks | None:
    """Return the (pack, unpack) that a tensor saved now would go through, or None."""
    return top_hooks(False)


def are_on_top(hooks: Hooks | None) -> bool:
    """Whether these hooks are on top of the stack."""
    top = outer_hooks()
    return hooks is not None and top is not None and top[0] is hooks[0]


@contextmanager
def without_tensor_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run the body as if none of these tensors had hooks (`Tensor.register_hook`).

    A gradient computed on behalf of another backward must not run them twice. torch keeps them in a dict of the tensor,
    which its C++ hook reads at each call.
    """
    dicts = [hooks for tensor in tensors if (hooks := _backward_hooks(tensor))]
    held = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(dicts, held, strict=True):
            hooks.update(before)


def sequence_number(node: Any) -> int:
    """Return the sequence number of a node."""
    return int(attribute(node, "_sequence_nr")())


def reads_filled_late() -> bool | None:
    """Return whether the current node reads a tensor that its operator filled after autograd had saved it.

    This is the noise of `rrelu` in training, which its kernel draws. None outside of a node: any tensor may be read
    then.
    """
    node = current_node()
    return None if node is None else node.name().startswith("RreluWithNoise")


def num_calls(module: torch.nn.Module) -> int:
    """Return how many calls of a module this thread is in, counting frames of `torch.nn.Module._call_impl`."""
    num, frame, code = 0, sys._getframe(1), _call_module.__code__
    while frame is not None:
        num += frame.f_code is code and frame.f_locals["self"] is module
        frame = frame.f_back  # type: ignore[assignment]
    return num


def gradient_bytes(node: Any, index: int) -> int:
    """Return the bytes of the gradient that a node gets for one of its results; 0 if unknown.

    Unknown are those of nested tensors and of results that are no tensors.
    """
    try:
        metadata = node._input_metadata[index]
        return math.prod(map(int, metadata.shape)) * int(metadata.dtype.itemsize)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return 0


#: Subclasses may override it.
_grad_fn: Callable[[torch.Tensor], Any] = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]


def node_of(tensor: torch.Tensor) -> Any | None:
    """Return the node that made a tensor, None if torch raises, as for some views that were written to."""
    with _without_functions():
        try:
            return _grad_fn(tensor)
        except RuntimeError:
            return None


def saved_in(node: Any) -> Iterator[Any]:
    """Yield the tensors that a node saved, or what hooks packed them into. Runs no hook."""
    for name in dir(type(node)):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            values = getattr(node, name)
        except RuntimeError:  # the node has run and was freed
            continue
        for saved in values if isinstance(values, (tuple, list)) else (values,):
            data = getattr(saved, "data", None)  # missing before torch 2.10
            if data is not None:
                yield data
