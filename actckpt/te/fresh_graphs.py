"""Regions that build a new graph in each backward: `retain_graph=True` through TransformerEngine.

A TransformerEngine node can run backward only once: it drops what it holds. So the region is one node, which holds only
inputs. Each backward runs the module again and differentiates that graph.

Every tensor that can get a gradient is an input of the node: the arguments that require grad, and the module's
parameters. If the forward reads another one, the region raises, because that gradient would be lost. Parameter hooks
run once, where autograd accumulates the gradient, not in the inner graph.

The forward runs with grad mode on, like plain code, and drops what it saves at once. Modules compute differently
without grad mode, and TransformerEngine counts its FP8 modules only with it. The held inputs are freed with the graph:
a saved tensor of the node owns them. Only first-order gradients are supported; create_graph raises.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

from actckpt._interface import GetTracker, HeldCall, Hooks, tensors_of, without_tensor_hooks
from actckpt.errors import InputChangedError, RerunMismatchError, TransformerEngineError
from actckpt.te.regions import Provider

__all__ = ["call_with_fresh_graphs"]


def call_with_fresh_graphs(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    provider: Provider | None,
    rng_trackers: Sequence[GetTracker] = (),
    input_hooks: Hooks | None = None,
) -> Any:
    """Call `forward`, the forward of `module`, as one node whose backward may run any number of times.

    Args:
        provider: carries TransformerEngine's state; None if it is not loaded.
        rng_trackers: callables that return random state trackers, besides those registered.
        input_hooks: (pack, unpack) for the held inputs.
    Raises:
        TransformerEngineError: the forward reads tensors that require grad and are neither arguments nor parameters.
    """
    inputs = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if _requires_grad(leaf)]
    inputs = list({id(tensor): tensor for tensor in inputs}.values())
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not inputs and not parameters:
        return forward(*args, **kwargs)
    _check_no_others(forward, args, kwargs, inputs, parameters)
    call = (forward, args, kwargs)
    region = _FreshRegion(call, HeldCall(module, call, rng_trackers, input_hooks), parameters, provider)
    with saved_tensors_hooks(lambda _: region, _unpack_region):
        flat: tuple[Any, ...] = _Node.apply(region, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    return region.result(flat)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _check_no_others(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], parameters: list[Any]
) -> None:
    known = {id(tensor) for tensor in (*inputs, *parameters)}
    for place, tensor in tensors_of((forward, args, kwargs)):
        if tensor.requires_grad and id(tensor) not in known:
            raise _lost_gradient(f"{place}, a tensor of shape {tuple(tensor.shape)}")


class _FreshRegion:
    """The state of one call that is needed to run it again."""

    def __init__(self, call: Any, held: HeldCall, parameters: list[Any], provider: Provider | None) -> None:
        self._call = call
        self._held = held
        #: TransformerEngine's state, if it is loaded.
        self._te = (provider, provider.capture()) if provider is not None else None
        self._is_update_due = False
        self.parameters = parameters
        self._outputs: list[tuple[torch.Size, torch.dtype] | None] = []
        self._spec: Any = None
        self._constants: list[Any] = []

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; return its tensors, detached, and which of them are differentiable."""
        (function, args, kwargs), self._call = self._call, None
        leaves, args, kwargs = _with_leaves(args, kwargs, inputs)
        versions = [leaf._version for leaf in leaves]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(_drop, _never))
            if self._te is not None:
                provider, te_state = self._te
                stack.enter_context(provider.forward(te_state, keeps_graph=False))
            result = function(*args, **kwargs)
        if self._te is not None:
            self._is_update_due = provider.is_update_due(te_state)
        self._held.forward_done()
        if versions != [leaf._version for leaf in leaves]:
            raise InputChangedError(
                f"{self._held.name}, wrapped with retain_graph=True, changes an argument in place. Its graph cannot be "
                "built again from changed inputs: pass a clone."
            )
        return self._note_result(result, leaves)

    def _note_result(self, result: Any, leaves: list[Tensor]) -> list[Tensor]:
        values, self._spec = _pytree.tree_flatten(result)
        tensors = [value for value in values if isinstance(value, Tensor)]
        _check_graph(tensors, {id(tensor) for tensor in (*leaves, *self.parameters)})
        self._constants = [None if isinstance(value, Tensor) else (value,) for value in values]
        self._outputs = [(t.shape, t.dtype) if t.requires_grad else None for t in tensors]
        return [tensor.detach() for tensor in tensors]

    @property
    def is_differentiable(self) -> list[bool]:
        """Which of the forward's tensors have a gradient."""
        return [kind is not None for kind in self._outputs]

    def result(self, flat: tuple[Tensor, ...]) -> Any:
        """Put the node's outputs into the structure that the forward returned."""
        outputs = iter(flat)
        values = [next(outputs) if held is None else held[0] for held in self._constants]
        return _pytree.tree_unflatten(values, self._spec)

    def backward(self, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> Iterator[Tensor | None]:
        """Run the forward again and differentiate it; yield a gradient per input and parameter."""
        leaves, outputs = self._rerun()
        targets = [t for t, is_needed in zip((*leaves, *self.parameters), needed, strict=True) if is_needed]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        gradients: Iterator[Tensor | None] = iter(())
        if pairs and targets:
            with ExitStack() as stack:
                stack.enter_context(without_tensor_hooks(self.parameters))
                if self._te is not None:
                    provider, te_state = self._te
                    stack.enter_context(provider.backward(te_state, is_update_due=self._is_update_due))
                outs, grad_outs = zip(*pairs, strict=True)
                del pairs, outputs, leaves
                gradients = iter(torch.autograd.grad(outs, targets, grad_outs, allow_unused=True))
        for is_needed in needed:
            yield next(gradients, None) if is_needed else None

    def _rerun(self) -> tuple[list[Tensor], list[Tensor]]:
        function, args, kwargs = self._held.restore()
        leaves, args, kwargs = _with_leaves(args, kwargs, None)
        with ExitStack() as stack:
            stack.enter_context(self._held.as_in_forward())
            if self._te is not None:
                provider, te_state = self._te
                stack.enter_context(provider.rerun(te_state, keeps_graph=True))
            stack.enter_context(torch.enable_grad())
            result = function(*args, **kwargs)
        outputs = [value for value in _pytree.tree_leaves(result) if isinstance(value, Tensor)]
        kinds = [(t.shape, t.dtype) if t.requires_grad else None for t in outputs]
        if kinds != self._outputs:
            raise RerunMismatchError(
                f"{self._held.name}, wrapped with retain_graph=True, returned other tensors when it was run again.\n"
                f"Forward: {_described(self._outputs)}. Rerun: {_described(kinds)}.\nIt must do the same in both runs."
            )
        return leaves, outputs


class _Node(torch.autograd.Function):
    """The single node of a region."""

    @staticmethod
    def forward(ctx: Any, region: _FreshRegion, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = region.forward(tensors[:num_inputs])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, d in zip(outputs, region.is_differentiable, strict=True) if not d))
        ctx.save_for_backward(torch.empty(0))  # the outer hooks replace it by the region
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise TransformerEngineError(
                "create_graph=True through a module that actckpt.te.wrap(retain_graph=True) wrapped: the backward of "
                "TransformerEngine's modules has no derivative. Use retain_graph=True for further backwards of the "
                "same graph, or torch's own modules where second derivatives are needed."
            )
        ctx.saved_tensors  # noqa: B018 - sets _unpacked, or raises as autograd does where the graph was freed
        region, _unpacked.region = _unpacked.region, None
        return (None, None, *region.backward(grads, ctx.needs_input_grad[2:]))


_unpacked = threading.local()


def _unpack_region(region: _FreshRegion) -> Tensor:
    _unpacked.region = region  # autograd copies the returned tensor
    return torch.empty(0)


def _drop(tensor: Tensor) -> None:
    """Pack hook of the forward."""


def _never(packed: None) -> Tensor:
    raise TransformerEngineError(
        "A module wrapped with retain_graph=True runs a backward inside its forward, and what it saved is not kept.\n"
        "Wrap its submodules instead, or use policy='recompute' without retain_graph."
    )


def _with_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[Tensor] | None
) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
    """Replace each tensor that requires grad by a leaf, one per tensor; `inputs` are the tensors to look for."""
    values, spec = _pytree.tree_flatten((args, kwargs))
    made: dict[int, Tensor] = {id(tensor): tensor.detach().requires_grad_() for tensor in inputs or ()}
    for i, value in enumerate(values):
        if _requires_grad(value):
            if id(value) not in made:
                made[id(value)] = value.detach().requires_grad_()
            values[i] = made[id(value)]
    args, kwargs = _pytree.tree_unflatten(values, spec)
    return list(made.values()), args, kwargs


def _check_graph(outputs: list[Tensor], known: set[int]) -> None:
    """Raise if the graph of `outputs` ends at an unknown leaf."""
    nodes: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None and id(leaf) not in known:
            raise _lost_gradient(f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _lost_gradient(what: str) -> TransformerEngineError:
    return TransformerEngineError(
        f"A module wrapped with retain_graph=True reads {what}, which requires grad but is neither an argument (nor in "
        "a tuple, list or dict among them) nor a parameter of the module: its gradient would be lost.\nPass it as an "
        "argument, or make it a parameter. Under FSDP use parameters that stay the module's own (fully_shard)."
    )


def _described(kinds: Sequence[tuple[torch.Size, torch.dtype] | None]) -> str:
    return ", ".join("no grad" if kind is None else f"{tuple(kind[0])} {kind[1]}" for kind in kinds) or "none"
