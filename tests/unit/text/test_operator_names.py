"""Which operators there are: torch is asked for all of them once per name."""

import pytest
import torch

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
