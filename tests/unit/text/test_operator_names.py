"""Names of operators: which there are, which a process lacks, and what some of them run as."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._text import operator_names


@pytest.mark.parametrize("pattern", ["aten.mm.default", "aten.mm", "aten.native_layer*"])
def test_a_name_that_exists_is_looked_for_once(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_names, "_found", set())
    listed: list[None] = []
    every = torch._C._dispatch_get_all_op_names()
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: listed.append(None) or every)
    assert operator_names.exists(pattern) and operator_names.exists(pattern)
    assert len(listed) == 1


def test_a_name_may_come_to_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not operator_names.exists("aten.no_such_operator")
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["aten::no_such_operator"])
    monkeypatch.setattr(operator_names, "_found", set())
    assert operator_names.exists("aten.no_such_operator")


def test_an_operator_that_the_loading_process_does_not_have_is_named() -> None:
    class Gone(type(torch.ops.aten.addmm.default)):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "mylib.gone.default"

    data = pickle.dumps(operator_names.portable([Gone()]))
    with pytest.raises(ValueError, match=r"There is no operator 'mylib\.gone\.default'"):
        pickle.loads(data)


_X = torch.rand(2, 4, 6, 6)


_CALLS: dict[str, Callable[[], Any]] = {
    "aten.linear": lambda: (F.linear(_X, _X[0, 0], _X[0, 0, 0]), F.linear(_X[0, 0], _X[0, 0])),
    "aten.matmul": lambda: (_X @ _X, _X[0, 0] @ _X[0, 0], _X[0, 0] @ _X[0, 0, 0], _X[0, 0, 0] @ _X[0, 0, 0]),
    "aten.einsum": lambda: torch.einsum("bij,bjk->bik", _X[0], _X[0]),
    "aten.conv1d": lambda: F.conv1d(_X[0], torch.rand(3, 6, 2)),
    "aten.conv2d": lambda: F.conv2d(_X, torch.rand(3, 4, 2, 2)),
    "aten.conv3d": lambda: F.conv3d(_X[None], torch.rand(3, 2, 2, 2, 2)),
    "aten.layer_norm": lambda: F.layer_norm(_X, (6,)),
    "aten.group_norm": lambda: F.group_norm(_X, 2),
    "aten.batch_norm": lambda: F.batch_norm(_X, torch.zeros(4), torch.ones(4), training=True),
    "aten.softmax": lambda: _X.softmax(-1),
    "aten.log_softmax": lambda: _X.log_softmax(-1),
    "aten.dropout": lambda: F.dropout(_X.clone().requires_grad_()),
    "aten.cross_entropy_loss": lambda: F.cross_entropy(_X[0, 0], torch.zeros(6, dtype=torch.long)),
    "aten.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*[torch.rand(1, 2, 8, 8)] * 3),
}


@pytest.mark.parametrize("name", sorted(operator_names.RUNS_AS))
def test_operators_run_as_the_warning_says(name: str) -> None:
    ran: set[str] = set()

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    with Note():
        _CALLS[name]()
    said = {word.strip(",") for word in operator_names.RUNS_AS[name].split() if word.startswith("aten.")}
    assert name not in ran and ran & said
    if name in ("aten.matmul", "aten.linear"):
        assert said <= ran
