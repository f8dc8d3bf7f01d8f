"""Integers whose numbers are known on tensors that have none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from actckpt._core import torch_private
from actckpt._estimate.fakes import Fakes
from actckpt._estimate.targets import named_target

_OUTSIDE = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    with Fakes(named_target("h100")) as found:
        yield found


def _is_one_text(positions: Tensor) -> bool:
    """Read positions as Transformers does where it is given no mask."""
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())


def test_integers_of_factories_and_what_is_made_of_them_can_be_read(fakes: Fakes) -> None:
    positions = torch.arange(8, device="cuda")[None]
    assert _is_one_text(positions.expand(2, -1))
    assert not _is_one_text(torch.cat([positions, positions], 1))
    assert torch.ones(2, 3, dtype=torch.bool).all() and not torch.zeros(3, dtype=torch.long).any()
    assert torch.full((4,), 7).sum().item() == 28 and int(torch.tensor([3, 9]).max(0)[1]) == 1
    assert torch.equal(torch.arange(3), torch.arange(3)) and not torch.equal(
        torch.arange(3), torch.ones(3, dtype=torch.long)
    )


def test_integers_from_outside_can_be_read_also_where_they_were_moved(fakes: Fakes) -> None:
    assert not _OUTSIDE.cuda().bool().all() and _OUTSIDE.to("cuda")[:, :2].bool().all()
    assert int(_OUTSIDE.sum()) == 5
    assert _OUTSIDE.sum(-1).tolist() == [2, 3]


def test_known_integers_are_no_real_tensors(fakes: Fakes) -> None:
    made = [torch.arange(8), _OUTSIDE + 1, torch.ones(3, dtype=torch.bool)]
    assert all(isinstance(each, torch_private.fake_tensor_type) for each in made)
    assert all(each.untyped_storage().device.type == "meta" for each in made)


def _written() -> Tensor:
    x = torch.arange(4)
    x[1:].add_(1)
    return x


def _written_behind_a_view() -> Tensor:
    x = torch.arange(4)
    view = x[1:]
    x.zero_()
    return view


def _many_steps() -> Tensor:
    x = torch.arange(4)
    for _ in range(300):
        x = x + 1
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randint(5, (3,)),
        lambda: torch.randperm(4),
        lambda: torch.empty(3, dtype=torch.long),
        lambda: torch.empty_like(torch.arange(3)),
        lambda: torch.ones(3) > 0,
        lambda: torch.ones(3),
        lambda: torch.arange(3) + torch.randint(5, (3,)),
        lambda: torch.ones(1 << 11, 1 << 11, dtype=torch.bool),
        lambda: torch.arange(3, device="meta"),
        _written,
        _written_behind_a_view,
        _many_steps,
    ],
)
def test_other_numbers_are_not_known(fakes: Fakes, make: Callable[[], Tensor]) -> None:
    with pytest.raises((*torch_private.needs_numbers, RuntimeError)):
        bool((make() == 0).all())


def test_what_was_made_before_a_tensor_was_written_stays_known(fakes: Fakes) -> None:
    x = torch.arange(4)
    doubled = x * 2
    x.zero_()
    assert doubled.sum().item() == 12


def test_a_library_that_asks_whether_a_tensor_is_a_fake_hears_no_where_its_numbers_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("transformers.utils.import_utils")
    asked = lambda value: isinstance(value, torch_private.fake_tensor_type)  # noqa: E731
    module.is_fake_tensor = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with Fakes(named_target("h100")):
        is_fake = module.is_fake_tensor
        assert is_fake(torch.randint(5, (3,))) and is_fake(torch.ones(3))
        assert not is_fake(torch.arange(3)) and not is_fake(None)
    assert module.is_fake_tensor is asked
