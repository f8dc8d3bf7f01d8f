"""The callback of `actckpt.integrations.lightning`, and `apply` alone, in Lightning's Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from training import assert_equal

import actckpt
from actckpt.integrations import lightning as integration
from actckpt.integrations.lightning import callback

lightning = pytest.importorskip("lightning.pytorch")
from lightning_training import Module, fit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*deprecated")


@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"module": "net", "budget": "64MiB"}], ids=str)
def test_a_trainer_with_the_callback_trains_as_without(options: dict[str, Any], tmp_path: Path) -> None:
    plain, ours = Module(), Module()
    fit(plain, tmp_path)
    fit(ours, tmp_path, callback(**options))
    assert_equal(ours.trained(), plain.trained())
    assert ours.blocks_ran and (ours.plan is not None) == ("budget" in options)
    assert "policy" in options or "budget" in options or max(ours.held) < 0.5 * max(plain.held)
    assert not any("forward" in vars(module) for module in ours.modules())


def test_a_fit_that_fails_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module, ours = Module(), callback()
    module.fails = True
    with pytest.raises(RuntimeError, match="no more"):
        fit(module, tmp_path, ours)
    assert not any("forward" in vars(part) for part in module.modules())
    module.fails = False
    fit(module, tmp_path, ours)
    assert len(module.blocks_ran) == 4


def test_the_optimizer_is_told_beside_a_budget_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(integration, "apply", lambda part, **options: (given.append(options), actckpt.apply(part)))
    for options in ({"activation_budget": "50%"}, {"policy": "matmuls"}, {"budget": "1GiB", "optimizer": None}):
        trainer = fit(Module(), tmp_path, callback(**options))
    assert [type(each).__name__ for each in given[0]["optimizer"]] == ["AdamW"]
    assert "optimizer" not in given[1] and given[2]["optimizer"] is None
    assert trainer.optimizers


def test_a_module_that_is_applied_already_stays_so(tmp_path: Path) -> None:
    module = Module()
    actckpt.apply(module)
    with pytest.raises(actckpt.errors.BlocksError, match="checkpointed already"):
        fit(module, tmp_path, callback())
    assert len(actckpt.report(module).blocks_patched) == 4


def test_apply_alone_trains_as_plain_and_its_checkpoint_is_read_by_a_plain_module(tmp_path: Path) -> None:
    plain, ours = Module(), Module()
    actckpt.apply(ours)
    fit(plain, tmp_path)
    trainer = fit(ours, tmp_path)
    assert_equal(ours.trained(), plain.trained())
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    read = Module.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert_equal([*read.state_dict().values()], [*ours.state_dict().values()])


def test_a_program_with_the_older_package_gets_a_callback_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    older = pytest.importorskip("pytorch_lightning")
    assert isinstance(callback(), lightning.Callback) and not isinstance(callback(), older.Callback)
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert isinstance(callback(), older.Callback)
