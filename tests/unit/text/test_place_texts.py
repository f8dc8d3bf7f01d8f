"""The text of a place, and selectors of places."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from actckpt import Place
from actckpt._text.places import Selector

_COUNTS = st.integers(0, 10**6)
_OPERATORS = st.sampled_from(["aten.mm.default", "aten.add_.Tensor", "my_lib.op2.out_x", "higher_order.flex_attention"])


@example("a::b", "aten.mm.default", 0, 0, 0)
@example("a@1", "aten.mm.default", 0, 0, 0)
@example("a@1@2", "aten.mm.default", 0, 0, 3)
@example("a::aten.mm.default#0.0", "aten.mm.default", 1, 2, 0)
@example(":", "aten.mm.default", 0, 0, 0)
@example("\n", "aten.mm.default", 0, 0, 1)
@given(st.text(min_size=1), _OPERATORS, _COUNTS, _COUNTS, _COUNTS)
def test_a_place_is_parsed_back_from_its_text_whatever_its_module_is_called(
    module: str, operator: str, occurrence: int, result: int, call: int
) -> None:
    place = Place(module, operator, occurrence, result, call)
    assert Place.parse(str(place)) == place


@given(st.text("a@1:#.0"), st.text("a@1:#.0"))
def test_what_parses_has_a_text_that_parses_to_the_same(left: str, right: str) -> None:
    try:
        place = Place.parse(f"{left}::aten.{right}")
    except ValueError as error:
        assert "is no place" in str(error)
    else:
        assert Place.parse(str(place)) == place


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("layers.0", "it has no '::'"),
        ("layers.0::aten.mm.default", "does not end with '#occurrence.result'"),
        ("layers.0::aten.mm.default#1", "does not end with '#occurrence.result'"),
        ("layers.0::aten.mm.default#x.0", "does not end with '#occurrence.result'"),
        ("::aten.mm.default#0.0", "the module is empty"),
        ("layers.0::mm#0.0", "'mm' is no name of an operator"),
    ],
)
def test_errors_say_which_part_of_a_text_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ValueError, match="is no place") as error:
        Place.parse(text)
    assert what in str(error.value) and repr(text) in str(error.value)


@pytest.mark.parametrize("counts", [{"occurrence": -1}, {"call": True}, {"result": 0.5}], ids=str)
def test_a_place_has_whole_counts(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(counts))}=.* is not a whole number"):
        Place("a", "aten.mm.default", **counts)


_PLACES = {
    "layers.0.mlp::aten.mm.default#0.0",
    "layers.0.mlp@1::aten.mm.default#0.0",
    "layers.0.mlp::aten.mm.default#1.0",
    "layers.1.mlp::aten.mm.default#0.0",
    "layers.1.mlp::aten.native_dropout.default#0.1",
    "head::aten.add.Tensor#0.0",
}


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("layers.*.mlp::aten.mm", {place for place in _PLACES if "mm" in place}),
        ("layers.0.mlp@1::aten.mm", {"layers.0.mlp@1::aten.mm.default#0.0"}),
        ("layers.0.mlp@0::aten.mm#0", {"layers.0.mlp::aten.mm.default#0.0"}),
        ("aten.mm", {place for place in _PLACES if "mm" in place}),
        ("aten.mm#1", {"layers.0.mlp::aten.mm.default#1.0"}),
        ("aten.*", _PLACES),
        ("layers.1.mlp", {place for place in _PLACES if place.startswith("layers.1")}),
        ("layers.0.mlp@1", {"layers.0.mlp@1::aten.mm.default#0.0"}),
        ("layers.*", set()),
        ("layers.**", _PLACES - {"head::aten.add.Tensor#0.0"}),
        ("**::**#0.1", {"layers.1.mlp::aten.native_dropout.default#0.1"}),
        ("**.mlp::aten.native_dropout.default", {"layers.1.mlp::aten.native_dropout.default#0.1"}),
        ("mm", set()),
        ("::mm", {place for place in _PLACES if "mm" in place}),
        ("::aten.add", {"head::aten.add.Tensor#0.0"}),
        ("layers.*.mlp@1::m*", {"layers.0.mlp@1::aten.mm.default#0.0"}),
        ("layers.1.**::native_dropout#0.1", {"layers.1.mlp::aten.native_dropout.default#0.1"}),
        ("::qkv", set()),
    ],
)
def test_a_selector_names_a_set_of_places(selector: str, found: set[str]) -> None:
    assert {text for text in _PLACES if Selector.parse(selector).has(Place.parse(text))} == found


def test_short_names_of_operators_leave_out_underscores_before_them() -> None:
    place = Place("layers.0", "aten._softmax.default")
    assert all(Selector.parse(text).has(place) for text in ("::softmax", "::_softmax", "layers.*::soft*"))
    assert not Selector.parse("::softmax_").has(place)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "selects nothing"),
        ("layers.0::", "selects nothing"),
        ("::", "selects nothing"),
        ("mm#0", "'mm' is no operator. Operators have a dot"),
        ("layers.0::aten.mm#x", "after '#' goes an occurrence"),
        ("layers.[b-a]::aten.mm", "bad character range"),
    ],
)
def test_errors_say_what_is_wrong_with_a_selector(text: str, what: str) -> None:
    with pytest.raises(ValueError) as error:
        Selector.parse(text)
    assert what in str(error.value)
