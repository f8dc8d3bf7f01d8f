"""Libraries on a GPU, in bf16: two lines of actckpt each, and the losses and parameters of plain training.

Models and steps are those of tests/integrations. Each test is skipped where its library is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_programs import DEVICE, repeated
from oracle import assert_equal
from torch import Tensor

import actckpt

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries, about themselves

_STEPS = 6
_MODELS = ("llama", "gpt 2", "mixtral", "gpt oss", "t5")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "integrations"))
    yield


def _train_on(model: Any, step: Callable[[], Any]) -> list[Tensor]:
    return importlib.import_module("training").train_on(model, step, _STEPS)  # type: ignore[no-any-return]


def _assert_equal_if_repeatable(run: Callable[[bool], list[Tensor]]) -> None:
    """Compare what `run(True)` gives, with actckpt, to `run(False)`; skip what differs without it."""
    expected = repeated(lambda: run(False))
    assert_equal(run(True), expected)


def _mixtral() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).train()


def _transformer(name: str) -> Any:
    pytest.importorskip("transformers")
    models = importlib.import_module("transformers_models")
    made = _mixtral() if name == "mixtral" else models.make(name)
    return made.to(DEVICE, torch.bfloat16)


def _batch(name: str) -> dict[str, Tensor]:
    found = importlib.import_module("transformers_models").batch(name)
    return {key: value.to(DEVICE) for key, value in found.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"policy": "matmuls"}, {"policy": "offload"}, {"offload_inputs": True}, {"activation_budget": "70%"}],
    ids=lambda options: ", ".join(map(str, options.values())) or "recompute",
)
@pytest.mark.parametrize("name", _MODELS)
def test_transformers_with_apply(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")

    def run(is_ours: bool) -> list[Tensor]:
        model = _transformer(name)
        if is_ours:
            actckpt.apply(model, **options)
        found = _train_on(model, lambda: model(**_batch(name), use_cache=False).loss)
        assert not is_ours or actckpt.report(model).blocks_ran
        return found

    _assert_equal_if_repeatable(run)


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"budget": 0.5}], ids=str)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["fp32", "bf16"])
def test_transformers_trainer(options: dict[str, Any], is_mixed: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from actckpt.integrations.transformers import callback

    training = importlib.import_module("transformers_training")
    given = {"bf16": is_mixed, "use_cpu": DEVICE != "cuda", "dataloader_pin_memory": False}

    def run(is_ours: bool) -> list[Tensor]:
        callbacks = [callback(**options)] if is_ours else []
        model = _transformer("llama").float()
        return training.run(  # type: ignore[no-any-return]
            training.trainer_of(tmp_path, model, callbacks, gradient_checkpointing=is_ours, **given)
        )

    _assert_equal_if_repeatable(run)


@pytest.mark.parametrize("is_before", [True, False], ids=["apply first", "LoRA first"])
def test_peft_lora(is_before: bool) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")

    def run(is_ours: bool) -> list[Tensor]:
        model = _transformer("llama")
        if is_ours and is_before:
            actckpt.apply(model)
        torch.manual_seed(3)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        model = peft.get_peft_model(model, settings)
        if is_ours and not is_before:
            actckpt.apply(model)
        return _train_on(model, lambda: model(**_batch("llama"), use_cache=False).loss)

    _assert_equal_if_repeatable(run)


@pytest.mark.parametrize("policy", ["recompute", "matmuls", "offload", []], ids=str)
def test_timm_vit(policy: Any) -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is None:
        timm = importlib.import_module("torchvision_stub").import_timm()
    else:
        timm = importlib.import_module("timm")
    options = {"img_size": 64, "depth": 4, "drop_path_rate": 0.2, "proj_drop_rate": 0.1, "attn_drop_rate": 0.1}

    def run(is_ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, **options)
        model = model.to(DEVICE, torch.bfloat16)
        images = torch.randn(8, 3, 64, 64).to(DEVICE, torch.bfloat16)
        if is_ours:
            assert len(actckpt.apply(model, policy)) == 4
        return _train_on(model, lambda: model(images).float().square().mean())

    _assert_equal_if_repeatable(run)


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"module": "net", "budget": "2GiB"}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from actckpt.integrations.lightning import callback

    made = importlib.import_module("lightning_training")

    def run(is_ours: bool) -> list[Tensor]:
        module = made.Module(width=64)
        callbacks = [callback(**options)] if is_ours else []
        accelerator = "gpu" if DEVICE == "cuda" else "cpu"
        made.fit(module, tmp_path, *callbacks, accelerator=accelerator, precision=precision)
        return module.trained()

    _assert_equal_if_repeatable(run)
