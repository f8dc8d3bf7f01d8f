"""Ways to train a model: plainly, with torch, with other libraries where they are installed, and with actckpt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils import checkpoint as torch_checkpoint

import actckpt

__all__ = [
    "CHECKPOINT",
    "EAGER",
    "KEEPS_MATMULS",
    "MATMULS",
    "OFFLOADED_INPUTS",
    "PLAIN",
    "REPLAYS_ALL",
    "TRL_CHECKPOINT",
    "Method",
    "budgets",
    "compiled",
    "selective",
]

Context = Callable[[], AbstractContextManager[Any]]
#: Changes a model and its blocks; returns what is around each forward, if anything is.
Prepare = Callable[[nn.Module, Sequence[Any]], Context | None]


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: in rows.
        prepare: called once, with a model of its own.
        spans_backward: its context is around backward, too.
        budget: it is `actckpt.apply(budget=...)`.
        budget_share: the same, so far from the smallest budget (0) to the plain peak (1).
        is_compiled: its blocks are compiled.
    """

    name: str
    prepare: Prepare = lambda model, blocks: None
    spans_backward: bool = False
    budget: int | str | None = None
    budget_share: float | None = None
    is_compiled: bool = False


def _around_blocks(call: Callable[..., Any], **options: Any) -> Prepare:
    """Return what replaces `block(x, ...)` by `call(block, x, ..., **options)`."""

    def replaced(block_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:  # torch does not compile a `partial`
            return call(block_forward, *args, **options, **kwargs)

        return forward

    def prepare(model: nn.Module, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.forward = replaced(block.forward)

    return prepare


_checkpointed = _around_blocks(torch_checkpoint.checkpoint, use_reentrant=False)


def selective(*names: str) -> Prepare:
    """Return torch's selective checkpoint, which keeps the results of these operators of aten."""
    kept = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, kept)
    return _around_blocks(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)


#: Linear layers run `mm`, with a bias `addmm`.
MATMULS = ("mm", "addmm", "bmm")
_ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))


def _trl(model: nn.Module, blocks: Sequence[Any]) -> Context:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(model)
    return lambda: context


def _trl_checkpointed(model: nn.Module, blocks: Sequence[Any]) -> Context:
    _checkpointed(model, blocks)
    return _trl(model, blocks)


def _torchtune(model: nn.Module, blocks: Sequence[Any]) -> Context:
    from torchtune.training import get_act_offloading_ctx_manager

    vars(model)["output"] = model.get_submodule("lm_head")  # there it looks for the head, whose tensors stay
    context = get_act_offloading_ctx_manager(model, True)
    return lambda: context


def _torchtune_checkpointed(model: nn.Module, blocks: Sequence[Any]) -> Context:
    _checkpointed(model, blocks)
    return _torchtune(model, blocks)


def _reentrant(function: Any) -> Prepare:
    """Return a checkpoint that is an autograd function of `(run, preserve_rng_state, *tensors)`."""

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function.apply(partial(forward, **kwargs), True, *args)

    return _around_blocks(call)


def _unsloth(model: nn.Module, blocks: Sequence[Any]) -> None:
    from unsloth_zoo import gradient_checkpointing

    gradient_checkpointing.initialize_unsloth_gradient_checkpointing(next(model.parameters()).dtype)
    _reentrant(gradient_checkpointing.UnslothCheckpointFunction)(model, blocks)


def _axolotl(model: nn.Module, blocks: Sequence[Any]) -> None:
    from axolotl.monkeypatch.activation_offload_checkpoint import HiddenStatesOffloadCheckpoint

    _reentrant(HiddenStatesOffloadCheckpoint)(model, blocks)


def _ours(policy: Any, **options: Any) -> Prepare:
    def prepare(model: nn.Module, blocks: Sequence[Any]) -> None:
        actckpt.apply(model, policy, **options)

    return prepare


PLAIN = Method("plain")
CHECKPOINT = Method("torch checkpoint", _checkpointed)
TRL_CHECKPOINT = Method("TRL offload, checkpoint", _trl_checkpointed, spans_backward=True)
KEEPS_MATMULS = Method("actckpt keeps matmuls", _ours("matmuls"))
REPLAYS_ALL = Method("actckpt replays all", _ours([]))
OFFLOADED_INPUTS = Method("actckpt checkpoint, offloaded inputs", _ours("recompute", offload_inputs=True))
EAGER = (
    CHECKPOINT,
    Method("torch selective, keeps matmuls", selective(*MATMULS)),
    Method("torch selective, keeps matmuls and attention", selective(*MATMULS, *_ATTENTION)),
    Method("actckpt checkpoint", _ours("recompute")),
    KEEPS_MATMULS,
    TRL_CHECKPOINT,
    Method("torchtune offload, checkpoint", _torchtune_checkpointed),
    Method("Unsloth", _unsloth),
    Method("axolotl hidden states", _axolotl),
    OFFLOADED_INPUTS,
    Method("TRL offload", _trl, spans_backward=True),
    Method("torchtune offload", _torchtune),
    Method("actckpt offload", lambda model, blocks: actckpt.offload),
    Method("save_on_cpu", lambda model, blocks: partial(save_on_cpu, pin_memory=True)),
)


def _compiled(backend: str, prepare: Prepare | None = None, *, budget: float = 1.0) -> Prepare:
    """Return what compiles blocks, with a compiler of its own: graphs of other methods are not used again."""

    def compiler(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        with config.patch(activation_memory_budget=budget):
            return lookup_backend(backend)(graph, inputs)

    def compile_blocks(model: nn.Module, blocks: Sequence[Any]) -> Context | None:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64
        context = None if prepare is None else prepare(model, blocks)
        for block in blocks:
            block.compile(backend=compiler)
        return context

    return compile_blocks


def compiled(backend: str) -> tuple[Method, ...]:
    """Return methods whose blocks are compiled."""
    prepares = {"compiled": _compiled(backend), "compiled, checkpoint": _compiled(backend, _checkpointed)}
    for share in (0.2, 0.5, 0.8):
        prepares[f"compiled, activation_memory_budget={share}"] = _compiled(backend, budget=share)
    return tuple(Method(name, prepare, is_compiled=True) for name, prepare in prepares.items())


#: From the smallest budget to the plain peak. Of a Llama of 8 blocks, 8,192 tokens: peaks of 9.4, 10.7 and 13.2 GiB.
SHARES = (0.02, 0.15, 0.4)


def budgets(shares: Sequence[float] = SHARES, *, backend: str | None = None) -> tuple[Method, ...]:
    """Return actckpt under budgets, around compiled blocks if a compiler is given."""
    if backend is None:
        return tuple(Method(f"actckpt budget {share}", budget_share=share) for share in shares)
    return tuple(
        Method(f"compiled, actckpt budget {share}", _compiled(backend), budget_share=share, is_compiled=True)
        for share in shares
    )
