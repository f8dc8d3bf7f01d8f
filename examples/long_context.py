"""Train on long sequences: each block runs again in backward, and its input waits in host memory or on disk.

Tensors of an NVIDIA GPU go to pinned host memory, those of a CPU to a file. Run: python examples/long_context.py
"""

import torch

import actckpt
from actckpt.memory import LiveStorages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 2048


def train(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Run one step; returns the loss and the peak of activation bytes in MiB."""
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as memory:
        loss = model(inputs).square().mean()
        loss.backward()
    return loss.item(), memory.peak_bytes / 2**20


def main() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True) for _ in range(12)]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    inputs = torch.randn(1, LENGTH, 64, device=DEVICE)

    results = {"plain": train(model, inputs)}
    actckpt.apply(model)
    results["checkpoint"] = train(model, inputs)
    actckpt.remove(model)
    actckpt.apply(model, offload_inputs=True)
    results["checkpoint, inputs offloaded"] = train(model, inputs)
    for name, (loss, mib) in results.items():
        print(f"{name:30} loss {loss:.9f}, peak {mib:6.1f} MiB")
        assert loss == results["plain"][0]
    print(actckpt.stats())


if __name__ == "__main__":
    main()
