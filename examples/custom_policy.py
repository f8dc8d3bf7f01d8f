"""Write a policy: by operator, and as a function of each saved tensor. Same numbers, less memory.

Run: python examples/custom_policy.py
"""

import torch

import actckpt
from actckpt import Action, SavedTensorInfo
from actckpt.memory import LiveStorages

# Keep what is expensive to compute again, recompute the rest. A packet stands for all its overloads.
BY_OPERATOR = actckpt.policies.PerOp(
    {torch.ops.aten.addmm: Action.KEEP, torch.ops.aten.bmm: Action.KEEP}, default=Action.RECOMPUTE
)


def attention_matrices(info: SavedTensorInfo) -> Action:
    """Recompute what attention saves for each pair of positions: large, and cheap to compute again."""
    if len(info.shape) >= 3 and info.shape[-1] == info.shape[-2]:
        return Action.RECOMPUTE
    return Action.KEEP


def train(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[float, list[torch.Tensor], float]:
    """Run one step; returns the loss, the gradients, and MiB held between forward and backward."""
    torch.manual_seed(1)  # dropout
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as memory:
        loss = model(inputs).square().mean()
        held_mib = memory.live_bytes / 2**20
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None], held_mib


def main() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    inputs = torch.randn(4, 128, 64)

    loss, gradients, held_mib = train(model, inputs)
    print(f"{'plain':20} loss {loss:.9f}, held for backward {held_mib:5.1f} MiB")
    policies = {"keep matmuls": BY_OPERATOR, "attention matrices": attention_matrices, "recompute": Action.RECOMPUTE}
    for name, policy in policies.items():
        actckpt.apply(model, policy=policy, blocks=torch.nn.TransformerEncoderLayer)
        loss_now, gradients_now, held_mib = train(model, inputs)
        actckpt.remove(model)
        print(f"{name:20} loss {loss_now:.9f}, held for backward {held_mib:5.1f} MiB")
        assert loss_now == loss
        assert all(torch.equal(a, b) for a, b in zip(gradients_now, gradients, strict=True))

    with actckpt.region(attention_matrices) as region:  # around any block of code
        hidden = model[0](inputs)
    hidden.square().mean().backward()
    print(region.report())


if __name__ == "__main__":
    main()
