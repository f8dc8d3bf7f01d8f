"""`actckpt.te.checkpoint` takes what `transformer_engine.pytorch.checkpoint` takes, also without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    # Without a warning: a bool that is the function's own argument.
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
