"""Operators that a process does not have."""

import pickle

import pytest
import torch

from actckpt._text import operator_names


def test_an_operator_that_the_loading_process_does_not_have_is_named() -> None:
    class Gone(type(torch.ops.aten.addmm.default)):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __str__(self) -> str:
            return "mylib.gone.default"

    data = pickle.dumps(operator_names.portable([Gone()]))
    with pytest.raises(ValueError, match=r"There is no operator 'mylib\.gone\.default'"):
        pickle.loads(data)
