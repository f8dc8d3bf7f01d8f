"""The callback of `actckpt.integrations.lightning`, and `apply` alone, in Lightning's Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from training import STEPS, assert_equal

import actckpt
from actckpt.integrations import lightning as integration
from actckpt.integrations.lightning import callback
from actckpt.memory import LiveStorages

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*deprecated")


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Trains a part of itself; takes down what steps held."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: torch.nn.Sequential(  # noqa: E731
            torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 16)
        )
        self.net = torch.nn.Sequential(*(block() for _ in range(4)))
        self.losses: list[torch.Tensor] = []
        self.held: list[int] = []
        self.blocks_ran: tuple[str, ...] = ()
        self.plan: Any = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no more")
        torch.manual_seed(index)
        with LiveStorages(parameters=self.parameters()) as live:
            loss = self.net(batch[0]).square().mean()
            self.held.append(live.live_bytes)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if any("forward" in vars(module) for module in self.net):
            report = actckpt.report(self)
            self.blocks_ran, self.plan = report.blocks_ran, report.plan

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(module: Module, folder: Path, *callbacks: Any) -> Any:
    trainer = lightning.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=8))
    assert len(module.losses) == STEPS
    return trainer


def _trained(module: Module) -> list[torch.Tensor]:
    return [*module.losses, *(parameter.detach() for parameter in module.parameters())]


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"module": "net", "budget": "64MiB"}], ids=str)
def test_a_trainer_with_the_callback_trains_as_without(options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = Module(), Module()
    _fit(plain, tmp_path)
    _fit(ours, tmp_path, callback(**options))
    assert_equal(_trained(ours), _trained(plain))
    assert ours.blocks_ran and (ours.plan is not None) == ("budget" in options)
    assert "policy" in options or "budget" in options or max(ours.held) < 0.5 * max(plain.held)
    assert not any("forward" in vars(module) for module in ours.modules())


def test_apply_alone_trains_as_the_callback_does(tmp_path: Path) -> None:
    plain, ours = Module(), Module()
    actckpt.apply(ours)
    _fit(plain, tmp_path)
    _fit(ours, tmp_path)
    assert_equal(_trained(ours), _trained(plain))


def test_a_fit_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module, ours = Module(), callback()
    module.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        _fit(module, tmp_path, ours)
    assert not any("forward" in vars(part) for part in module.modules())
    module.fails = False
    _fit(module, tmp_path, ours)
    assert len(module.blocks_ran) == 4


def test_the_optimizer_is_told_beside_a_budget_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(integration, "apply", lambda part, **options: (given.append(options), actckpt.apply(part)))
    for options in ({"activation_budget": "50%"}, {"policy": "matmuls"}, {"budget": "1GiB", "optimizer": None}):
        trainer = _fit(Module(), tmp_path, callback(**options))
    assert [type(each).__name__ for each in given[0]["optimizer"]] == ["AdamW"]
    assert "optimizer" not in given[1] and given[2]["optimizer"] is None
    assert trainer.optimizers


def test_a_module_that_is_applied_already_stays_so(tmp_path: Path) -> None:
    module = Module()
    actckpt.apply(module)
    with pytest.raises(actckpt.errors.BlocksError, match="checkpointed already"):
        _fit(module, tmp_path, callback())
    assert len(actckpt.report(module).blocks_patched) == 4


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="nett"):
        _fit(Module(), tmp_path, callback(module="nett"))


def test_a_checkpoint_of_the_trainer_is_read_by_a_plain_module(tmp_path: Path) -> None:
    ours = Module()
    actckpt.apply(ours)
    trainer = _fit(ours, tmp_path)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    plain = Module.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert_equal([*plain.state_dict().values()], [*ours.state_dict().values()])


def test_a_program_with_the_older_package_gets_a_callback_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    older = pytest.importorskip("pytorch_lightning")
    assert isinstance(callback(), lightning.Callback) and not isinstance(callback(), older.Callback)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert isinstance(callback(), older.Callback)
