"""The callback of `actckpt.integrations.transformers` in Trainer and in TRL's, on tiny models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import STEPS, assert_equal
from transformers_models import make
from transformers_training import arguments, run, trainer_of

import actckpt
from actckpt.integrations import transformers as integration
from actckpt.integrations.transformers import callback

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _nothing_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _text(seed: int, words: int = 8) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " " + " ".join(f"w{i}" for i in torch.randint(0, 61, (words,), generator=generator).tolist())


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """Takes down which blocks ran by actckpt."""

    blocks_ran = ()

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.blocks_ran = actckpt.report(model).blocks_ran


def _sft(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    rows = datasets.Dataset.from_list([{"text": _text(i)} for i in range(64)])
    args = arguments(folder, trl.SFTConfig, bf16=False, **options)
    return trl.SFTTrainer(
        model=model, args=args, train_dataset=rows, processing_class=_tokenizer(), callbacks=callbacks
    )


def _dpo(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    rows = [{"prompt": _text(i), "chosen": _text(100 + i), "rejected": _text(200 + i)} for i in range(64)]
    args = arguments(folder, trl.DPOConfig, bf16=False, **options)
    return trl.DPOTrainer(
        model=model,
        ref_model=make("llama"),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make_trainer", [trainer_of, _sft, _dpo], ids=["Trainer", "SFTTrainer", "DPOTrainer"])
def test_a_trainer_with_the_callback_trains_as_without(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    expected = run(make_trainer(tmp_path, make("llama"), [], gradient_checkpointing=False))
    seen, model = Seen(), make("llama")
    trainer = make_trainer(tmp_path, model, [callback(), seen], gradient_checkpointing=True)
    assert_equal(run(trainer), expected)
    assert len(seen.blocks_ran) == 3
    last = actckpt.report(model)  # it has ended
    assert last.rows and last.blocks_ran == seen.blocks_ran and str(last).startswith("The last report before")


def test_the_optimizer_is_told_beside_a_budget_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(integration, "apply", lambda model, **options: given.append(options))
    for options in ({"activation_budget": "50%"}, {"policy": "matmuls"}, {"budget": "1GiB", "optimizer": None}):
        run(trainer_of(tmp_path, make("llama"), [callback(**options)]))
    assert [isinstance(one.get("optimizer"), torch.optim.Optimizer) for one in given] == [True, False, False]


def test_a_trainer_that_finds_a_batch_that_fits_starts_again(tmp_path: Path) -> None:
    class Fails(Seen):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.sizes = [*getattr(self, "sizes", []), trainer._train_batch_size]
            if len(self.sizes) == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate more than there is")

    seen = Fails()
    trainer = trainer_of(tmp_path, make("llama"), [callback(), seen], auto_find_batch_size=True)
    run(trainer)
    assert len(seen.sizes) == 2 and seen.sizes[1] < seen.sizes[0]
    assert len(seen.blocks_ran) == 3


@pytest.mark.parametrize("make_trainer", [trainer_of, _sft], ids=["Trainer", "SFTTrainer"])
def test_a_model_that_is_applied_before_stays_so_in_a_trainer(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    expected = run(make_trainer(tmp_path, make("llama"), [], gradient_checkpointing=False))
    seen, model = Seen(), make("llama")
    actckpt.apply(model, "matmuls")
    assert_equal(run(make_trainer(tmp_path, model, [seen], gradient_checkpointing=True)), expected)
    assert len(seen.blocks_ran) == 3


def test_training_that_goes_on_from_a_checkpoint_of_the_trainer_is_that_of_plain_training(tmp_path: Path) -> None:
    expected = run(trainer_of(tmp_path / "plain", make("llama"), []))
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    run(trainer_of(tmp_path / "ours", make("llama"), [callback()], **saving))
    goes_on = trainer_of(tmp_path / "ours", make("llama"), [callback()], **saving)
    goes_on.train(resume_from_checkpoint=str(tmp_path / "ours" / f"checkpoint-{STEPS // 2}"))
    assert_equal([parameter.detach() for parameter in goes_on.model.parameters()], expected[STEPS:])
