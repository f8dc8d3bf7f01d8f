"""Inductor's code on a GPU: what compiles in one graph has the gradients of the same compiled function without us.

Inductor may fuse other operators where it computes some again, so gradients are compared within a few units in the last
place of float32 (relative to the largest of a gradient), and bit for bit nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from gpu_programs import DEVICE, SAVED, Method, leaf, peak_bytes, repeated
from oracle import assert_equal, plain
from torch import Tensor, nn

import actckpt
from actckpt.policies import PerOp

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("default"),  # of the compiler, about itself
]

_TOLERANCE = 1e-5
_POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "matmuls": "matmuls",
    "per operator": PerOp(dict.fromkeys(SAVED, "keep"), default="recompute"),
}


class _Block(nn.Module):
    """Saves much that is cheap to compute again, and no random numbers: the compiler draws others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(F.gelu(h).tanh() * torch.sigmoid(h))


def _model(depth: int = 3, width: int = 256) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(_Block(width) for _ in range(depth))).to(DEVICE)


def _step(call: Callable[[Tensor], Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(call(x).square().mean(), [x, *model.parameters()]))


def _assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        difference, largest = (one - other).abs().max().item(), other.abs().max().item()
        assert difference <= _TOLERANCE * largest, f"gradient {number}: off by {difference}, largest {largest}"


def _blocks_by(call: Method, model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for block in model:
            x = call(block, x)
        return x

    return torch.compile(function, fullgraph=True)


@pytest.mark.parametrize("is_applied", [False, True], ids=["checkpoint", "apply"])
@pytest.mark.parametrize("name", _POLICIES)
def test_what_is_compiled_with_checkpoints_needs_less(name: str, is_applied: bool) -> None:
    x, policy = leaf(4096, 256), _POLICIES[name]
    found, peaks = {}, {}
    for is_ours in (False, True):
        model, call = _model(), plain
        if is_ours and is_applied:
            assert actckpt.apply(model, policy) == ("0", "1", "2")
        elif is_ours:
            call = partial(actckpt.checkpoint, policy=policy)
        compiled = torch.compile(model, fullgraph=True) if is_applied else _blocks_by(call, model)
        found[is_ours] = _step(compiled, x, model)
        peaks[is_ours] = peak_bytes(lambda: _step(compiled, x, model))  # noqa: B023 - called at once
    _assert_close(found[True], found[False])
    assert peaks[True] < 0.9 * peaks[False], peaks


@pytest.mark.parametrize("policy", ["recompute", [], "offload"], ids=str)
def test_compiled_blocks_inside_of_eager_checkpoints(policy: Any) -> None:
    """Bits of the same compiled block: reruns and reloads go through the same kernels."""
    model, x = _model(), leaf(4096, 256)
    compiled = [torch.compile(block) for block in model]

    def run(call: Method) -> list[Tensor]:
        def function(x: Tensor) -> Tensor:
            for block in compiled:
                x = call(block, x)
            return x

        return _step(function, x, model)

    expected = repeated(lambda: run(plain))
    for _ in range(3):
        assert_equal(run(lambda f, x: actckpt.checkpoint(f, x, policy=policy)), expected)


def test_offloading_breaks_the_graph_and_moves() -> None:
    model, x = _model(), leaf(4096, 256)

    def function(x: Tensor) -> Tensor:
        with actckpt.offload(min_bytes=0):
            return model(x * 2).cos()

    compiled = torch.compile(function)
    actckpt.reset_stats()
    found = _step(compiled, x, model)
    assert actckpt.stats().offloaded_bytes > 0
    _assert_close(found, _step(lambda x: model(x * 2).cos(), x, model))


@pytest.mark.parametrize("policy", ["recompute", "attention", []], ids=str)
def test_flex_attention(policy: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention)
    torch.manual_seed(1)
    project = nn.Linear(256, 768).to(DEVICE)

    def block(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        return flex(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.01).transpose(1, 2).flatten(2)

    def run(call: Method) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * 256 * 256, device=DEVICE).view(2, 256, 256).requires_grad_()
        return list(torch.autograd.grad(call(block, x * 1.5).square().mean(), [x, *project.parameters()]))

    expected = repeated(lambda: run(plain))
    for _ in range(3):
        assert_equal(run(lambda f, x: actckpt.checkpoint(f, x, policy=policy)), expected)
