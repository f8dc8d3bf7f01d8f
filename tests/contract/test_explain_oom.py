"""Out-of-memory errors get a table of memory by module."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

import actckpt


def _run_out_of_memory(output: torch.Tensor) -> None:
    """Raise the error while a graph is alive."""
    assert output.grad_fn is not None
    raise torch.OutOfMemoryError("no memory left")


def _text(error: BaseException) -> str:
    return "\n".join((str(error), *getattr(error, "__notes__", ())))


def _row(text: str, name: str) -> dict[str, str]:
    """Return a row of the table by the names of its columns."""
    lines = [re.split(r"\s\s+", line.strip()) for line in text.splitlines()]
    (columns,) = (line for line in lines if line[0] == "module")
    (cells,) = (line for line in lines if line[0] == name)
    return dict(zip(columns, cells, strict=True))


def test_the_table_has_what_modules_and_optimizers_hold() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(256, 64)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(torch.OutOfMemoryError) as raised, actckpt.explain_oom(model, optimizer):
        _run_out_of_memory(model(x))
    text = _text(raised.value)
    assert text.startswith("no memory left\nactckpt: memory by module on cpu: ")
    assert len(text.splitlines()) <= 11
    row = _row(text, "*.*")
    layer = (64 * 64 + 64) * 4
    assert row["parameters"] == row["gradients"] == f"{3 * layer / 1024:.2f} KiB"
    assert row["optimizer"] == f"{(6 * layer + 6 * 4) / 1024:.2f} KiB"
    assert row["saved"] == f"{6 * 256 * 64 * 4 / 1024:.2f} KiB"  # inputs of three layers, and of three activations


def test_inputs_of_checkpoints_have_a_column() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(3)))
    actckpt.apply(model)
    with pytest.raises(torch.OutOfMemoryError) as raised, actckpt.explain_oom(model):
        _run_out_of_memory(model(torch.randn(256, 64)))
    row = _row(_text(raised.value), "*.*")
    assert (row["saved"], row["inputs"]) == ("0 B", "192.00 KiB")


@pytest.mark.parametrize("budget", ["80%", "100%"])
def test_a_block_under_a_budget_gets_the_table_by_itself(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    actckpt.apply(model, activation_budget=budget, optimizer=optimizer, race=False)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(256, 64)).sum().backward()
        optimizer.step()

    def run_out_of_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch.nn.functional, "gelu", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.randn(256, 64))
    row = _row(_text(raised.value), "*.*")
    assert row["optimizer"] != "0 B" and row["parameters"] != "0 B"


def test_other_errors_get_no_table() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError) as raised, actckpt.explain_oom(model):
        raise RuntimeError("something else")
    assert _text(raised.value) == "something else"
    with pytest.raises(TypeError, match="explain_oom: model is"), actckpt.explain_oom("model"):  # type: ignore[arg-type]
        pass


def test_an_error_in_the_table_does_not_hide_the_error() -> None:
    class Broken(torch.nn.Linear):
        def named_buffers(self, *args: object, **kwargs: object) -> Iterator[tuple[str, torch.Tensor]]:
            raise ValueError("broken")

    model = Broken(2, 2)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory left") as raised, actckpt.explain_oom(model):
        _run_out_of_memory(model(torch.randn(2, 2)))
    assert _text(raised.value).endswith("actckpt: there is no table of memory by module: ValueError: broken")


def test_the_innermost_table_stays_the_only_one() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(torch.OutOfMemoryError) as raised, actckpt.explain_oom(model), actckpt.explain_oom(model):
        _run_out_of_memory(model(torch.randn(2, 2)))
    assert _text(raised.value).count("actckpt: ") == 1
