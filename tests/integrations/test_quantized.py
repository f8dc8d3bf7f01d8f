"""QLoRA: a base that bitsandbytes has quantized, frozen, under LoRA of PEFT, loaded as users load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import STEPS, assert_equal, held_and_peak, train
from transformers_models import batch, make

import actckpt

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

OPTIONS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.1}
OURS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "matmuls": {"policy": "matmuls"},
    "nothing kept": {"policy": []},
    "budget": {"activation_budget": "60%", "race": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    make("llama").save_pretrained(path)
    return path


def _model(folder: Path, options: dict[str, Any], *, theirs: bool = False) -> Any:
    config = transformers.BitsAndBytesConfig(**options)
    base = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    arguments = {"use_reentrant": False}
    base = peft.prepare_model_for_kbit_training(
        base, use_gradient_checkpointing=theirs, gradient_checkpointing_kwargs=arguments
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    model.config.use_cache = False
    model.train()
    return model


def _losses(model: Any) -> list[torch.Tensor]:
    trained = train(model, batch("llama"))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapted = [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]
    assert names and all("lora" in name for name in names)
    return [*trained[:STEPS], *adapted]


@pytest.mark.parametrize("bits", OPTIONS)
def test_a_quantized_base_trains_as_with_the_librarys_own_and_holds_no_more(bits: str, folder: Path) -> None:
    plain = _losses(_model(folder, OPTIONS[bits]))
    assert not torch.equal(plain[0], plain[STEPS - 1])
    theirs = _model(folder, OPTIONS[bits], theirs=True)
    assert_equal(_losses(theirs), plain)
    bytes_of_theirs = held_and_peak(theirs, lambda: theirs(**batch("llama")).loss)
    for options in OURS.values():
        model = _model(folder, OPTIONS[bits], theirs="policy" in options)  # which ours takes over
        actckpt.apply(model, **options)
        assert_equal(_losses(model), plain)
        assert actckpt.report(model).blocks_ran
        if not options:
            found = held_and_peak(model, lambda model=model: model(**batch("llama")).loss)  # type: ignore[misc]
            assert found[0] <= bytes_of_theirs[0] and found[1] <= bytes_of_theirs[1]


@pytest.mark.parametrize("policy", ["matmuls", "recompute"])
def test_matmuls_runs_no_product_with_4_bits_again(policy: str, folder: Path) -> None:
    model = _model(folder, OPTIONS["4 bits"])
    actckpt.apply(model, policy)
    loss = model(**batch("llama")).loss
    actckpt.configure(observers=[*actckpt.configure().observers, _Products])
    with _Products() as products:
        loss.backward()
    assert (products.number > 0) is (policy == "recompute")


class _Products(TorchDispatchMode):
    """Counts products with weights of 4 bits; backward multiplies with what it dequantizes."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += str(func).startswith("bitsandbytes.gemm_4bit")
        return func(*args, **(kwargs or {}))
