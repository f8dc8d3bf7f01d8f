"""Patterns for names of modules and operators."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import example, given, strategies as st

from actckpt._text.selectors import is_pattern, matches

NAMES = [
    "layers",
    "layers.0",
    "layers.10",
    "layers.0.mlp",
    "layers.0.mlp.fc1",
    "mlp",
    "model.layers.0",
    "aten.mul.Tensor",
]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layers", ["layers"]),
        ("layers.*", ["layers.0", "layers.10"]),
        ("layers.?", ["layers.0"]),
        ("layers.1*", ["layers.10"]),
        ("layers.**", ["layers.0", "layers.10", "layers.0.mlp", "layers.0.mlp.fc1"]),
        ("layers**", NAMES[:5]),
        ("**.mlp", ["layers.0.mlp", "mlp"]),
        ("**.layers.*", ["layers.0", "layers.10", "model.layers.0"]),
        ("layers.**.fc1", ["layers.0.mlp.fc1"]),
        ("layers.*.mlp", ["layers.0.mlp"]),
        ("*", ["layers", "mlp"]),
        ("*.*.*", ["layers.0.mlp", "model.layers.0", "aten.mul.Tensor"]),
        ("**", NAMES),
        ("layers.[0-9]", ["layers.0"]),
        ("layers.[!0]*", ["layers.10"]),
        ("layers[.]0", ["layers.0"]),
        ("layers[!x]0", []),
        ("layers.[+--]", []),
        ("aten.mul.*", ["aten.mul.Tensor"]),
        ("LAYERS.*", []),
        ("layers.[", []),
        ("", []),
    ],
)
def test_wildcards_stop_at_dots_and_two_stars_cross_them(pattern: str, found: list[str]) -> None:
    assert [name for name in NAMES if matches(pattern, name)] == found


@given(st.text("ab01*?", max_size=8), st.text("ab01", max_size=8))
def test_without_dots_and_brackets_patterns_are_those_of_the_shell(pattern: str, name: str) -> None:
    assert matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.filterwarnings("error")
@example("[0--]", "-")
@example("[---]", "-")
@given(st.text("ab01*?[]!-.", max_size=8), st.text("ab01[]!-.", max_size=8))
def test_a_pattern_is_one_or_is_refused(pattern: str, name: str) -> None:
    try:
        matches(pattern, name)
    except ValueError as error:
        assert str(error).startswith(f"The pattern {pattern!r} is none: bad character range")


@given(st.text("ab.01", max_size=12))
def test_a_name_without_wildcards_matches_itself_only(name: str) -> None:
    assert matches(name, name) and not is_pattern(name)
    assert (not matches(name, f"{name}x") and not matches(name, name.replace(".", "x"))) or "." not in name
