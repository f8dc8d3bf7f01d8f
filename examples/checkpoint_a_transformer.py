"""Train a small transformer with and without checkpointing: same numbers, less memory.

Run: python examples/checkpoint_a_transformer.py
"""

import torch

import actckpt
from actckpt.memory import LiveStorages


def train(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Run one step; returns the loss and the peak of activation bytes in MiB."""
    torch.manual_seed(1)  # dropout
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as memory:
        loss = model(inputs).square().mean()
        loss.backward()
    return loss.item(), memory.peak_bytes / 2**20


def main() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    inputs = torch.randn(4, 128, 64)

    plain_loss, plain_mib = train(model, inputs)
    names = actckpt.apply(model, blocks=torch.nn.TransformerEncoderLayer)
    loss, mib = train(model, inputs)

    print(f"checkpointed {len(names)} blocks: {', '.join(names)}")
    print(f"plain    loss {plain_loss:.9f}, peak {plain_mib:.1f} MiB")
    print(f"actckpt  loss {loss:.9f}, peak {mib:.1f} MiB")
    assert loss == plain_loss


if __name__ == "__main__":
    main()
