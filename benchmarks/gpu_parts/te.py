"""TransformerEngine: blocks of the shape of Llama 3 8B's in bfloat16 and FP8, with fused attention or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import actckpt
from gpu_parts.models import LLAMA, Sizes
from gpu_parts.rows import Machine, Row, Rows, medians

__all__ = ["measure"]

Forward = Callable[[torch.Tensor], torch.Tensor]
_STEPS = 4
#: With unfused attention excluded, TransformerEngine raises where it has no other.
_FUSED_ONLY = {"NVTE_UNFUSED_ATTN": "0", "NVTE_FUSED_ATTN": "1"}


def _forwards(te: Any, model: Sequence[Any]) -> dict[str, Callable[[], Forward]]:
    """Return, by method, what prepares the model and returns its forward."""

    def per_layer(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = call(layer, x)
            return x

        return forward

    def offloaded(layer: Any, x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload():
            return layer(x)  # type: ignore[no-any-return]

    def te_offload() -> Forward:
        context, synchronize = te.get_cpu_offload_context(
            enabled=True, num_layers=max(len(model) - 2, 1), model_layers=len(model)
        )

        def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
            with context:
                x = layer(x)
            return synchronize(x)  # type: ignore[no-any-return]

        return per_layer(call)

    def wrapped(policy: Any, **options: Any) -> Forward:
        actckpt.te.wrap(model, policy, **options)
        return per_layer(lambda layer, x: layer(x))

    return {
        "plain": lambda: per_layer(lambda layer, x: layer(x)),
        "te.checkpoint, reentrant": lambda: per_layer(te.checkpoint),
        "te.checkpoint, hooks": lambda: per_layer(lambda layer, x: te.checkpoint(layer, x, use_reentrant=False)),
        "actckpt checkpoint": lambda: per_layer(actckpt.te.checkpoint),
        "actckpt policy": lambda: wrapped({"self_attention": "offload", "layernorm_mlp": "recompute"}),
        "actckpt checkpoint, offloaded inputs": lambda: per_layer(
            lambda layer, x: actckpt.checkpoint(layer, x, offload_inputs=True)
        ),
        "actckpt retain_graph": lambda: wrapped("recompute", retain_graph=True),
        "TransformerEngine's CPU offload": te_offload,
        "actckpt offload": lambda: per_layer(offloaded),
    }


def _train(rows: Rows, te: Any, method: str, kind: str, sizes: Sizes) -> Row:
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    recipe = DelayedScaling() if kind == "FP8" else None
    options: dict[str, Any] = {"num_gqa_groups": sizes.kv_heads, "normalization": "RMSNorm", "activation": "swiglu"}
    options |= {"params_dtype": torch.bfloat16, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False}
    shape = sizes.dim, sizes.hidden, sizes.heads
    model = torch.nn.ModuleList(te.TransformerLayer(*shape, **options) for _ in range(sizes.layers))
    device = rows.machine.device
    x = torch.randn(sizes.tokens, 1, sizes.dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    forward = _forwards(te, model)[method]()

    def step() -> None:
        model.zero_grad(set_to_none=False)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = forward(x)
        y.float().square().mean().backward()

    for _ in range(2):
        step()
    return medians(rows.run(step) for _ in range(_STEPS))


def measure(rows: Rows) -> None:
    """Write a row per method, in bfloat16 and in FP8."""
    os.environ.update(_FUSED_ONLY)
    sizes = LLAMA._replace(layers=4)
    try:
        te = _transformer_engine(rows.machine)
    except (ImportError, OSError) as error:
        rows.measure("TransformerEngine", partial(dict, not_installed=str(error)))
        return
    for kind in ("bf16", "FP8"):
        for method in _forwards(te, []):
            rows.measure(f"{kind}: {method}", partial(_train, rows, te, method, kind, sizes), sizes=sizes._asdict())


def _transformer_engine(machine: Machine) -> Any:
    if machine.is_rehearsal:
        raise ImportError("no TransformerEngine for a simulated device")
    import transformer_engine.pytorch as te

    return te
