"""Names in few words."""

from __future__ import annotations

import pytest

from actckpt._text.listed import calls_named, listed


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["stem"], "stem"),
        (["0", "1", "2", "5"], "0-2, 5"),
        (["layers.0", "layers.1", "layers.3"], "layers.0-1, 3"),
        (["layers.1", "layers.3", "head"], "layers.1, 3, head"),
        (["h.0.mlp", "h.1.mlp", "h.3.mlp"], "h.0-1.mlp, h.3.mlp"),
        (["a.0", "a.1", "b.2", "b.3"], "a.0-1, b.2-3"),
        (["a.0.1", "a.0.2", "a.1.3"], "a.0.1-2, a.1.3"),
        (["one", "one@1", "one@2"], "one, one@1-2"),
        (["a.2", "a.1"], "a.2, 1"),
        (["b08", "b09", "b10"], "b08-9, b10"),
        (["b00", "b01", "b10", "b100"], "b00-1, b10, 100"),
        (["a.2", "b", "a.3"], "a.2, b, a.3"),
    ],
)
def test_rows_of_numbers_are_one(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_further_calls_have_their_number() -> None:
    assert calls_named(["a", None, "b", "a", "a"]) == ["a", None, "b", "a@1", "a@2"]
