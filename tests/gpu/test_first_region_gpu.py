"""The first region of a process: what torch settles at its first use of a GPU must not lie between a run and its rerun.

Each program runs in a process of its own.
"""

from __future__ import annotations

import pytest
from gpu_oracle import run_in_process

_PROGRAM = """
import torch, actckpt
from torch.nn import functional as F
torch.manual_seed(0)
layer = torch.nn.Linear(64, 192).to("cuda", torch.{dtype})
x = torch.randn(2, 128, 64, device="cuda", dtype=torch.{dtype}, requires_grad=True)
{before}
def attend(x):
    q, k, v = layer(x).unflatten(-1, (3, 1, 64)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float()
def gradients(call):
    y = call(attend, x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, layer.weight])]
ours = gradients({call})
plain = gradients(lambda function, *args: function(*args))
assert torch.equal(ours[0], plain[0]), float((ours[0] - plain[0]).abs().max())
for one, other in zip(ours, plain):  # what some kernels of backward add up has no order
    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
print("right", torch._C._get_sdp_priority_order())
"""
_CALLS = {
    "checkpoint": "actckpt.checkpoint",
    "policy": "lambda function, *args: actckpt.checkpoint(function, *args, policy=[])",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("call", _CALLS)
def test_attention_is_the_first_that_runs_in_a_region(call: str, dtype: str) -> None:
    program = _PROGRAM.format(dtype=dtype, call=_CALLS[call], before="")
    assert "right" in run_in_process("-c", program).stdout


def test_an_order_of_kernels_that_the_program_has_set_stays() -> None:
    before = "torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])"
    program = _PROGRAM.format(dtype="bfloat16", call=_CALLS["checkpoint"], before=before)
    assert "right [0, 1, 2, 3, 4]" in run_in_process("-c", program).stdout
