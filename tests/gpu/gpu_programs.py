"""What the GPU tests of checkpoints, budgets and graphs train, by which methods, and how they compare."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from oracle import assert_equal, plain, theirs
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import actckpt
from actckpt import Action
from actckpt.policies import PerOp

DEVICE = "cuda"
aten = torch.ops.aten

#: Matrix products, and attention on a GPU: what selective checkpointing saves.
SAVED = [
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]

#: Calls a function with arguments in some way: plainly, by torch's checkpoint, by ours.
Method = Callable[..., Any]


class Block(nn.Module):
    """A transformer block with dropout, also in its attention if so told."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.1, attention_dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout, self.attention_dropout = heads, dropout, attention_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, width) to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attention_dropout, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


def stack(depth: int = 3, width: int = 128, seed: int = 1, **options: Any) -> nn.Sequential:
    """Return blocks in a row, with the same parameters each time."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width, **options) for _ in range(depth))).to(DEVICE)


def leaf(*shape: int, **options: Any) -> Tensor:
    """Return a random tensor of the device that requires grad."""
    return torch.randn(*shape, device=DEVICE, requires_grad=True, **options)


def _in_region(policy: Any, function: Callable[..., Any], *args: Any) -> Any:
    with actckpt.region(policy):
        return function(*args)


def _policy(policy: Any, **options: Any) -> Method:
    return partial(actckpt.checkpoint, policy=policy, **options)


_OFFLOADS_MATMULS = PerOp(dict.fromkeys(SAVED, Action.OFFLOAD), default=Action.RECOMPUTE)

#: Every kind of policy.
OURS: dict[str, Method] = {
    "rerun": actckpt.checkpoint,
    "rerun, inputs away": partial(actckpt.checkpoint, offload_inputs=True),
    "replay": _policy([]),
    "replay, inputs away": _policy([], offload_inputs=True),
    "matmuls": _policy("matmuls"),
    "attention": _policy("attention"),
    "dots": _policy("dots_with_no_batch_dims"),
    "list": _policy(SAVED),
    "per operator": _policy(_OFFLOADS_MATMULS),
    "places": _policy({"**::aten.addmm": "keep", "**::aten.gelu": "offload"}),
    "offload": _policy("offload"),
    "prefer offload": _policy("prefer_offload"),
    "function": _policy(lambda info: "keep" if info.nbytes < 1 << 20 else "recompute"),
    "contexts": partial(
        actckpt.checkpoint, context_fn=partial(create_selective_checkpoint_contexts, SAVED), use_reentrant=False
    ),
    "region": partial(_in_region, "recompute"),
    "region, offload": partial(_in_region, "offload"),
}
#: One per way of bringing tensors back.
FEW = {name: OURS[name] for name in ("rerun", "replay", "matmuls", "per operator", "rerun, inputs away")}

THEIRS: dict[str, Method] = {
    "rerun": theirs,
    "list": partial(theirs, context_fn=partial(create_selective_checkpoint_contexts, SAVED)),
}


def states() -> list[Tensor]:
    """Return the states of the default generators of CPU and GPU."""
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def repeated(run: Callable[[], Any]) -> Any:
    """Return what a plain run gives; skips the test where a second one gives something else."""
    expected = run()
    try:
        assert_equal(run(), expected)
    except AssertionError as error:
        pytest.skip(f"plain training is not deterministic here: {error}")
    return expected


def assert_as_plain(program: Callable[[Method], Any], method: Method) -> None:
    """Run `program` plainly and three times by a method from one seed: results and random states are bit-equal.

    The first run by a method is audited, the next one is not, and by the third the order of backward is known. Skips
    what is not even the same plainly, twice in a row.
    """
    expected = repeated(lambda: _run(program, plain))
    for number in range(3):
        try:
            assert_equal(_run(program, method), expected)
        except AssertionError as error:
            raise AssertionError(f"run {number} differs from plain training: {error}") from error


def _run(program: Callable[[Method], Any], method: Method) -> Any:
    torch.manual_seed(7)
    return program(method), states()


def peak_bytes(step: Callable[[], object]) -> int:
    """Run a step and return the most that was allocated while it ran, with what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
