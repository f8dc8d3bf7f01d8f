"""Training steps passed by users: validated before they run, explained if they leave no gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actckpt._core.tensor_changes import version_of

__all__ = ["Step"]

_GRAD_OFF = "Gradients are off here (torch.no_grad or torch.inference_mode): call it outside of that."
#: Stands for the identity and version of a gradient.
_NO_GRADIENT = (0, 0)
_RETURNED_LOSS = " It returned a tensor: run backward inside of the step: lambda: step().backward()."


class Step:
    """A training step that can be called without arguments.

    Args:
        step: the user's function.
        who: the actckpt function that it was passed to, for errors.
        model: the model it trains.
    Raises:
        TypeError: it is no function, or `model` is no module.
        ValueError: it takes arguments, or does not run when called.
    """

    def __init__(self, step: Callable[[], object], who: str, model: torch.nn.Module) -> None:
        _check(step, who)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{who}: model is a {type(model).__name__}, not a module. Pass what the step trains.")
        self._step, self._who, self._model = step, who, model
        #: Whether the first call left gradients in the model, or had some before its optimizer step; None before that
        #: call.
        self.left_gradients: bool | None = None
        #: Whether it returned a tensor with a graph.
        self._returned_loss = False

    def __call__(self) -> None:
        """Run the step.

        Raises:
            ValueError: it needs gradients, and grad mode is off.
        """
        if self.left_gradients is not None:
            self._run()
            return
        before, has_gradients = self._gradients(), False

        def look(*_: object) -> None:
            nonlocal has_gradients
            now = self._gradients()
            has_gradients = has_gradients or (now != before and any(gradient != _NO_GRADIENT for gradient in now))

        handle = register_optimizer_step_pre_hook(look)  # the step may set them to None afterwards
        try:
            result = self._run()
        finally:
            handle.remove()
        look()
        self.left_gradients = has_gradients
        self._returned_loss = isinstance(result, torch.Tensor) and result.requires_grad

    def _run(self) -> object:
        try:
            return self._step()
        except RuntimeError as error:
            if not torch.is_grad_enabled() and "does not require grad" in str(error):
                raise ValueError(f"{self._who}: the step cannot run backward. {_GRAD_OFF}") from error
            raise

    def _gradients(self) -> list[tuple[int, int]]:
        gradients = (parameter.grad for parameter in self._model.parameters())
        return [_NO_GRADIENT if grad is None else (id(grad), version_of(grad)) for grad in gradients]

    def check_gradients(self, has_gradients: bool) -> None:
        """Raise if the step left no gradients.

        Raises:
            ValueError: says why, and what to do.
        """
        if not has_gradients:
            raise ValueError(
                f"{self._who}: the step left no gradients in the {sum(1 for _ in self._model.parameters())} parameters "
                f"of {type(self._model).__name__}. Pass one that runs forward and backward of this model.{self.hint()}"
            )

    def hint(self) -> str:
        """Return why backward did not run through the model, after a space; empty if it did, or if that is unknown."""
        if self.left_gradients:
            return ""
        if not torch.is_grad_enabled():
            return f" {_GRAD_OFF}"
        if not any(parameter.requires_grad for parameter in self._model.parameters()):
            return " None of its parameters requires gradients."
        return _RETURNED_LOSS if self._returned_loss else ""


def _check(step: Any, who: str) -> None:
    example = "Pass a function that runs forward and backward: lambda: model(x).sum().backward()"
    if not callable(step):
        kind = f"a tensor of shape {tuple(step.shape)}" if isinstance(step, torch.Tensor) else repr(step)
        raise TypeError(f"{who}: the step is {kind}, not a function. {example}, uncalled.")
    function = step.forward if isinstance(step, torch.nn.Module) else step
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ValueError(
            f"{who}: the step is a coroutine or a generator, which does not run when it is called. {example}."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        kind = f"the module {type(step).__name__}, which" if isinstance(step, torch.nn.Module) else "a function that"
        raise ValueError(f"{who}: the step is {kind} takes arguments ({error}). {example}.") from None
    except ValueError:  # a builtin without a signature
        pass
