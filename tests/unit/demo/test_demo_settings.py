"""What the demo accepts."""

from __future__ import annotations

import math

import pytest

from actckpt.demo.methods import METHODS, REFERENCE, choose_methods
from actckpt.demo.settings import DemoSettings


@pytest.mark.parametrize("name", ["steps", "layers", "dim", "heads", "seq", "batch"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_sizes_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"--{name} is {value}, but must be at least 1"):
        DemoSettings(**{name: value})


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan, math.inf])
def test_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    with pytest.raises(ValueError, match=r"--dropout is .*try 0\.1"):
        DemoSettings(dropout=dropout)


def test_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="--seed is -1"):
        DemoSettings(seed=-1)


@pytest.mark.parametrize(("dim", "heads", "advice"), [(100, 4, 96), (96, 5, 100), (4, 4, 8)])
def test_width_that_heads_cannot_share_is_refused_with_the_nearest_that_they_can(
    dim: int, heads: int, advice: int
) -> None:
    with pytest.raises(ValueError, match=rf"--dim is {dim}.*--heads {heads}; try --dim {advice}\."):
        DemoSettings(dim=dim, heads=heads)
    DemoSettings(dim=advice, heads=heads)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (3, 3), (8, 4)])
def test_query_heads_are_shared_evenly_by_key_and_value_heads(heads: int, kv_heads: int) -> None:
    assert DemoSettings(dim=240, heads=heads).kv_heads == kv_heads


def test_all_methods_are_chosen_unless_some_are_named_and_the_reference_always_is() -> None:
    assert choose_methods(()) == METHODS
    assert choose_methods(["none"]) == (REFERENCE,)
    assert [m.name for m in choose_methods(["torch-checkpoint"] * 2)] == ["none", "torch-checkpoint"]


def test_unknown_method_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"'torch-chekpoint'\. Did you mean torch-checkpoint\? Known are none, "):
        choose_methods(["torch-chekpoint"])
    with pytest.raises(ValueError, match=r"unknown 'zzz'\. Known are none"):
        choose_methods(["zzz"])


def test_method_names_can_be_typed_without_quotes_and_are_unique() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalnum() for name in names)
