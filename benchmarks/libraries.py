"""What a step of models of other libraries holds: plain, with their own activation checkpointing, and with actckpt.

    PYTHONPATH=. .venv-integrations/bin/python benchmarks/libraries.py [--toy] [--out RESULT.json]

Bytes after the forward and at the peak of a step whose gradients are there already, counted exactly (`LiveStorages`),
of models with random weights. Gradients must be equal bit for bit. `make integrations` makes the environment.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import actckpt
from actckpt.memory import LiveStorages

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))

from torchvision_stub import import_timm

#: A model, its step up to the loss, and how the library's own checkpointing is turned on.
Case = tuple[Any, Callable[[Any], Tensor], Callable[[Any], Any]]


def _llama(*, is_toy: bool) -> Case:
    import transformers

    width, layers, tokens = (32, 2, 16) if is_toy else (512, 8, 512)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 1024}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
    ids = torch.randint(0, 1024, (4, tokens))

    def loss(model: Any) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return transformers.LlamaForCausalLM(config), loss, lambda model: model.gradient_checkpointing_enable()


def _lora(*, is_toy: bool) -> Case:
    import peft

    model, loss, switch = _llama(is_toy=is_toy)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, config), loss, switch


def _quantized(*, is_toy: bool) -> Case:
    import peft
    import transformers

    model, loss, switch = _llama(is_toy=is_toy)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        base = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=options, dtype=torch.float32)
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.1)
    return peft.get_peft_model(base, config), loss, switch


def _unet(*, is_toy: bool) -> Case:
    import diffusers

    widths, size = ((16, 16, 16, 16), 8) if is_toy else ((64, 128, 256, 256), 32)
    options = {"block_out_channels": widths, "cross_attention_dim": 64, "attention_head_dim": 8, "norm_num_groups": 8}
    model = diffusers.UNet2DConditionModel(sample_size=size, **options)
    inputs = torch.randn(2, 4, size, size), torch.tensor([1, 2]), torch.randn(2, 16, 64)
    return (
        model,
        lambda model: model(*inputs).sample.square().mean(),
        lambda model: model.enable_gradient_checkpointing(),
    )


def _vit(*, is_toy: bool) -> Case:
    size = 32 if is_toy else 224
    model = import_timm().create_model("vit_small_patch16_224", img_size=size, num_classes=10)
    images = torch.randn(8, 3, size, size)
    return model, lambda model: model(images).square().mean(), lambda model: model.set_grad_checkpointing(True)


CASES: dict[str, Callable[..., Case]] = {
    "Llama of Transformers": _llama,
    "the same with LoRA of PEFT": _lora,
    "the same on 4 bits of bitsandbytes": _quantized,
    "U-Net of Diffusers": _unet,
    "ViT-S of timm": _vit,
}
METHODS: dict[str, Callable[[Any], Any] | None] = {
    "plain": lambda model: None,
    "its own": None,
    "recompute": actckpt.apply,
    "matmuls": lambda model: actckpt.apply(model, "matmuls"),
}


def _measure(model: Any, loss: Callable[[Any], Tensor]) -> tuple[dict[str, int], list[Tensor | None]]:
    for is_first in (True, False):
        torch.manual_seed(1)
        model.zero_grad(set_to_none=is_first)
        with LiveStorages(parameters=model.parameters()) as live:
            found = loss(model)
            held_bytes = live.live_bytes
            found.backward()
    figures = {"held_bytes": held_bytes, "peak_bytes": live.peak_bytes}
    return figures, [parameter.grad for parameter in model.parameters()]


def compare(name: str, *, is_toy: bool) -> dict[str, dict[str, int]]:
    """Return the bytes of one model under each method; raises where gradients differ."""
    torch.manual_seed(0)
    made, loss, switch = CASES[name](is_toy=is_toy)
    found, expected = {}, None
    for method, prepare in METHODS.items():
        model = copy.deepcopy(made).train()
        (prepare or switch)(model)
        found[method], gradients = _measure(model, loss)
        expected = expected or gradients
        for one, other in zip(gradients, expected, strict=True):
            if one is not other and (one is None or other is None or not torch.equal(one, other)):
                raise AssertionError(f"{name}, {method}: a gradient differs from plain training's")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="models of a few kilobytes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name in CASES:
        figures[name] = compare(name, is_toy=args.toy)
        row = (f"{what} {one['held_bytes']:,} / {one['peak_bytes']:,}" for what, one in figures[name].items())
        print(f"{name}: {'; '.join(row)}", flush=True)
    packages = ("torch", "transformers", "peft", "bitsandbytes", "diffusers", "timm")
    result = {
        "command": "python benchmarks/libraries.py",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {one: importlib.metadata.version(one) for one in packages},
        "figures": figures,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*deprecated")
    main()
