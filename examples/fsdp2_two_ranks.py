"""Shard a checkpointed model with FSDP2: apply first, then `fully_shard` each block.

Run: torchrun --nproc-per-node 2 examples/fsdp2_two_ranks.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import actckpt
from actckpt.memory import LiveStorages


def make() -> torch.nn.Module:
    torch.manual_seed(0)  # the same parameters on each rank
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0, batch_first=True) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Shard, and train three steps; returns the last loss and the peak of activation bytes of a step in MiB."""
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for _ in range(3):
        optimizer.zero_grad()
        with LiveStorages(parameters=model.parameters()) as memory:
            loss = model(inputs).square().mean()
            loss.backward()
        optimizer.step()
    return loss.item(), memory.peak_bytes / 2**20


def main() -> None:
    dist.init_process_group("gloo")  # yours: "nccl", and a device for each rank
    inputs = torch.randn(8, 128, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain_loss, plain_mib = train(make(), inputs)
    model = make()
    actckpt.apply(model)  # or policy="matmuls", or activation_budget="60%"
    loss, mib = train(model, inputs)
    assert loss == plain_loss
    if dist.get_rank() == 0:
        print(f"plain    loss {plain_loss:.9f}, peak {plain_mib:.1f} MiB")
        print(f"actckpt  loss {loss:.9f}, peak {mib:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
