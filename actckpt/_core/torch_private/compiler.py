"""Private names of torch's compilers, Dynamo and TorchScript: excluding code from traces, detecting compiled code."""

from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch

from actckpt._core.torch_private.lookup import needed, optional

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Prefix of the error that TorchScript raises when a hook inside a scripted function raises, for example for a rerun's
#: early stop. If torch rewords it, such a rerun raises, as torch's own checkpoint does.
SCRIPT_FAILURE = "The following operation failed in the TorchScript interpreter."

#: Module name prefix of compiled code. If torch renames it, operators of compiled code are recorded like any others,
#: and the audit finds what its kernels do in between.
COMPILED_PREFIX = "torch._inductor"

#: Module name prefix of the functions that call compiled code. If torch renames it, what compiled code saves counts as
#: an input of the region, which keeps it.
COMPILER_PREFIX = "torch._functorch._aot_autograd"


#: Missing: the public one, which imports the compiler.
_disable = optional("torch._disable_dynamo") or torch.compiler.disable


def disable_dynamo(function: _Function) -> _Function:
    """Keep torch.compile out of a function, without importing the compiler."""
    return _disable(function)  # type: ignore[no-any-return]


_set_code_strategy = optional("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_strategy = optional("torch._C._dynamo.eval_frame._FrameExecStrategy")
_skip = optional("torch._C._dynamo.eval_frame._FrameAction.SKIP")
_never_traced = None if _strategy is None or _skip is None else _strategy(_skip, _skip)


def untraced(function: _Function) -> _Function:
    """Keep torch.compile out of a Python function that C++ calls, and out of everything that it calls.

    Between two graphs of a compiled function, the compiler inspects each frame and would trace code that our hooks run.
    Its stand-in for a stream has no handle. Unlike `disable_dynamo` this costs no call, and nothing where a traced
    function calls this one. If torch has no such feature, nothing is excluded.
    """
    if _set_code_strategy is not None and _never_traced is not None and isinstance(function, FunctionType):
        _set_code_strategy(function.__code__, _never_traced)
    return function


def graph_break(why: str) -> None:
    """Break the graph that is being traced; with `fullgraph=True` that raises an error with this text."""
    # The error shows results of calls, but not global variables.
    needed("torch._dynamo.graph_break")(why.strip())


def called_while_traced(function: _Function) -> _Function:
    """Let the compiler call a function while it traces, and treat the result as a constant.

    Like `torch.compiler.assume_constant_result`, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Attribute of a compiled module. If torch renames it, such modules count as not compiled.
COMPILED_CALL = "_compiled_call_impl"


def compiled_call(caller: FrameType) -> Sequence[Any] | None:
    """Return the arguments of the compiled code that a frame calls, None if it calls none.

    The frame is that of `Function.apply`. From torch 2.14 on, which has no such frame, it is the compiler's caller.
    """
    names = caller.f_locals
    function = names["cls"] if "cls" in names else getattr(names.get("f"), "__self__", None)
    return names.get("args") if is_compiled_function(function) else None


def is_compiled_function(function: object) -> bool:
    """Whether an autograd.Function runs code that torch.compile made."""
    return hasattr(function, "_aot_id")


def call_of_compiled(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the compiled call of a module (`module.compile()`), None if it is not compiled."""
    compiled: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return compiled


def set_call_of_compiled(module: torch.nn.Module, compiled: Callable[..., Any] | None) -> None:
    """Replace the compiled call of a module."""
    setattr(module, COMPILED_CALL, compiled)
