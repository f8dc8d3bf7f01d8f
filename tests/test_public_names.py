"""No module bears the name of a public function: whatever is imported, in any order, each name stays what it is."""

import importlib
import pickle
import pkgutil
import subprocess
import sys
import types
import typing

import pytest
import torch.utils.checkpoint

import actckpt

_ALL_MODULES = [found.name for found in pkgutil.walk_packages(actckpt.__path__, "actckpt.")]
_PUBLIC = ("actckpt", "actckpt.memory", "actckpt.planner", "actckpt.policies", "actckpt.rng", "actckpt.te")

#: Imports every module in one random order: public names stay what they were, and a step runs.
_PROGRAM = """
import importlib, pkgutil, random, sys
import torch
import actckpt

def public():
    modules = [sys.modules[owner] for owner in sys.argv[2:]]
    return {(module.__name__, name): getattr(module, name) for module in modules for name in module.__all__}

for owner in sys.argv[2:]:
    importlib.import_module(owner)
before = public()
modules = [found.name for found in pkgutil.walk_packages(actckpt.__path__, "actckpt.")]
modules.remove("actckpt.__main__")  # runs the command line
random.Random(int(sys.argv[1])).shuffle(modules)
for name in modules:
    importlib.import_module(name)
after = public()
assert not [name for name, found in before.items() if after[name] is not found]
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))
actckpt.apply(model)
actckpt.checkpoint(model, torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("owner", [*_PUBLIC, "actckpt.errors"])
def test_what_is_public_says_a_public_place_where_it_is_found_and_pickled(owner: str) -> None:
    module = importlib.import_module(owner)
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, (type, types.FunctionType)) and found.__module__.split(".")[0] == "actckpt":
            assert not any(part.startswith("_") for part in found.__module__.split(".")), f"{owner}.{name}"
            assert getattr(importlib.import_module(found.__module__), found.__name__) is found
            assert pickle.loads(pickle.dumps(found)) is found
            if isinstance(found, type) and found.__module__ == owner:
                typing.get_type_hints(found)  # needs the names of the module in which it was defined


def test_names_of_torch_are_the_same_objects_and_no_names_of_ours() -> None:
    for name in torch.utils.checkpoint.__all__:
        if name not in ("checkpoint", "checkpoint_sequential"):
            assert getattr(actckpt, name) is getattr(torch.utils.checkpoint, name)
            assert name not in dir(actckpt)
    assert dir(actckpt) == sorted(actckpt.__all__)
    assert not any(name.startswith("_") for name in dir(actckpt) if name != "__version__")
    with pytest.raises(AttributeError, match=r"'AuditError': it is in actckpt\.errors"):
        _ = actckpt.AuditError


def test_no_module_bears_the_name_of_a_public_function() -> None:
    for owner in _PUBLIC:
        module = importlib.import_module(owner)
        functions = {name for name in module.__all__ if not isinstance(getattr(module, name), type(sys))}
        below = {name.rpartition(".")[2] for name in _ALL_MODULES if name.rpartition(".")[0] == owner}
        assert not functions & below


@pytest.mark.parametrize("seed", range(3))
def test_names_stay_what_they_are_when_all_modules_are_imported_in_a_random_order(seed: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(seed), *_PUBLIC]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
