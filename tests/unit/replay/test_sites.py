"""What tells one call site from another, in this process and in others."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from actckpt._replay import call_sites
from actckpt._replay.call_sites import caller_of, site_of, site_of_call


def test_a_site_does_not_go_by_the_address_of_code_that_is_gone() -> None:
    for number in range(100):
        site = site_of((compile(f"x = {number}", "made up", "exec"), 1))
        assert site.num_calls == 0
        site.num_calls = 1


def test_a_site_goes_by_what_the_code_does_where_two_begin_at_one_place() -> None:
    one, other = (lambda x: x.sin()), (lambda x: x.cos())  # fmt: skip
    assert site_of(caller_of(one)) is site_of(caller_of(one)) is not site_of(caller_of(other))


def test_what_is_remembered_of_code_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(call_sites, "_MAX_SITES", 10)
    codes = [compile(f"z = {number}", f"made up {number}", "exec") for number in range(30)]
    for code in codes:
        site_of((code, 1))
    assert len(call_sites._by_line) <= 10


class _Called(torch.nn.Module):
    def forward(self, x: Any, scale: Any = None) -> Any:
        return x if scale is None else scale(x)

    def other(self, x: Any) -> Any:
        return -x


def test_a_remembered_site_goes_by_defaults_and_code_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = _Called(), torch.ones(2)
    before = site_of_call(module.forward, (x,), {})
    assert site_of_call(module.forward, (x,), {}) is before
    monkeypatch.setattr(_Called.forward, "__defaults__", (torch.nn.ReLU(),))
    assert site_of_call(module.forward, (x,), {}) is site_of(caller_of(module.forward, (x,))) is not before
    monkeypatch.setattr(_Called.forward, "__defaults__", (None,))
    monkeypatch.setattr(_Called.forward, "__code__", _Called.other.__code__)
    assert site_of_call(module.forward, (x,), {}) is site_of(caller_of(module.forward, (x,))) is not before


def test_nothing_is_remembered_of_a_method_whose_defaults_may_come_to_hold_something_else() -> None:
    steps: list[Any] = [torch.nn.ReLU()]

    class Stepping(torch.nn.Module):
        def forward(self, x: Any, steps: Any = steps) -> Any:
            return steps[0](x)

    module, x = Stepping(), torch.ones(2)
    before = site_of_call(module.forward, (x,), {})
    steps[0] = torch.nn.Tanh()
    assert site_of_call(module.forward, (x,), {}) is site_of(caller_of(module.forward, (x,))) is not before


def test_a_remembered_site_is_forgotten_with_its_module() -> None:
    module = _Called()
    site_of_call(module.forward, (torch.ones(2),), {})
    number = id(module)
    assert number in call_sites._by_owner
    del module
    gc.collect()
    assert number not in call_sites._by_owner


_PROGRAM = """
import json, sys
if sys.argv[1] == "1":  # other addresses, other modules
    import decimal, sqlite3
    heap = [object() for _ in range(10**5)]
import torch, actckpt
from actckpt._replay import call_sites
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Tanh())
places = []
for table in ("recompute", {"1.1::aten.gelu.default#0.0": "keep"}, {"**::aten.addmm": "keep", "0": "offload"}):
    with actckpt.region(table) as region:
        y = model(torch.ones(4, 8))
    y.sum().backward()
    places.append([value.as_dict()["place"] for value in region.report().values if value.place is not None])
keys = [str(key) for key in call_sites._by_code]
sites = [(sorted(site.structures), sorted(site.audited), sorted(map(str, site.modules.items())), site.where)
         for site in call_sites._by_code.values()]
print(json.dumps([places, keys, sites]))
"""


def test_what_outlives_a_step_is_the_same_in_every_process() -> None:
    found = []
    for seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(int(seed != "0"))]
        found.append(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
    assert found[0] == found[1] and "1.1::aten.gelu" in found[0]
