"""Every row of the table in docs/compile.md: how many graphs there are, and what `fullgraph=True` does."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import actckpt
from actckpt.policies import PerOp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_PAGE = Path(__file__).parents[3] / "docs" / "compile.md"
_ROWS = re.findall(r"^\| `(.+?)` \| (one graph|runs eagerly) \| (compiles|raises)", _PAGE.read_text(), re.MULTILINE)


def _f(x: Tensor) -> Tensor:
    return (x @ x.cos()).sin().exp()


_NAMES: dict[str, Any] = {
    **{name: getattr(actckpt, name) for name in ("checkpoint", "checkpoint_sequential", "offload", "region")},
    "PerOp": PerOp,
    "torch": torch,
    "f": _f,
    "CheckpointPolicy": CheckpointPolicy,
    "selective_contexts": functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
}


def _function(code: str) -> Callable[[Tensor], Tensor]:
    """Return the function of a row; its policy is made outside."""
    names = dict(_NAMES)
    if given := re.search(r"f, x, policy=(.+)\)$", code):
        names["policy"] = eval(given[1], names)
        code = "checkpoint(f, x, policy=policy)"
    block, _, result = code.rpartition(": f(x)") if code.startswith("with ") else ("", "", code)
    body = f"{block}:\n    return f(x)" if block else f"return {result}"
    exec(f"def function(x):\n{textwrap.indent(body, '    ')}", names)
    return names["function"]


class _Graphs:
    """A backend of the compiler that counts graphs."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_the_table_is_found() -> None:
    assert len(_ROWS) == _PAGE.read_text().count("\n| `") >= 18


@pytest.mark.parametrize(("code", "num", "full"), _ROWS, ids=[row[0] for row in _ROWS])
def test_a_row_of_the_table(code: str, num: str, full: str) -> None:
    function, x, graphs = _function(code), leaf(8, 8), _Graphs()
    expected = torch.autograd.grad(function(x).sum(), x)
    torch._dynamo.reset()
    y = torch.compile(function, backend=graphs)(x)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)
    assert graphs.num == 1 or num != "one graph"
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    if full == "compiles":
        assert_equal(torch.autograd.grad(compiled(x).sum(), x), expected)
    else:
        with pytest.raises(Exception, match=r"actckpt\.(checkpoint|region|offload)\b.*compile"):
            compiled(x)


@pytest.mark.parametrize("code", ["checkpoint(f, x)", "with region([]): f(x)"])
def test_compiled_autograd_is_refused_by_name(code: str) -> None:
    function, x = _function(code), leaf(8, 8)
    y = function(x).sum()
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"actckpt|unpack"), torch._dynamo.compiled_autograd._enable(compiler):
        y.backward()
