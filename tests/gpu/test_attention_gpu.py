"""Each backend of scaled_dot_product_attention, whose dropout has a seed and an offset of its own on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from gpu_programs import DEVICE, OURS, Method, assert_as_plain, leaf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.filterwarnings("default")  # torch says why a backend cannot run

_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
_METHODS = ("rerun", "replay", "attention", "list", "per operator", "offload", "contexts")


class _Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(256, 768), nn.Linear(256, 256), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)


@pytest.mark.parametrize("backend", _BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("method", _METHODS)
def test_gradients_of_each_backend(method: str, dropout: float, backend: SDPBackend) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(_Attention(dropout), _Attention(dropout)).to(DEVICE, torch.bfloat16)

    def program(call: Method) -> Any:
        x = leaf(2, 256, 256, dtype=torch.bfloat16)
        h = x * 1.5
        with sdpa_kernel(backend):  # backward, and what runs again there, is outside of it
            for block in model:
                h = call(block, h)
        return h.detach(), list(torch.autograd.grad(h.float().square().mean(), [x, *model.parameters()]))

    try:
        program(lambda function, *args: function(*args))
    except RuntimeError as error:
        pytest.skip(f"{backend.name} does not run here: {error}")
    assert_as_plain(program, OURS[method])
