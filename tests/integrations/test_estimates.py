"""Estimates of Transformers models: what the step that runs decides by looking at numbers, the estimate decides too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers_models

import actckpt


def _without_cache(name: str) -> tuple[Any, dict[str, Any]]:
    model = transformers_models.make(name)
    model.config.use_cache = False
    return model, transformers_models.batch(name, tokens=40)


def _padded(inputs: dict[str, Any], padding: int) -> dict[str, Any]:
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :padding] = 0
    return {**inputs, "attention_mask": mask}


_MASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no mask": lambda inputs: inputs,
    "nothing masked": lambda inputs: _padded(inputs, 0),
    "padding": lambda inputs: _padded(inputs, 3),
    "two texts": lambda inputs: {**inputs, "position_ids": torch.arange(20).repeat(2, 2)},
}


@pytest.mark.parametrize("masked", _MASKS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma 3n", "gpt 2"])
def test_estimated_bytes_are_measured_bytes_whatever_is_masked(name: str, masked: str) -> None:
    model, inputs = _without_cache(name)
    inputs = _MASKS[masked](inputs)
    step = lambda: model(**inputs).loss.backward()  # noqa: E731
    policies = {"recompute": "recompute"}
    found = actckpt.estimate(step, model=model, policies=policies, target="cpu")
    counted = actckpt.compare(step, model=model, policies=policies, rounds=1)
    for row in found.rows:
        measured = counted[row.name]
        assert (row.held_bytes, row.peak_bytes) == (measured.held_bytes, measured.peak_bytes), row.name


def test_a_llama_on_the_meta_device_makes_no_mask_where_it_is_given_none_and_repeats_no_keys() -> None:
    real, inputs = _without_cache("llama")
    model = copy.deepcopy(real).to("meta", torch.bfloat16)
    given = _padded(inputs, 3)["attention_mask"]

    def held(**more: Any) -> int:
        def step() -> None:
            ids = torch.zeros(2, 40, dtype=torch.long, device="cuda")
            model(input_ids=ids, labels=ids, **more).loss.backward()

        return actckpt.estimate(step, model=model, policies={}, target="h200").rows[0].held_bytes

    blocks, keys_and_values = model.config.num_hidden_layers, 2 * 2 * 40 * 2 * 8 * 2  # of both: 2 texts, 2 heads of 8
    mask = 2 * 40 * 40 * 2
    assert held(attention_mask=given) - held() >= blocks * (keys_and_values + mask)
