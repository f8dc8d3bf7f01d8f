"""CUDA graphs around checkpointed code: it works with the gradients of plain training, or one clear line says why not.

Each capture runs in a process of its own: one that fails leaves the generator and the allocator of its process behind.
`python test_graphs_gpu.py METHOD DROPOUT WHAT` is that process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from gpu_oracle import run_in_process
from gpu_programs import DEVICE, OURS, Method
from oracle import plain
from torch import Tensor, nn

import actckpt

_METHODS: dict[str, Method] = {
    **{name: OURS[name] for name in ("rerun", "replay", "per operator", "offload")},
    "rerun without random state": partial(actckpt.checkpoint, preserve_rng_state=False),
}
_WHAT = ("step", "callable")
_PLANS = ("plan", "plan that reruns")


@pytest.mark.parametrize("what", _WHAT)
@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
@pytest.mark.parametrize("method", [*_METHODS, *_PLANS, "under a budget"])
def test_a_captured_step(method: str, dropout: str, what: str) -> None:
    if method == "rerun without random state" and dropout != "0.0":
        pytest.skip("that draws other numbers, as it says")
    ran = run_in_process(__file__, method, dropout, what)
    found = json.loads(ran.stdout.splitlines()[-1])
    if method == "under a budget":
        assert "policy=plan" in str(found["error"]), found
        return
    if method == "rerun":
        assert "captured into a CUDA graph" in str(found["error"]), found
        assert "preserve_rng_state=False" in str(found["error"]), found
        return
    assert found["error"] is None and found["different"] == [], found
    assert method != "offload" or (found["kept_capturing"] > 0 and "graph are not offloaded" in ran.stderr), found
    if method in _PLANS:
        assert found["kept_capturing"] == 0 < found["replayed_operators"], found
        assert what == "callable" or found["rerun_regions"] == 0, found  # which warms up by itself


# The process of one capture


def _blocks(dropout: float) -> nn.Sequential:
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(dropout), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*parts).to(DEVICE)


class _Checkpointed(nn.Module):
    def __init__(self, call: Method, dropout: float) -> None:
        super().__init__()
        self.blocks, self.call = _blocks(dropout), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def _model(method: str, dropout: float) -> nn.Module:
    """Return blocks that are checkpointed by a method, or under a plan that moves nothing."""
    model = _Checkpointed(_METHODS.get(method, plain), dropout)
    x = torch.randn(1024, 256, device=DEVICE)

    def step() -> None:
        model(x).square().mean().backward()

    if method in (*_PLANS, "under a budget"):
        actckpt.configure(host_limit=0)
    if method == "under a budget":
        actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
    elif method in _PLANS:
        plan = actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
        if method == "plan that reruns":
            actions = tuple(dict.fromkeys(found, actckpt.Action.RECOMPUTE) for found in plan.actions)
            plan = dataclasses.replace(
                plan, actions=actions, rerun=tuple(name is not None for name in plan.blocks or ())
            )
        actckpt.apply(model, policy=plan)
    return model


def _captured_step(method: str, dropout: float) -> list[Tensor]:
    """Capture forward and backward together, and return the gradients of two replays."""
    model, x = _model(method, dropout), torch.randn(1024, 256, device=DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    actckpt.reset_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    found = []
    for seed in (3, 4):
        torch.cuda.manual_seed(seed)
        x.copy_(torch.linspace(-seed, seed, x.numel(), device=DEVICE).view_as(x))
        graph.replay()  # gradients are written, not added to: there were none at the capture
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    torch.cuda.synchronize()
    return found


def _captured_callable(method: str, dropout: float) -> list[Tensor]:
    """Capture forward and backward by `make_graphed_callables`, and return the gradients of two steps."""
    model, x = _model(method, dropout), torch.randn(1024, 256, device=DEVICE, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    found = []
    for seed in (3, 4):
        torch.cuda.manual_seed(seed)
        given = torch.linspace(-seed, seed, x.numel(), device=DEVICE).view_as(x).requires_grad_()
        model.zero_grad(set_to_none=True)
        graphed(given).square().mean().backward()
        found += [given.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    torch.cuda.synchronize()
    return found


def _main(method: str, dropout: str, what: str) -> None:
    run = {"step": _captured_step, "callable": _captured_callable}[what]
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected = run("plain", float(dropout))
    found: dict[str, Any] = {"error": None, "different": []}
    try:
        got = run(method, float(dropout))
    except Exception as error:  # what it says is judged by the test
        found["error"] = f"{type(error).__name__}: {error}"
    else:
        pairs = enumerate(zip(got, expected, strict=True))
        found["different"] = [number for number, (one, other) in pairs if not torch.equal(one, other)]
    stats = actckpt.stats()
    found |= {name: getattr(stats, name) for name in ("kept_capturing", "rerun_regions", "replayed_operators")}
    print(json.dumps(found), flush=True)
    os._exit(0)  # a broken capture may hang the end of the process


if __name__ == "__main__":
    _main(*sys.argv[1:])
