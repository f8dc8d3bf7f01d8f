"""The part of executing recorded steps that C++ (csrc/replay/execute.cpp) leaves to Python.

These are operators that draw random numbers, that write, or that ran under settings other than the current ones. Error
messages are here too.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import numerics, random_state, state, torch_private
from actckpt._replay.lineage import Step, Value
from actckpt.errors import ActckptError

__all__ = ["lost_error", "other_bytes_error", "private_memory", "replay_specially"]


#: Held while a replayed operator runs under its own settings: two threads must not restore each other's.
_lock = threading.RLock()


def replay_specially(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call a step's operator with the settings and the random state of its forward (NOTE [ Replay ], Rules 3 and 7).

    Called while paused, below autograd, in the grad mode of its forward.
    """
    with _settings_of(step):
        return _called_with_random_state(step, args, kwargs or {})


def private_memory(value: Value, base: Tensor | None) -> Tensor:
    """Return memory for a step to write to (Rule 1), with the bytes of `base`; None: the step overwrites all of it."""
    memory = torch.empty(0, dtype=torch.uint8, device=value.device)
    if base is None:
        return memory.set_(torch.empty(value.nbytes, dtype=torch.uint8, device=value.device).untyped_storage())
    return memory.set_(base.untyped_storage().clone())


def _called_with_random_state(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    func, random = step.operator.func, step.random
    if random is None:
        return step.operator.callee(*args, **kwargs)
    if isinstance(random, tuple):
        device, state = random
        generator = torch.Generator(device)
        generator.set_state(state)
        if not any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values())):
            return func(*args, **kwargs | {step.operator.generator_name: generator})
        args = tuple([generator if isinstance(arg, torch.Generator) else arg for arg in args])
        return func(*args, **{k: generator if isinstance(v, torch.Generator) else v for k, v in kwargs.items()})
    with random_state.swapped_in(random):
        return func(*args, **kwargs)


@contextmanager
def _settings_of(step: Step) -> Iterator[None]:
    """Run the body without autocast and function modes, under the step's settings (Rule 7)."""
    with ExitStack() as stack:
        if torch_private.any_autocast_enabled():
            stack.enter_context(state.without_autocast(keeps_cache=True))
        if torch_private.num_function_modes():
            stack.enter_context(torch_private.replaced_function_modes(()))
        if not _C.are_numerics(step.numerics):
            stack.enter_context(_lock)
            stack.enter_context(numerics.restored(step.numerics))
        yield


def other_bytes_error(value: Value, result: Any) -> ActckptError:
    """Return the error for a replayed result whose geometry differs from the forward's."""
    operator = value.operator if value.step is None else value.step.operator
    actual = f"{result.untyped_storage().nbytes()} bytes" if isinstance(result, Tensor) else "no tensor"
    return ActckptError(
        f"Replay made other bytes than the forward: a result of {operator.name} has {actual}, and {value.nbytes} bytes "
        "were recorded.\nDoes the operator depend on a global setting that changed? Keep what it makes: add it to "
        "actckpt.configure(opaque=[...])."
    )


def lost_error(value: Value) -> ActckptError:
    """Return the error for a value that can neither be loaded nor replayed."""
    return ActckptError(
        f"A saved tensor of {value.nbytes} bytes cannot be brought back: {value.why_opaque or 'its bytes are gone'}, "
        "and no recorded operator makes it.\nSomething that was not recorded (a compiled function, a raw kernel) "
        "changed a tensor inside the region. Keep what is made from it, change a clone, or use actckpt.checkpoint, "
        "which runs the function again."
    )
