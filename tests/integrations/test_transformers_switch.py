"""`actckpt.integrations.transformers`: behind the switches of the library, on real models of Transformers and PEFT."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import assert_equal, held_and_peak, train
from transformers_models import batch, make

import actckpt
from actckpt.integrations.transformers import disable, enable

NAMES = ["llama", "gpt 2", "qwen3 next", "t5"]


@pytest.fixture(autouse=True)
def _without_warnings_of_the_library() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")
        warnings.filterwarnings("ignore", message="apply: .* is given a key-value cache")
        yield


@pytest.fixture
def torchs_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the function that the library checkpoints with."""
    import transformers.modeling_utils as modeling

    calls: list[Any] = []
    original = modeling.checkpoint
    monkeypatch.setattr(modeling, "checkpoint", lambda *a, **k: (calls.append(a), original(*a, **k))[1])
    return calls


@pytest.mark.parametrize("policy", [None, "matmuls"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_plain_training(name: str, policy: Any) -> None:
    plain, ours = make(name), make(name)
    enable(ours, policy)
    # Where blocks rerun whole, the cache is taken away from them.
    options = {"use_cache": False} if policy is None else {}
    assert_equal(train(ours, batch(name)), train(plain, {**batch(name), **options}))
    assert actckpt.report(ours).blocks_ran


@pytest.mark.parametrize("switch", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_switches_of_the_library_turn_ours_on_and_off(switch: str, torchs_calls: list[Any]) -> None:
    model = make("llama")
    turn_on, turn_off = f"{switch}_enable", f"{switch}_disable"
    getattr(model, turn_on)()
    train(model, batch("llama"), 1)
    assert len(torchs_calls) == 3  # the library's own, which a trainer turned on before
    names = enable(model)
    assert len(names) == 3
    for turn in ([turn_on], [turn_off, turn_on], [turn_on, turn_on]):
        for one in turn:
            getattr(model, one)()
        train(model, batch("llama"), 1)
        assert actckpt.report(model).blocks_ran == names
    getattr(model, turn_off)()
    with pytest.raises(actckpt.BlocksError, match="none of"):
        actckpt.report(model)
    train(model, batch("llama"), 1)
    assert len(torchs_calls) == 3


@pytest.mark.parametrize("prepare", [actckpt.apply, enable])
def test_a_policy_decides_with_the_switch_on_after_enable_but_not_after_apply(prepare: Any) -> None:
    model, runs = make("llama"), []
    prepare(model, "matmuls")
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    model(**batch("llama"), use_cache=False).loss.backward()
    assert (len(runs), actckpt.report(model).recomputed_bytes > 0) == ((3, True) if prepare is enable else (6, False))


@pytest.mark.parametrize("times", [1, 3])
def test_disable_gives_the_switches_back(times: int, torchs_calls: list[Any]) -> None:
    model = make("llama")
    before = set(vars(model))
    for _ in range(times):
        enable(model)
        model.gradient_checkpointing_disable()
    disable(model)
    disable(model)
    assert set(vars(model)) == before
    assert not any("forward" in vars(module) for module in model.modules())
    model.gradient_checkpointing_enable()
    train(model, batch("llama"), 1)
    assert len(torchs_calls) == 3


@pytest.mark.parametrize("times", [1, 3])
def test_a_switch_that_somebody_put_on_the_model_comes_back(times: int) -> None:
    model, calls = make("llama"), []
    model.gradient_checkpointing_enable = calls.append
    for _ in range(times):
        enable(model)
        model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()
    assert calls == []
    disable(model)
    model.gradient_checkpointing_enable(1)
    assert calls == [1]


def test_options_of_the_librarys_checkpointing_are_refused_by_name() -> None:
    model = make("llama")
    enable(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for kwargs, name in [({"every_n_layers": 2}, "every_n_layers"), ({"offload": True}, "offload")]:
        with pytest.raises(ValueError, match=f"with {name}, which is the library's.*pass enable"):
            model.activation_checkpointing_enable(**kwargs)
    with pytest.raises(ValueError, match="with context_fn, which"):
        model.gradient_checkpointing_enable({"context_fn": None, "use_reentrant": False})


@pytest.mark.parametrize("name", NAMES)
def test_no_more_is_held_than_with_the_librarys_own(name: str) -> None:
    found = []
    for ours in (False, True):
        model = make(name)
        if ours:
            enable(model)
        model.gradient_checkpointing_enable()
        found.append(held_and_peak(model, lambda model=model: model(**batch(name), use_cache=False).loss))
    assert found[1][0] <= found[0][0] and found[1][1] <= found[0][1]


def test_a_budget_makes_a_plan() -> None:
    plain, ours = make("llama"), make("llama")
    enable(ours, activation_budget="80%")
    ours.gradient_checkpointing_enable()
    assert_equal(train(ours, batch("llama")), train(plain, batch("llama")))
    assert actckpt.report(ours).plan is not None


def test_files_and_copies_are_those_of_a_plain_model(tmp_path: Path) -> None:
    plain, ours = make("llama"), make("llama")
    enable(ours)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, model in (("plain", plain), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "ours")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    expected = train(copy.deepcopy(plain), batch("llama"), 3)
    read = type(ours).from_pretrained(tmp_path / "ours").train()
    enable(read)
    assert_equal(train(read, batch("llama"), 3), expected)


def test_a_copied_and_a_pickled_model_have_switches_of_their_own() -> None:
    model = make("llama")
    names = enable(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = train(make("llama"), batch("llama"), 3)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.gradient_checkpointing_disable()
        assert len(actckpt.report(model).blocks_patched) == len(names)
        other.gradient_checkpointing_enable()
        assert_equal(train(other, batch("llama"), 3), expected)
        assert actckpt.report(other).blocks_ran == names
        disable(other)
    assert actckpt.report(model).blocks_ran == ()


def test_generation_while_training_is_that_of_a_plain_model() -> None:
    plain, ours = make("llama"), make("llama")
    enable(ours)
    ids = batch("llama")["input_ids"]
    found = []
    for model in (plain, ours):
        torch.manual_seed(0)  # dropout is on
        found.append(model.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(*found)


# PEFT


def _with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], **options)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("enables_inputs", [False, True], ids=["inputs frozen", "inputs require grad"])
@pytest.mark.parametrize("order", ["before", "after", "on the base model"])
def test_lora_on_a_frozen_base_is_that_of_plain_training(order: str, enables_inputs: bool) -> None:
    plain = _with_lora(make("llama"))
    ours = make("llama")
    if order == "before":
        enable(ours)
    ours = _with_lora(ours)
    if order == "after":
        enable(ours)
    elif order == "on the base model":
        enable(ours.get_base_model())
    if enables_inputs:
        ours.enable_input_require_grads()
    ours.gradient_checkpointing_enable()
    assert_equal(train(ours, batch("llama")), train(plain, batch("llama")))
    assert len(actckpt.report(ours).blocks_ran) == 3
    frozen = [parameter for parameter in ours.parameters() if not parameter.requires_grad]
    assert frozen and all(parameter.grad is None for parameter in frozen)


def test_lora_holds_no_more_than_with_the_librarys_own() -> None:
    found = []
    for ours in (False, True):
        model = _with_lora(make("llama"))
        if ours:
            enable(model)
        model.gradient_checkpointing_enable()
        found.append(held_and_peak(model, lambda model=model: model(**batch("llama"), use_cache=False).loss))
    assert found[1][0] <= found[0][0] and found[1][1] <= found[0][1]


def test_a_base_that_was_prepared_for_few_bits_trains_with_ours(torchs_calls: list[Any]) -> None:
    peft = pytest.importorskip("peft")

    def prepared(*, ours: bool) -> Any:
        model = make("llama").to(torch.bfloat16)
        if ours:
            enable(model)
        model.is_loaded_in_4bit = True  # as a model with quantized weights says of itself
        return _with_lora(peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=ours))

    ours = prepared(ours=True)
    assert_equal(train(ours, batch("llama")), train(prepared(ours=False), batch("llama")))
    assert len(actckpt.report(ours).blocks_ran) == 3 and not torchs_calls


def test_adapters_that_are_saved_are_those_of_a_plain_model(tmp_path: Path) -> None:
    for name in ("plain", "ours"):
        model = _with_lora(make("llama"))
        if name == "ours":
            enable(model)
        model.save_pretrained(tmp_path / name)
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes()
