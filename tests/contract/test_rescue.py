"""What runs out of memory runs again, and nobody can tell from the results; or the error says who holds what."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch import Tensor
from torch.nn import functional

import actckpt


class _Failing(torch.nn.Module):
    """Runs out of memory in some of its calls, 1 is the first one."""

    def __init__(self, *calls: int, fail: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.calls, self.num_calls, self.fail = calls, 0, fail

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls in self.calls:
            if self.fail is None:
                raise torch.OutOfMemoryError("no memory left")
            self.fail()
        return x


class _Block(torch.nn.Module):
    """Draws, moves statistics, changes buffers in each way, and appends to a list that it is given."""

    def __init__(self, *calls: int, fail: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hidden_mean", torch.zeros(8))
        self.noise = torch.Generator()
        self.failing = _Failing(*calls, fail=fail)

    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        h = functional.dropout(self.norm(self.first(x)), 0.3)
        h = h + torch.randn(h.shape, generator=self.noise)
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        self.hidden_mean.data.mul_(0.9).add_(h.detach().mean(0))
        if losses is not None:
            losses.append(h.square().mean())
        h = self.failing(h)
        return x + self.last(functional.gelu(h)) - self.mean.clone() - self.hidden_mean.clone()


class _Model(torch.nn.Module):
    def __init__(self, *calls: int, fail: Callable[[], object] | None = None, has_losses: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([_Block(), _Block(*calls, fail=fail), _Block()])
        self.has_losses = has_losses

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, losses) if self.has_losses else layer(x)
        return x.square().sum() + sum(losses)


def _results(model: _Model, num_steps: int = 2) -> list[Tensor]:
    """Train, and return gradients, buffers, and the next random number."""
    torch.manual_seed(1)
    for _ in range(num_steps):
        model(torch.randn(4, 8)).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*gradients, *model.buffers(), torch.rand(1)]


_POLICIES: dict[str, Any] = {
    "kept": "keep",
    "rerun": "recompute",
    "matmuls": "matmuls",
    "replayed": [],
    "offload": "offload",
}


@pytest.mark.parametrize("has_losses", [False, True], ids=["tensors", "a list"])
@pytest.mark.parametrize("call", [1, 2], ids=["first call", "second call"])
@pytest.mark.parametrize("policy", _POLICIES)
def test_a_forward_that_ran_out_of_memory_finds_what_the_first_one_found(
    policy: str, call: int, has_losses: bool
) -> None:
    model = _Model(*(call if policy != "rerun" else 2 * call - 1,), has_losses=has_losses)
    actckpt.apply(model, _POLICIES[policy], blocks=_Block)
    actckpt.reset_stats()
    assert_equal(_results(model), _results(_Model(has_losses=has_losses)))
    assert actckpt.stats().rescued_forwards == 1
    report = actckpt.report(model)
    assert report.forwards_rescued == {"layers.1": 1}
    assert "layers.1 (1)" in str(report)


def test_the_allocator_of_the_cpu_counts() -> None:
    model = _Model(1, fail=lambda: torch.empty(1 << 60, dtype=torch.uint8, device="cpu"))
    actckpt.apply(model, "keep", blocks=_Block)
    actckpt.reset_stats()
    assert_equal(_results(model), _results(_Model()))
    assert actckpt.stats().rescued_forwards == 1


def test_a_rerun_that_runs_out_of_memory_runs_once_more() -> None:
    model = _Model(2)
    actckpt.apply(model, blocks=_Block)
    actckpt.reset_stats()
    assert_equal(_results(model), _results(_Model()))
    assert (actckpt.stats().rescued_forwards, actckpt.stats().rescued_recomputations) == (0, 1)


@pytest.mark.parametrize("calls", [(1, 2), (2, 3)], ids=["forward", "rerun"])
def test_nothing_runs_a_third_time(calls: tuple[int, int]) -> None:
    model = _Model(*calls)
    actckpt.apply(model, blocks=_Block)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
        _results(model)
    assert model.layers[1].failing.num_calls == calls[1]  # type: ignore[union-attr]


def _text(error: BaseException) -> str:
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


class _ChangesItsInput(_Block):
    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        return super().forward(x.clone().add_(1) if self.failing.num_calls else x.mul_(2))


class _ChangesAParameter(_Block):
    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        with torch.no_grad():
            self.last.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(_ChangesItsInput, "changed a tensor that it was given"), (_ChangesAParameter, "changed a parameter or buffer")],
)
def test_a_block_that_changed_what_it_was_given_does_not_run_again(kind: type[_Block], why: str) -> None:
    model = _Model()
    model.layers[1] = block = kind(1)
    actckpt.apply(model, "keep", blocks=_Block)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left") as raised:
        _results(model)
    assert block.failing.num_calls == 1
    assert f"'layers.1' ran out of memory. It did not run again: it had {why}" in _text(raised.value)


def test_a_block_inside_of_a_checkpoint_leaves_it_to_that() -> None:
    model = _Model(2)
    actckpt.apply(model, "keep", blocks=_Block)
    expected = _Model()
    torch.manual_seed(1)
    actckpt.checkpoint(model, torch.randn(4, 8)).backward()
    torch.manual_seed(1)
    expected(torch.randn(4, 8)).backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_rescue_can_be_switched_off() -> None:
    actckpt.configure(rescue=False)
    try:
        for call in (1, 2):
            model = _Model(call)
            actckpt.apply(model, blocks=_Block)
            with pytest.raises(torch.OutOfMemoryError):
                _results(model)
            assert model.layers[1].failing.num_calls == call  # type: ignore[union-attr]
    finally:
        actckpt.configure(rescue=True)
    with pytest.raises(ValueError, match="rescue='no'"):
        actckpt.configure(rescue="no")  # type: ignore[arg-type]


def _row(text: str, name: str) -> dict[str, str]:
    """Return a row of the table by the names of its columns."""
    lines = [re.split(r"\s\s+", line.strip()) for line in text.splitlines()]
    (columns,) = (line for line in lines if line[0] == "module")
    (cells,) = (line for line in lines if line[0] == name)
    return dict(zip(columns, cells, strict=True))


def test_any_program_can_say_which_modules_hold_how_much() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(256, 64)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(torch.OutOfMemoryError) as raised, actckpt.explain_oom(model, optimizer):
        output = model(x)
        _Failing(1)(output)
    text = _text(raised.value)
    assert text.startswith("no memory left\nactckpt: what holds the memory of cpu: ")
    assert len(text.splitlines()) <= 11
    row = _row(text, "*.*")
    layer = (64 * 64 + 64) * 4
    assert row["parameters"] == row["gradients"] == f"{3 * layer / 1024:.2f} KiB"
    assert row["optimizer"] == f"{(6 * layer + 6 * 4) / 1024:.2f} KiB"
    assert row["kept"] == f"{6 * 256 * 64 * 4 / 1024:.2f} KiB"  # inputs of three layers, and of three activations


def test_inputs_of_checkpoints_are_told_from_what_is_kept() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))
    actckpt.apply(model)
    with pytest.raises(torch.OutOfMemoryError) as raised, actckpt.explain_oom(model):
        output = model(torch.randn(256, 64))
        _Failing(1)(output)
    row = _row(_text(raised.value), "*.*")
    assert (row["kept"], row["inputs"]) == ("0 B", "192.00 KiB")


def test_an_error_of_another_kind_is_left_alone() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as raised, actckpt.explain_oom(model):
        raise RuntimeError("something else")
    assert _text(raised.value) == "something else"
    with pytest.raises(TypeError, match="explain_oom: model is"), actckpt.explain_oom("model"):  # type: ignore[arg-type]
        pass
