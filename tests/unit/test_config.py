"""What `configure` takes, and that it refuses everything else and changes nothing then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import actckpt
from actckpt import config

aten = torch.ops.aten


WRONG = [
    ("fix_malloc", ["no", 1, 0, None], r"Pass True or False\.$"),
    ("rescue", ["no", 1, 0, None], r"Pass True or False\.$"),
    ("audit", [True, None, "First", ["first"]], r"Pass 'first', 'always' or 'off'\.$"),
    ("replay_order", ["forward", 5, [0, 1]], r"Pass a function or None\.$"),
    ("opaque", ["aten.mul", None, 5, [None], [5], [b"aten.mul"], {"aten.mul": 1, 2: 3}], "Pass a list of operators"),
    ("opaque", [["aten.mull.Tensor"], ["aten::mull"], ["x", "aten.mull*"], ["aten."]], "does not exist"),
    (
        "observers",
        ["Mode", None, 5, [None], [5], ["Mode"], [...], [int]],
        "Pass a list of types of dispatch modes",
    ),
    ("host_limit", [True, -1, 1.5, "x", 2**63, "9999999TiB"], "is not a size"),
    ("disk_limit", [True, -1, 1.5, "x", 2**63], "is not a size"),
    ("max_inflight", [None, True, -1, 1.5, "x", 2**63], "is not a size"),
    ("num_workers", [None, True, -1, 1.5, "2", 65], "Pass a whole number from 0 to 64"),
    ("spill_dir", [5, "", "/no/such/folder", ["/tmp"]], r"Pass a folder|Pass another one"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), [(name, value, text) for name, values, text in WRONG for value in values], ids=str
)
def test_values_of_another_kind_are_refused_in_one_line_and_change_nothing(name: str, value: Any, message: str) -> None:
    before = config.settings()
    with pytest.raises(ValueError, match=message) as caught:
        actckpt.configure(**{"num_workers": 1, name: value})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert config.settings() == before


def test_every_setting_has_wrong_values_here() -> None:
    assert {name for name, *_ in WRONG} == {field.name for field in config.dataclasses.fields(config.Settings)}


@pytest.mark.parametrize(
    ("opaque", "names"),
    [
        ([], ()),
        (["aten.mul.Tensor", aten.sin.default], ("aten.mul.Tensor", "aten.sin.default")),
        ([aten.mul, "aten::relu"], ("aten.mul", "aten.relu")),
        (["aten.mul*", "blocks.3.attention", "blocks.*", "*"], ("aten.mul*", "blocks.3.attention", "blocks.*", "*")),
        pytest.param(
            (name for name in ["quantized.0", "my_ops.fused"]), ("quantized.0", "my_ops.fused"), id="generator"
        ),
    ],
    ids=str,
)
def test_names_of_operators_and_modules_are_taken(opaque: Any, names: tuple[str, ...]) -> None:
    assert actckpt.configure(opaque=opaque).opaque == names


@pytest.mark.parametrize("name", ["aten.sin", "aten.sin.default", "aten.s?n*", aten.sin, aten.sin.default], ids=str)
def test_each_form_of_a_name_keeps_what_the_operator_makes(name: Any) -> None:
    actckpt.configure(opaque=[name])
    x = torch.randn(3, requires_grad=True)
    with actckpt.region() as region:
        y = x.sin().cos()
    y.sum().backward()
    assert [row.not_replayed for row in region.report().rows if row.operator == "aten.sin.default"] == [
        {"configure(opaque=...) names it": 1}
    ]
