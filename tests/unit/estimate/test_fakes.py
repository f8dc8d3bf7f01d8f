"""Programs that run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
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
