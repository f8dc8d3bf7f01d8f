"""What messages say of operators that run as others is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._text import operator_names

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
