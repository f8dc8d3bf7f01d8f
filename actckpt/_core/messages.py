"""The error messages of regions: what differs, where, both sides, and what to do.

This code runs only after a failure, so it may be slow.
"""

from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actckpt._core.observing_mode import ObservingMode
from actckpt._core.sites import module_name, modules_on_stack, user_line
from actckpt._core.tensor_changes import version_of
from actckpt.errors import CheckpointError, InputChangedError, RerunMismatchError, SavedTensorChangedError

if TYPE_CHECKING:
    from actckpt import _C

_ADVICE = (
    "The function must do the same in both runs: no counters, flags or Python randomness that differ "
    "between them, no attribute of a module that one call leaves for the next (a recurrent state). Pass a policy, "
    "whose regions run nothing again, or debug=True to see the operators of both runs."
)

_ROUTING = (
    "Only sizes differ: if data decides them there (which tokens an expert gets, a mask that selects), it decided "
    'otherwise in the rerun. Regions with a policy, such as policy="matmuls", keep what decides and replay the rest. '
    "Or leave the router outside of the checkpointed function.\n"
)


_HOOKS_REFUSED = (
    "{}: torch.func.grad, vjp, jacrev and hessian refuse saved-tensor hooks, with which checkpoints, regions and "
    "offloading work, as torch's own checkpoint does, around them and inside. Use torch.autograd.grad or backward (of "
    "torch.func.functional_call, where parameters are given), or torch.autograd.functional.jacobian and hessian; "
    "torch.func.jvp, jacfwd and vmap work (a policy, such as policy=[], lets backward follow). Or run this part "
    "without checkpoints: actckpt.remove(model)."
)


def raise_if_hooks_are_refused(error: RuntimeError, what: str) -> None:
    """Raise an error with advice if torch raised because a torch.func transform does not support hooks."""
    if str(error).startswith("torch.func.") and not isinstance(error, CheckpointError):
        raise CheckpointError(_HOOKS_REFUSED.format(what)) from error


class Trace:
    """The operators of forward and rerun with the user's source lines, for `debug=True`."""

    def __init__(self) -> None:
        self.forward: list[str] = []
        self.rerun: list[str] = []
        self.forward_mode = _OperatorLog(self.forward)
        self.rerun_mode = _OperatorLog(self.rerun)


class _OperatorLog(ObservingMode):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines = lines

    def __enter__(self) -> Any:
        self._lines.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # only reruns detach internally
            self._lines.append(f"{func}  at {user_line()}")
        return func(*args, **(kwargs or {}))


def name_of(function: Any) -> str:
    """Return a name for a region's function: a module's type, or a qualified name with its location."""
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    name = str(getattr(function, "__qualname__", type(function).__name__))
    if isinstance(function, FunctionType):
        return f"{name} ({function.__code__.co_filename}:{function.__code__.co_firstlineno})"
    return name


def mismatch(recomputed: "_C.RecomputedValues", index: int, tensor: Tensor, problem: str) -> RerunMismatchError:
    """Return the error for a tensor that the rerun saved and that differs from the forward's."""
    frame = recomputed.frame
    name = _name(frame)
    where = f"saved at {user_line()}{_running_module()}"
    if problem == "more":
        return RerunMismatchError(
            f"The rerun of {name} saves more tensors than its forward did.\n"
            f"Forward: {frame.num_saved}; rerun: at least {index + 1}, the additional one of shape "
            f"{_shape(tensor)}, {tensor.dtype}, {tensor.device}, {where}.\n{_ADVICE}"
        )
    if problem == "external_tensor":
        return RerunMismatchError(
            f"A tensor of shape {_shape(tensor)}, {tensor.dtype}, that {name} reads was changed in place between "
            f"its forward and its rerun: saved tensor {index} of {frame.num_saved}, at version {tensor._version} now, "
            f"{where}; one of the variables needed for gradient computation has been modified by an inplace operation."
            "\nChange a clone instead, or run backward before changing it."
        )
    if problem == "version":
        return RerunMismatchError(
            f"A parameter of shape {tuple(tensor.shape)} was changed in place between the forward and the "
            f"rerun of {name} ({where}).\nSaved tensor {index} of {frame.num_saved}: other version "
            f"in forward than now ({tensor._version}); one of the variables needed for gradient computation "
            "has been modified by an inplace operation.\nRun backward before the optimizer step that "
            'changes the parameter, or pass determinism_check="none" if the change does no harm.'
        )
    shape, dtype, device = frame.metadata(index) or (None, None, None)
    return RerunMismatchError(
        f"The rerun of {name} saved a tensor that is different from its forward's: "
        f"saved tensor {index} of {frame.num_saved}.\n"
        f"Forward: shape {tuple(shape or ())}, {dtype}, {device}. Rerun: shape {_shape(tensor)}, "
        f"{tensor.dtype}, {tensor.device}, {where}.\n"
        f"{_ROUTING if _has_other_size(tensor, shape, dtype) else ''}{_ADVICE}"
    )


def _running_module() -> str:
    module = next(modules_on_stack(), None)
    if module is None:
        return ""
    name, kind = module_name(), type(module).__name__
    return f" (module {kind})" if name == kind else f" (module {name}, {kind})"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape, or what the check compares for a strided nested tensor, which has none."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tensor.dim(), tensor.numel()
    return tuple(tensor.shape)


def _has_other_size(tensor: Tensor, shape: Sequence[int] | None, dtype: torch.dtype | None) -> bool:
    """Whether only sizes differ, as when a router sends other tokens to an expert in the rerun."""
    return shape is not None and dtype == tensor.dtype and len(shape) == tensor.ndim


def fewer_saved(recomputed: "_C.RecomputedValues") -> RerunMismatchError:
    """Return the error for a rerun that returned before it saved everything that is needed."""
    frame = recomputed.frame
    return RerunMismatchError(
        f"The rerun of {_name(frame)} saved a different number of tensors than its forward: it returned early.\n"
        f"Forward: {frame.num_saved}; rerun: {recomputed.num_packed}, of which backward needs {recomputed.num_needed}."
        f"\n{_ADVICE}"
    )


def not_saved(frame: "_C.Frame") -> RerunMismatchError:
    """Return the error for a rerun that ended without saving the tensor that backward needs."""
    return RerunMismatchError(
        f"A rerun of {_name(frame)} did not bring back a saved tensor that backward asked for; its forward "
        f"saved {frame.num_saved}, autograd still holds {frame.num_live}.\n"
        "Does the function run a backward of its own? Pass early_stop=False, or take that backward out of it."
    )


def saved_tensor_changed(
    frame: "_C.Frame", index: int, tensor: Tensor, found: int, expected: int
) -> SavedTensorChangedError:
    """Return the error for a tensor that was changed in place after an operator saved it."""
    return SavedTensorChangedError(
        f"One of the variables needed for gradient computation has been modified by an inplace operation "
        f"inside {_name(frame)}: saved tensor {index} of {frame.num_saved}, shape {_shape(tensor)}, "
        f"{tensor.dtype}.\nIt is at version {found}; expected version {expected}.\n"
        "Use the out-of-place operator, or clone the tensor before changing it."
    )


def changed_in_place(shape: torch.Size, dtype: torch.dtype, found: int, expected: int) -> SavedTensorChangedError:
    """Return the error for a saved tensor whose bytes changed in place."""
    return SavedTensorChangedError(
        "One of the variables needed for gradient computation has been modified by an inplace operation: saved "
        f"tensor of shape {tuple(shape)}, {dtype}.\nIt is at version {found}; expected version {expected}.\n"
        "Use the out-of-place operator, or clone the tensor before changing it."
    )


OTHER_MEMORY = "was given other memory (an assignment to its .data, or swap_tensors)"


class HeldTensorChanged(Exception):  # noqa: N818 - never leaves the runtime
    """Raised by `HeldTensor.restore`; `changed_error` makes the error for the user."""

    def __init__(self, held: "_C.HeldTensor") -> None:
        super().__init__()
        self.held = held


def changed_error(changed: HeldTensorChanged, args: Sequence[Any]) -> InputChangedError:
    """Return the error for a held tensor that was changed in place."""
    held = changed.held
    index = next((i for i, value in enumerate(args) if value is held), None)
    place = "A tensor in a tuple" if index is None else f"Argument {index}"
    if version_of(held.held) == held.version:
        return input_changed(place, OTHER_MEMORY)
    return input_changed(place, "was changed in place", held.held, held.version)


def input_changed(place: str, how: str, tensor: Tensor | None = None, before: int = 0) -> InputChangedError:
    """Return the error for an input that differs from its state after the forward."""
    message = (
        f"{place}, an input of a checkpointed region, {how} since the region began, by its own function or after it, "
        "and backward has to run that again"
    )
    if tensor is not None and tensor.is_inference():
        message += f": an inference tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, whose bytes were compared"
    elif tensor is not None:
        message += (
            f": tensor of shape {tuple(tensor.shape)}, {tensor.dtype}.\nVersion {before} in forward, "
            f"{version_of(tensor)} now (one of the variables needed for gradient computation has been modified by an "
            "inplace operation)"
        )
    return InputChangedError(
        f"{message}.\nChange a clone instead, or run backward before changing it. A statistic that the region itself "
        "updates belongs into a module's buffer."
    )


def parameter_error(module: torch.nn.Module, parameter: Tensor, before: int, now: int) -> RerunMismatchError:
    """Return the error for a parameter that changed since the forward; `now` is -1 if it is another tensor."""
    name = next((name for name, other in module.named_parameters() if other is parameter), "?")
    how = f"is at version {now}; it was at version {before}" if now >= 0 else "is another tensor than it was"
    if parameter.is_inference() and now == before:
        how = "is an inference tensor with other bytes than it had"
    return RerunMismatchError(
        f"Parameter {name!r} of {name_of(module)}, shape {tuple(parameter.shape)}, {how} in forward, and "
        "backward has to run the module again (one of the variables needed for gradient computation has been "
        "modified by an inplace operation).\n"
        'Run backward before the optimizer step that changes the parameter, or pass determinism_check="none" if the '
        "change does no harm."
    )


def traced(error: BaseException, trace: Trace) -> BaseException:
    """Add the operators of both runs to an error, for `debug=True`."""
    first = next(
        (i for i, (a, b) in enumerate(zip(trace.forward, trace.rerun, strict=False)) if _op(a) != _op(b)),
        min(len(trace.forward), len(trace.rerun)),
    )
    lines = [str(error), "", f"First difference: operator {first}."]
    for title, operators in (("forward", trace.forward), ("rerun", trace.rerun)):
        lines.append(f"Operators of the {title} ({len(operators)}):")
        lines += [f"{'->' if i == first else '  '} {i}: {line}" for i, line in enumerate(operators)]
    return type(error)("\n".join(lines))


def _name(frame: "_C.Frame") -> str:
    return name_of(frame.function)


def _op(line: str) -> str:
    return line.split("  at ", 1)[0]
