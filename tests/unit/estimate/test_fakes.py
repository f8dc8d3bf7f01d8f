"""Programs that run on fake tensors, and integers whose numbers are known nevertheless."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from actckpt._core import torch_private
from actckpt._estimate.fakes import Fakes
from actckpt._estimate.targets import named_target


@pytest.fixture
def fakes() -> Iterator[Fakes]:
    with Fakes(named_target("h100")) as found:
        yield found


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch_private.fake_tensor_type) and tensor.device.type == "cpu"


def test_devices_that_the_program_names_are_replaced(fakes: Fakes) -> None:
    x = torch.ones(2, 3, device="cuda:1")
    model = nn.Linear(3, 4).cuda().to("cuda", torch.bfloat16).to(0)
    made = [x, x.to(0), x.to("cuda", torch.float16), x.to(device=torch.device("cuda")), x.cuda(), x.pin_memory()]
    made += [model.weight, torch.zeros_like(x, device="cuda"), torch.arange(3, device=torch.device("cuda", 0))]
    with torch.device("cuda"):
        made.append(torch.ones(2))
    assert all(map(_is_fake, made))
    assert model.weight.dtype is torch.bfloat16 and isinstance(model.weight, nn.Parameter)


def test_tensors_from_outside_are_replaced_always_by_the_same_and_views_stay_views() -> None:
    outside = torch.arange(12.0)
    view = outside.view(3, 4)[1:]
    with Fakes(named_target("cpu")) as fakes:
        one, two = fakes.of(outside), fakes.of(view)
        assert fakes.of(outside) is one and (two.shape, two.stride(), two.storage_offset()) == ((2, 4), (4, 1), 4)
        assert one.untyped_storage() is two.untyped_storage()
        outside.add_(1)
        view.mul_(2)
        assert _is_fake(outside + view.sum())
        assert fakes.within({"a": [outside, 3], "b": 4})["a"][0] is one
        same = {"a": [1, "2"]}
        assert fakes.within(same) is same
    assert torch.equal(outside, torch.arange(12.0))


def test_what_is_moved_from_the_host_is_copied_and_what_is_there_is_not(fakes: Fakes) -> None:
    outside = _REAL
    assert outside.cuda().untyped_storage() is not fakes.of(outside).untyped_storage()
    there = outside.to("cuda")
    assert there.cuda().untyped_storage() is there.untyped_storage()
    assert there.to("cuda").untyped_storage() is there.untyped_storage()


_REAL = torch.ones(4)


def test_autocast_for_a_gpu_runs_and_widens_what_it_widens_there(fakes: Fakes) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x)
        assert (y.dtype, functional.layer_norm(y, (4,)).dtype, y.softmax(-1).dtype) == (
            torch.bfloat16,
            *2 * [torch.float32],
        )
        assert functional.gelu(y).dtype is torch.bfloat16
    assert functional.softmax(layer(x).bfloat16(), -1).dtype is torch.bfloat16


def test_norms_and_dropout_save_what_those_of_a_gpu_save(fakes: Fakes) -> None:
    x = torch.ones(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        nn.RMSNorm(16, dtype=torch.bfloat16)(x)
        assert all(each.dtype is torch.bfloat16 for each in saved)
        saved.clear()
        nn.Dropout(0.5)(x)
        assert [each.dtype for each in saved] == [torch.bool]


def _trained() -> list[Tensor]:
    """Parameters after two real steps."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 1)).to(torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return list(model.parameters())


def test_other_threads_go_on_with_real_tensors(fakes: Fakes) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_trained).result()
        expected = pool.submit(lambda: [parameter.sum().item() for parameter in found]).result()
    assert all(type(parameter) is nn.Parameter for parameter in found)
    fakes.__exit__()
    assert [parameter.sum().item() for parameter in _trained()] == expected


def test_everything_is_as_before_afterwards() -> None:
    before = (nn.Module.__call__, nn.Module._apply, torch.autocast.__init__, functional.dropout)
    with pytest.raises(KeyError), Fakes(named_target("h100")):
        raise KeyError
    assert (nn.Module.__call__, nn.Module._apply, torch.autocast.__init__, functional.dropout) == before
    assert type(torch.ones(1)) is Tensor


# Integers whose numbers are known on tensors that have none.


_OUTSIDE = torch.tensor([[1, 1, 0], [1, 1, 1]])


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
