"""`apply` beside the switches of the library, on real models of Transformers and PEFT."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import noop_context_fn
from training import assert_equal, train
from transformers_models import batch, make

import actckpt

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

    def checkpoint(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return original(*args, **options)

    for module in (modeling, torch.utils.checkpoint):
        monkeypatch.setattr(module, "checkpoint", checkpoint)
    return calls


@pytest.mark.parametrize("policy", [None, "matmuls"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_plain_training(name: str, policy: Any) -> None:
    plain, ours = make(name), make(name)
    actckpt.apply(ours, policy)
    # Where blocks rerun whole, the cache is taken away from them.
    options = {"use_cache": False} if policy is None else {}
    assert_equal(train(ours, batch(name)), train(plain, {**batch(name), **options}))
    assert actckpt.report(ours).blocks_ran


TURNS = {
    "gradient": lambda model: model.gradient_checkpointing_enable(),
    "reentrant": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    "activation": lambda model: model.activation_checkpointing_enable(),
}


@pytest.mark.filterwarnings("error:apply.*is on, with")
@pytest.mark.parametrize("turn_on", TURNS.values(), ids=TURNS)
def test_what_the_switch_turns_on_before_or_after_apply_is_taken_over(turn_on: Any, torchs_calls: list[Any]) -> None:
    model, runs = make("llama"), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    turn_on(model)
    train(model, batch("llama"), 1)
    assert (len(torchs_calls), len(runs)) == (3, 6)  # the library's own
    for policy in ("matmuls", [], {"activation_budget": "90%"}):
        names = actckpt.apply(model, **policy) if isinstance(policy, dict) else actckpt.apply(model, policy)
        for turn in (None, turn_on, type(model).gradient_checkpointing_disable, turn_on):
            if turn is not None:
                turn(model)
            del torchs_calls[:], runs[:]
            model(**batch("llama"), use_cache=False).loss.backward()
            assert not torchs_calls and (len(runs) == 3 or isinstance(policy, dict)), "a policy runs no code again"
            assert actckpt.report(model).blocks_ran == names
        actckpt.remove(model)
        train(model, batch("llama"), 1)
        assert len(torchs_calls) == 3  # the library's own again


def test_remove_leaves_nothing_behind(torchs_calls: list[Any]) -> None:
    model = make("llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    actckpt.apply(model)
    train(model, batch("llama"), 1)
    actckpt.remove(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    train(model, batch("llama"), 1)
    assert not torchs_calls


@pytest.mark.parametrize("is_on_before", [True, False])
def test_options_of_the_librarys_checkpointing_are_named_where_they_are_left_out(is_on_before: bool) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"every_n_layers": 2}, "only some of the layers"),
        ({"offload": True}, "a function of its own"),
        ({"activation_checkpointing_kwargs": {"context_fn": noop_context_fn, "use_reentrant": False}}, "context_fn"),
    ]
    for kwargs, words in asked:
        model = make("llama")
        if is_on_before:
            model.activation_checkpointing_enable(**kwargs)
            with pytest.warns(UserWarning, match=f"LlamaForCausalLM is on, with {words}.*leaves that out"):
                actckpt.apply(model)
        else:
            actckpt.apply(model)
            model.activation_checkpointing_enable(**kwargs)
            with pytest.warns(UserWarning, match=f"LlamaForCausalLM is on, with {words}.*leaves that out"):
                train(model, batch("llama"), 1)


def test_files_and_copies_are_those_of_a_plain_model(tmp_path: Path) -> None:
    plain, ours = make("llama"), make("llama")
    actckpt.apply(ours)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for name, model in (("plain", plain), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "ours")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    expected = train(copy.deepcopy(plain), batch("llama"), 3)
    read = type(ours).from_pretrained(tmp_path / "ours").train()
    actckpt.apply(read)
    assert_equal(train(read, batch("llama"), 3), expected)


def test_what_is_turned_on_for_a_copied_and_a_pickled_model_is_taken_over(torchs_calls: list[Any]) -> None:
    model = make("llama")
    names = actckpt.apply(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = train(make("llama"), batch("llama"), 3)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.gradient_checkpointing_enable()
        assert_equal(train(other, batch("llama"), 3), expected)
        assert actckpt.report(other).blocks_ran == names and not torchs_calls
        again = copy.deepcopy(other)  # of what was taken over
        actckpt.remove(again)
        train(again, batch("llama"), 1)
        assert len(torchs_calls) == 3
        del torchs_calls[:]
    assert actckpt.report(model).blocks_ran == ()


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
        actckpt.apply(ours)
    ours = _with_lora(ours)
    if order == "after":
        actckpt.apply(ours)
    elif order == "on the base model":
        actckpt.apply(ours.get_base_model())
    if enables_inputs:
        ours.enable_input_require_grads()
    ours.gradient_checkpointing_enable()
    assert_equal(train(ours, batch("llama")), train(plain, batch("llama")))
    assert len(actckpt.report(ours).blocks_ran) == 3
    frozen = [parameter for parameter in ours.parameters() if not parameter.requires_grad]
    assert frozen and all(parameter.grad is None for parameter in frozen)
