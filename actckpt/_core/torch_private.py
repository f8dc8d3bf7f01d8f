"""Private names of torch that the runtime uses. Every torch from 2.9 on has them, but for those that say "Missing:".

Those of settings that change numbers are in `torch_settings`.

`tests/unit/core/test_torch_private.py` fails when torch drops one of them, and says which entry
here can go when torch makes it public.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import Variable, forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])
Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def optional(owner: object, name: str) -> Any:
    """Return a name that not every torch has, or None."""
    return getattr(owner, name, None)


#: Id of the backward under way in this thread, -1 outside of one. torch's own checkpoint tells backwards apart with it.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

#: The active `torch.utils.checkpoint.GraphExecGroup`. Missing before torch 2.10: there are no such groups.
current_graph_exec_group: Callable[[], Any] | None = optional(torch._C, "_get_graph_exec_group")

#: Hands the engine a callable for the end of the backward under way. What backward caches is released then
#: (csrc/core/task_end.h).
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

#: The hooks that a saved tensor would go through now.
top_hooks: Callable[[bool], Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks

#: What `torch.autograd.graph.saved_tensors_hooks` calls on entry and exit, without its Python frames;
#: and the setter behind `torch.set_grad_enabled`.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

#: How the error begins that TorchScript raises in the place of what a hook raised inside of a scripted function, for
#: example a rerun's early stop. Worded otherwise: such a rerun raises, as torch's own checkpoint does.
SCRIPT_FAILURE = "The following operation failed in the TorchScript interpreter."

#: `torch.accelerator.current_accelerator` without its Python frame, which every region would pay for.
current_accelerator: Callable[[], torch.device | None] = (
    optional(torch._C, "_accelerator_getAccelerator") or torch.accelerator.current_accelerator
)

#: Whether a CUDA device has a context, without making one. Only where torch was built for CUDA.
cuda_has_context: Callable[[int], bool] | None = optional(torch._C, "_cuda_hasPrimaryContext")

#: Whether autocast is on for any device.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

#: Skips autograd in this thread, whatever the grad mode.
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd

#: A capsule with C functions that describe a tensor in plain numbers (DLPack's C exchange API). Missing before torch
#: 2.10: they are read one by one, which is slower.
exchange_api: Any = optional(torch.Tensor, "__dlpack_c_exchange_api__")

#: Whether the backward under way was asked to retain the graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: Tensors that have shapes and no bytes.
fake_tensor_type: type = FakeTensor

#: What operators raise that would have to read the numbers of fake tensors; `func` is the operator.
needs_numbers: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)


class _FakeMode(FakeTensorMode):
    """Remembers nothing of operators on storages: torch's cache would hold those storages for ever."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(arg, torch.UntypedStorage) for arg in args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        is_enabled, self.cache_enabled = self.cache_enabled, False
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = is_enabled


def fake_mode() -> Any:
    """Return a mode under which operators make fake tensors, also of real arguments."""
    return _FakeMode(allow_non_fake_inputs=True)


def new_fake(
    mode: Any,
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a fake tensor of the CPU on a storage of the meta device. No mode sees how it is made."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        inner = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, tuple(shape), tuple(stride))
        return FakeTensor(mode, inner, torch.device("cpu"))


#: Returns the functions that make tensors on the default device. Missing: a default device other than the CPU stays.
factories: Callable[[], Any] = optional(torch.utils._device, "_device_constructors") or frozenset

#: The number that autograd gives to the next node of this thread.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

#: What every node of a Python autograd.Function is an instance of.
function_node_type: type = torch._C._FunctionBase

#: The code of `torch.autograd.Function.apply`, which is the innermost Python frame while autograd saves for a Function.
apply_code: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]

#: What the names of the modules of compiled code begin with. Where torch calls it otherwise, operators of compiled code
#: are recorded like any others, and the audit finds what its kernels do in between.
COMPILED_PREFIX = "torch._inductor"


def disable_dynamo(function: _Function) -> _Function:
    """Keep torch.compile out of a function, without importing the compiler."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined, return-value]


_eval_frame = optional(optional(torch._C, "_dynamo"), "eval_frame")
_set_code_strategy = optional(_eval_frame, "set_code_exec_strategy")
_skip = getattr(optional(_eval_frame, "_FrameAction"), "SKIP", None)
_never_traced = None if _skip is None else _eval_frame._FrameExecStrategy(_skip, _skip)


def untraced(function: _Function) -> _Function:
    """Keep torch.compile out of a Python function that C++ calls, and of all that this calls.

    Between two graphs of a compiled function the compiler looks at each frame, and would trace what hooks of ours run:
    it makes another object of a stream, which has no handle. Unlike `disable_dynamo` this costs no call, and nothing
    where a function is traced that calls this one. Where torch has no such thing, nothing is kept out.
    """
    if _set_code_strategy is not None and _never_traced is not None and isinstance(function, FunctionType):
        _set_code_strategy(function.__code__, _never_traced)
    return function


def graph_break(why: str) -> None:
    """Break the graph that is being traced; with `fullgraph=True` that is an error with this text."""
    torch._dynamo.graph_break(why.strip())  # the error shows results of calls, and global variables it does not


def called_while_traced(function: _Function) -> _Function:
    """Let the compiler call a function while it traces, and take what it returns as a constant.

    What `torch.compiler.assume_constant_result` does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: The stack of function modes of this thread.
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
is_function_mode_enabled: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
_function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
_push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

#: The stack of dispatch modes of this thread.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
dispatch_mode_at: Callable[[int], Any] = torch._C._get_dispatch_stack_at
push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[], Any] = partial(torch._C._pop_torch_dispatch_stack, None)

#: Whether operators compute tangents in this thread.
set_tangents_enabled: Callable[[bool], None] = torch._C._set_fwd_grad_enabled

#: The transforms of `torch.func` that are active.
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_pop_transform: Callable[[], Any] = torch._C._functorch.pop_dynamic_layer_stack
_push_transform: Callable[[Any], object] = torch._C._functorch.push_dynamic_layer_stack

#: Whether a tensor is the tangent zero, of which no bytes exist.
is_zero_tangent: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor

#: Whether compiled functions can run below a dispatch mode. Before torch 2.10 their guards fail below each, whatever it
#: says of itself: they would be compiled again at each call.
runs_compiled_below_modes: bool = hasattr(
    torch.utils._python_dispatch, "set_is_in_mode_without_ignore_compile_internals"
)

#: Dispatch modes of torch that change no results. One that is missing is not known: what runs below it is kept.
OBSERVING_MODES = frozenset(
    {
        "torch.utils.flop_counter._FlopCounterMode",
        "torch.utils._debug_mode.DebugMode",
        "torch.utils._debug_mode._mode.DebugMode",
        "torch.utils._cuda_debug._TensorTrackingMode",
        "torch.utils.checkpoint._CachedTorchDispatchMode",
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        "torch.autograd.graph._CloneArgBeforeMutateMode",
        "torch.cuda._sanitizer.CUDASanitizerDispatchMode",
        "torch.distributed._tools.mem_tracker.MemTracker",
        "torch.distributed._tools.memory_tracker.MemoryProfileDispatchMode",
        "torch.distributed._tools.runtime_estimator.RuntimeEstimator",
        "torch.distributed._tools.sac_estimator.SACEstimator",
        "torch.distributed.tensor.debug.CommDebugMode",
        "torch.testing._internal.logging_tensor.LoggingTensorMode",
    }
)

#: Methods of UntypedStorage that free memory which tensors still refer to. `resize_` is public; by the others
#: `share_memory_` and multiprocessing replace it.
FREEING_METHODS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")


#: Builtin functions of torch, among them those that `torch.nn.functional` wraps.
builtin_functions: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn)


def implementation_of(tensor: torch.Tensor) -> int:
    """Return the address of what a Python tensor stands for: `torch.utils.swap_tensors` gives it another one."""
    address: int = tensor._cdata
    return address


def keep_object(tensor: Any) -> None:
    """Let Python own the object of a tensor that came out of a weak reference.

    Before torch 2.10 it may be C++ that does: the object is then emptied when nobody in C++ has the tensor any more.
    """
    tensor._fix_weakref()


def outer_hooks() -> Hooks | None:
    """Return the (pack, unpack) that a tensor saved now would go through, or None."""
    return top_hooks(False)


def are_on_top(hooks: Hooks | None) -> bool:
    """Whether these hooks were pushed last, of those not popped."""
    found = outer_hooks()
    return hooks is not None and found is not None and found[0] is hooks[0]


def remove_dispatch_mode(mode: Any) -> None:
    """Take a dispatch mode off the stack of this thread, if it is there, after its enter or exit was cut short.

    Also puts right the flags that torch keeps beside the stack.
    """
    names: Any = torch.utils._python_dispatch
    stack = [dispatch_mode_at(i) for i in range(num_dispatch_modes())]
    if any(other is mode for other in stack):
        above = []
        while (top := names._pop_mode()) is not mode:
            above.append(top)
        for other in reversed(above):
            names._push_mode(other)
        stack = [other for other in stack if other is not mode]
    names._is_in_torch_dispatch_mode = bool(stack)
    names._is_in_non_infra_torch_dispatch_mode = any(not other.is_infra_mode() for other in stack)
    traced = any(not other.ignore_compile_internals() for other in stack)
    names._is_in_any_mode_without_ignore_compile_internals = traced
    if runs_compiled_below_modes:
        names.set_is_in_mode_without_ignore_compile_internals(traced)


def forced_by_context() -> tuple[bool | None, bool | None]:
    """Return what torch's `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` ask for.

    None outside of such a context.
    """
    module: Any = torch.utils.checkpoint
    return module._enable_checkpoint_early_stop, module._checkpoint_debug_enabled


def selective_policy(context: object) -> Callable[..., Any] | None:
    """Return the policy function of torch's selective checkpointing, if `context` is its mode of the forward."""
    names: Any = torch.utils.checkpoint
    return context.policy_fn if type(context) is names._CachingTorchDispatchMode else None  # type: ignore[attr-defined]


def set_selective_policy(context: Any, policy: Callable[..., Any]) -> None:
    """Let a mode for which `selective_policy` returns one ask another policy function."""
    context.policy_fn = policy


def callee_of(overload: Any) -> Callable[..., Any]:
    """Return what an overload of an operator calls; of another operator, the operator."""
    callee: Callable[..., Any] = overload._op if type(overload) is torch._ops.OpOverload else overload
    return callee


def has_registered_effect(overload: Any) -> bool:
    """Whether torch was told of an effect of an operator (`torch.library`), so that it must run once and in order."""
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = optional(effects, "_get_effect")
    if effect_of is None:  # torch 2.9 has a dictionary; where there is neither, none can be registered that way
        effect_of = getattr(effects, "SIDE_EFFECTS", {}).get
    return effect_of(overload) is not None


def is_compiled_function(function: object) -> bool:
    """Whether an autograd.Function runs code that torch.compile made."""
    return hasattr(function, "_aot_id")


def function_modes() -> tuple[Any, ...]:
    """Return this thread's function modes, outermost first."""
    return tuple(_function_mode_at(i) for i in range(num_function_modes()))


@contextmanager
def replaced_function_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    """Run the body under exactly these function modes; `DeviceContext` included.

    The modes are not entered again: they are put on the stack as they were.
    """
    outside = _swap_function_modes(modes)
    device_module: Any = torch.utils._device
    device = device_module.CURRENT_DEVICE
    device_module.CURRENT_DEVICE = next((m.device for m in modes if _is_device_context(m)), None)
    try:
        yield
    finally:
        device_module.CURRENT_DEVICE = device
        _swap_function_modes(outside)


def _is_device_context(mode: Any) -> bool:
    return isinstance(mode, torch.utils._device.DeviceContext)


def _swap_function_modes(modes: tuple[Any, ...]) -> tuple[Any, ...]:
    removed = [_pop_function_mode() for _ in range(num_function_modes())]
    for mode in modes:
        _push_function_mode(mode)
    return tuple(reversed(removed))


@contextmanager
def without_tensor_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Run the body as if none of these tensors had hooks (`Tensor.register_hook`).

    A gradient that is computed on behalf of another backward must not meet them twice. torch keeps them in a dict
    of the tensor, which its hook in C++ reads at each call.
    """
    dicts = [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]
    held = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(dicts, held, strict=True):
            hooks.update(before)


def wait_for_collective(tensor: Any) -> None:
    """Wait until the collective that `tensor` stands for has written its bytes.

    torch's functional collectives return such tensors, which wait when an operator takes them.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor.trigger_wait()


def resolved_group(given: Any) -> Any:
    """Return the process group that operators are given: by its name, as functional collectives are, or in a box."""
    groups: Any = torch.distributed.distributed_c10d
    if isinstance(given, str):
        return groups._resolve_process_group(given)
    return groups.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group."""
    getter = optional(group, "get_group_store")  # public, where torch has it
    groups: Any = torch.distributed.distributed_c10d
    return groups._world.pg_map[group][1] if getter is None else getter()


def num_operations(group: Any) -> int | None:
    """Return how many operations a process group ran so far, None: nobody counts them. Gloo counts sends as well."""
    try:
        number: int = group._get_sequence_number_for_group()
    except RuntimeError:  # its backend does not
        return None
    return number


def group_timeout(group: Any) -> timedelta:
    """Return how long collectives of a process group wait for other ranks; torch's default where none can be told."""
    options = None
    for device in ("cuda", "cpu"):
        try:
            options = optional(group._get_backend(torch.device(device)), "options")
        except RuntimeError:  # none of its backends is for this device
            continue
        break
    found: timedelta | None = None if options is None else optional(options, "_timeout")
    return torch.distributed.constants.default_pg_timeout if found is None else found


def finished_work() -> Any:
    """Return what a collective of `torch.ops.c10d` returns, as if it had ended."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def unsharded_parameter(owner: object) -> tuple[str, Any] | None:
    """Return name and unsharded tensor of a parameter that FSDP2 manages, if `owner` is what it does so with.

    The module has the sharded parameter in its place most of the time.
    """
    if type(owner).__name__ != "FSDPParam":
        return None
    parameter: Any = owner
    tensor = optional(parameter, "_unsharded_param")  # set by the first gathering
    return None if tensor is None else (parameter._param_fqn or parameter._module_info.param_name, tensor)


def sequence_number(node: Any) -> int:
    """Return the number that autograd gave to a node."""
    return int(node._sequence_nr())


def gradient_bytes(node: Any, index: int) -> int:
    """Return the bytes of the gradient that a node takes for one of its results, 0 where torch does not tell.

    It does not of nested tensors, nor of results that are no tensors.
    """
    try:
        found = node._input_metadata[index]
        return math.prod(map(int, found.shape)) * int(found.dtype.itemsize)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return 0


def num_gradients(node: Any) -> int:
    """Return how many gradients a node takes, 0 where torch does not tell."""
    try:
        return len(node._input_metadata)
    except (AttributeError, RuntimeError, TypeError):
        return 0


def is_tracing() -> bool:
    """Whether operators are being written into a graph (`make_fx`), to run with other bytes later."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def tangents_enabled() -> bool:
    """Whether tensors may have tangents now (`torch.autograd.forward_ad`, `torch.func.jvp`)."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


@contextmanager
def below_transforms() -> Iterator[None]:
    """Run the body outside of every transform of `torch.func`: it works on the tensors that autograd saved."""
    taken = []
    try:
        while innermost_transform() is not None:
            taken.append(_pop_transform())
        yield
    finally:
        while taken:
            _push_transform(taken.pop())
