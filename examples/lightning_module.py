"""Give Lightning's `Trainer` a memory budget: one callback, which can also stand in a configuration.

Needs lightning. Run: python examples/lightning_module.py
"""

import lightning.pytorch as pl
import torch

import actckpt
from actckpt.integrations.lightning import callback


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.TransformerEncoderLayer(32, 4, 128, batch_first=True) for _ in range(4)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_steps=12,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # A budget needs a module that each step calls, here `self.net`.
        callbacks=[callback(module="net", activation_budget="60%")],  # or policy="matmuls", or neither
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(96, 16, 32), batch_size=8))
    print(actckpt.report(module.net))  # of the last step


if __name__ == "__main__":
    main()
