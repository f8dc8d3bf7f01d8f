"""The demo's model and the text it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actckpt.demo.data import batches, read_text
from actckpt.demo.model import LanguageModel

SEQ = 16


def _model(*, dropout: float = 0.0) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(layers=2, dim=16, heads=4, kv_heads=2, seq=SEQ, dropout=dropout)


def test_logits_have_one_score_per_byte_value() -> None:
    assert _model()(torch.zeros(3, SEQ, dtype=torch.long)).shape == (3, SEQ, 256)


def test_no_position_sees_what_comes_after_it() -> None:
    model, tokens = _model(), torch.arange(SEQ).view(1, SEQ)
    changed = tokens.clone()
    changed[0, -1] = 99
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_positions_matter() -> None:
    logits = _model()(torch.tensor([[5, 9, 7], [9, 5, 7]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_same_seed_gives_the_same_model_and_dropout_is_random_in_training_only() -> None:
    tokens = torch.arange(SEQ).view(1, SEQ)
    first, second = _model(dropout=0.5), _model(dropout=0.5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first(tokens), first(tokens))
    assert torch.equal(first.eval()(tokens), second.eval()(tokens))


def test_text_is_the_source_of_the_standard_library() -> None:
    text = read_text()
    assert text.dtype == torch.uint8
    assert len(text) > 2**20
    assert b"import" in bytes(text[:100_000].tolist())


def test_modules_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
    assert bytes(read_text(tmp_path).tolist()) == b"a.pyb.py"


def test_missing_source_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds 0 bytes of \*\.py files; run it with a Python"):
        read_text(tmp_path)


def test_targets_follow_inputs_and_seeds_decide_the_batches() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    source = batches(text, batch=3, seq=SEQ, seed=1)
    first, second = next(source), next(source)
    again = next(batches(text, batch=3, seq=SEQ, seed=1))
    other = next(batches(text, batch=3, seq=SEQ, seed=2))
    inputs, targets = first
    assert inputs.shape == targets.shape == (3, SEQ)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs, again[0])
    assert not torch.equal(inputs, second[0])
    assert not torch.equal(inputs, other[0])


def test_the_shortest_possible_text_works_and_a_shorter_one_is_refused() -> None:
    text = torch.zeros(SEQ + 1, dtype=torch.uint8)
    assert next(batches(text, batch=1, seq=SEQ, seed=0))[0].shape == (1, SEQ)
    with pytest.raises(ValueError, match=r"--seq is 17, but the text has only 17 bytes; try --seq 16"):
        next(batches(text, batch=1, seq=SEQ + 1, seed=0))
