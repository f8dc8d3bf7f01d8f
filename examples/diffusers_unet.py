"""Train a UNet of Diffusers with checkpointed blocks: the loss of plain training, less memory.

Needs diffusers. Run: python examples/diffusers_unet.py
"""

import diffusers
import torch

import actckpt
from actckpt.memory import LiveStorages


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def train(model: torch.nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """Train three steps of denoising; returns the last loss and the peak of activation bytes in MiB."""
    torch.manual_seed(1)
    scheduler = diffusers.DDPMScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        noise, times = torch.randn_like(images), torch.randint(0, 1000, (len(images),))
        optimizer.zero_grad()
        with LiveStorages(parameters=model.parameters()) as memory:
            predicted = model(scheduler.add_noise(images, noise, times), times).sample
            loss = torch.nn.functional.mse_loss(predicted, noise)
            loss.backward()
        optimizer.step()
    return loss.item(), memory.peak_bytes / 2**20


def main() -> None:
    torch.manual_seed(2)
    images = torch.randn(2, 3, 16, 16)
    plain_loss, plain_mib = train(make(), images)
    model = make()
    blocks = actckpt.apply(model)  # in place of model.enable_gradient_checkpointing()
    loss, mib = train(model, images)
    print(f"checkpointed {len(blocks)} blocks")
    print(f"plain    loss {plain_loss:.9f}, peak {plain_mib:.1f} MiB")
    print(f"actckpt  loss {loss:.9f}, peak {mib:.1f} MiB")
    assert loss == plain_loss


if __name__ == "__main__":
    main()
