"""`actckpt.te.checkpoint` takes what `transformer_engine.pytorch.checkpoint` takes, also without it."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from internals.notices import forget_told
from oracle import assert_equal, leaf

import actckpt


def test_without_transformer_engine_it_is_actckpts_checkpoint() -> None:
    x = leaf(3)
    actckpt.te.checkpoint(lambda a, *, scale: (a * scale).exp(), x, scale=2.0).sum().backward()
    assert_equal(x.grad, 2 * (2 * x.detach()).exp())


def test_the_functions_own_keywords_are_passed_on() -> None:
    def function(x: torch.Tensor, *, early_stop: int, policy: str, preserve_rng_state: str) -> torch.Tensor:
        assert (early_stop, policy, preserve_rng_state) == (1, "a", "b")
        return x.exp()

    actckpt.te.checkpoint(function, leaf(3), early_stop=1, policy="a", preserve_rng_state="b").sum().backward()


class Tracker:
    """A tracker of one generator, as Megatron's: states by name."""

    def __init__(self) -> None:
        self.states = {"data": torch.Generator().get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def test_positional_options_of_old_versions_warn_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_told(monkeypatch)
    x, tracker = leaf(3), Tracker()
    with pytest.warns(DeprecationWarning, match="by name"):
        y = actckpt.te.checkpoint(lambda a, b: (a * b).exp(), False, lambda: tracker, None, x, 2.0)
    y.sum().backward()
    assert_equal(x.grad, 2 * (2 * x.detach()).exp())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a bool that is the function's own argument
        actckpt.te.checkpoint(lambda flag, a: a.exp() if flag else a, True, x).sum().backward()


def test_use_reentrant_is_ignored_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_told(monkeypatch)
    with pytest.warns(UserWarning, match="use_reentrant=True is ignored") as caught:
        for _ in range(3):
            actckpt.te.checkpoint(torch.exp, leaf(3), use_reentrant=True).sum().backward()
    assert len(caught) == 1
    actckpt.te.checkpoint(torch.exp, leaf(3), use_reentrant=False).sum().backward()


def test_context_fn_is_entered_also_without_grad_mode() -> None:
    log: list[str] = []

    @contextmanager
    def noted(name: str) -> Iterator[None]:
        log.append(name)
        yield

    def context_fn() -> Any:
        return noted("forward"), noted("rerun")

    actckpt.te.checkpoint(torch.exp, leaf(3), context_fn=context_fn).sum().backward()
    with torch.no_grad():
        actckpt.te.checkpoint(torch.exp, leaf(3), context_fn=context_fn)
    assert log == ["forward", "rerun", "forward"]


@pytest.mark.parametrize(
    ("args", "match"), [((), "no argument"), ((3.0,), "it is float"), ((torch.ones(2).to_sparse(),), "dense tensor")]
)
def test_distributing_needs_groups_and_a_tensor(args: Any, match: str, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        actckpt.te.checkpoint(torch.exp, leaf(3), distribute_saved_activations=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=match):
        actckpt.te.checkpoint(lambda *_: None, *args, distribute_saved_activations=True)


_RANK = """
import gc, sys, weakref
import torch
import torch.distributed as dist
import actckpt

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
torch.set_num_threads(1)
layouts = {
    "whole": lambda x: x,
    "odd": lambda x: x[:3, :5].contiguous(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "bfloat16": lambda x: x.bfloat16(),
    "one": lambda x: x[:1, :1].contiguous(),
    "view": lambda x: x[1:],
}
for name, layout in layouts.items():
    torch.manual_seed(1)
    weight = torch.randn(8, 8, requires_grad=True)
    source = torch.randn(6, 8, requires_grad=True)

    def function(x, weight, scale):
        strides.append(x.stride())
        return (torch.nn.functional.dropout(x.float(), 0.3) @ weight[: x.shape[1]] * scale).exp()

    results = []
    for distribute in (False, True):
        torch.manual_seed(2)
        strides = []
        x = layout(source) * 1  # not a leaf: nobody but the region holds it
        expected_stride = x.stride()
        y = actckpt.te.checkpoint(
            function, x, weight, 2.0, distribute_saved_activations=distribute, tp_group=dist.group.WORLD
        )
        held = weakref.ref(x)
        del x
        gc.collect()
        if distribute:
            assert held() is None, f"{name}: the region keeps the whole input"
        grads = [torch.autograd.grad(y.square().sum(), (source, weight), retain_graph=True) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*grads))
        assert set(strides) == {expected_stride}, (name, strides)
        results.append((y.detach(), *grads[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results)), name
dist.destroy_process_group()
print("same")
"""


def test_a_distributed_input_gives_the_same_gradients_on_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    for out, err in outputs:
        # gloo may print lines of its own before
        assert out.decode().splitlines()[-1:] == ["same"], err.decode()[-3000:]
