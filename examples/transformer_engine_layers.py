"""A stack of TransformerEngine layers: attention offloaded, MLPs recomputed, the same loss to the last bit.

Needs a GPU, a CUDA build of torch and TransformerEngine (pip install 'actckpt[te]'); says so where they are missing.

Run: python examples/transformer_engine_layers.py
"""

from typing import Any

import torch

import actckpt


def what_is_missing() -> str | None:
    """Return why TransformerEngine cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"no TransformerEngine ({error})"
    return None


def train(te: Any, model: torch.nn.Module, inputs: torch.Tensor, *, fp8: bool) -> tuple[float, float]:
    """Run one step; returns the loss and the peak of allocated memory in MiB."""
    torch.cuda.manual_seed(1)  # dropout
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    with te.autocast(enabled=fp8):
        hidden = model(inputs)
    loss = hidden.float().square().mean()
    loss.backward()
    return loss.item(), torch.cuda.max_memory_allocated() / 2**20


def main() -> None:
    missing = what_is_missing()
    if missing is not None:
        print(f"This example needs a GPU and TransformerEngine: {missing}. Nothing was run; docs/te.md says more.")
        return
    import transformer_engine.pytorch as te

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [te.TransformerLayer(1024, 4096, 16, params_dtype=torch.bfloat16) for _ in range(8)]
        return torch.nn.Sequential(*layers)

    inputs = torch.randn(2048, 2, 1024, device="cuda", dtype=torch.bfloat16)
    fp8 = bool(te.is_fp8_available())
    plain_loss, plain_mib = train(te, make(), inputs, fp8=fp8)
    model = make()
    actckpt.te.wrap(model, {"self_attention": "offload", "layernorm_mlp": "recompute"})
    loss, mib = train(te, model, inputs, fp8=fp8)
    print(f"{'FP8' if fp8 else 'bf16'}, 8 layers")
    print(f"plain    loss {plain_loss:.9f}, peak {plain_mib:.0f} MiB")
    print(f"actckpt  loss {loss:.9f}, peak {mib:.0f} MiB")
    assert loss == plain_loss


if __name__ == "__main__":
    main()
