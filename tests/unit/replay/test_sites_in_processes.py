"""Places, call sites and structures are the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

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
