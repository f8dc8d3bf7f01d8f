"""Private names of torch's compilers, Dynamo and TorchScript: what is kept out of a trace, what tells compiled code."""

from collections.abc import Callable, Sequence
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch

from actckpt._core.torch_private.lookup import needed, optional

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: How the error begins that TorchScript raises in the place of what a hook raised inside of a scripted function, for
#: example a rerun's early stop. Worded otherwise: such a rerun raises, as torch's own checkpoint does.
SCRIPT_FAILURE = "The following operation failed in the TorchScript interpreter."

#: What the names of the modules of compiled code begin with. Where torch calls it otherwise, operators of compiled code
#: are recorded like any others, and the audit finds what its kernels do in between.
COMPILED_PREFIX = "torch._inductor"

#: What the names of the modules begin with whose functions call compiled code. Where torch calls them otherwise, what
#: compiled code saves counts as an input of the region, which keeps it.
COMPILER_PREFIX = "torch._functorch._aot_autograd"


#: Missing: the public one imports the compiler.
_disable = optional("torch._disable_dynamo") or torch.compiler.disable


def disable_dynamo(function: _Function) -> _Function:
    """Keep torch.compile out of a function, without importing the compiler."""
    return _disable(function)  # type: ignore[no-any-return]


_set_code_strategy = optional("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_strategy = optional("torch._C._dynamo.eval_frame._FrameExecStrategy")
_skip = optional("torch._C._dynamo.eval_frame._FrameAction.SKIP")
_never_traced = None if _strategy is None or _skip is None else _strategy(_skip, _skip)


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
    # The error shows results of calls, and global variables it does not.
    needed("torch._dynamo.graph_break")(why.strip())


def called_while_traced(function: _Function) -> _Function:
    """Let the compiler call a function while it traces, and take what it returns as a constant.

    What `torch.compiler.assume_constant_result` does, without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Where a module has that. Where torch has it elsewhere, such modules are taken for modules that are not compiled.
COMPILED_CALL = "_compiled_call_impl"


def compiled_call(caller: FrameType) -> Sequence[Any] | None:
    """Return what the compiled code was given that a frame calls, None where it calls none.

    The frame is that of `Function.apply`. From torch 2.14 on, where it has none, it is the compiler's that calls it.
    """
    names = caller.f_locals
    function = names["cls"] if "cls" in names else getattr(names.get("f"), "__self__", None)
    return names.get("args") if is_compiled_function(function) else None


def is_compiled_function(function: object) -> bool:
    """Whether an autograd.Function runs code that torch.compile made."""
    return hasattr(function, "_aot_id")


def call_of_compiled(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what `module.compile()` made, which runs in place of the module's call; None where it is not compiled."""
    compiled: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return compiled


def set_call_of_compiled(module: torch.nn.Module, compiled: Callable[..., Any] | None) -> None:
    """Let something else run in place of the call of a module that is compiled."""
    setattr(module, COMPILED_CALL, compiled)
