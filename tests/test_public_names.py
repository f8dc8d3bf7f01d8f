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

#: Imports every module in one random order, then calls every public function.
_PROGRAM = """
import importlib, pkgutil, random, sys, types
import torch
import actckpt

modules = [found.name for found in pkgutil.walk_packages(actckpt.__path__, "actckpt.")]
modules.remove("actckpt.__main__")  # runs the command line
random.Random(int(sys.argv[1])).shuffle(modules)
for name in modules:
    importlib.import_module(name)

layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
model = torch.nn.Sequential(layer, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
x = torch.randn(2, 4)
tracker = actckpt.rng.python_random

def step():
    model(x).sum().backward()

def raises(error, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except error:
        return
    raise AssertionError(f"{function} raised no {error.__name__}")

CALLS = {  # in this order
    "apply": lambda f: f(model),
    "report": lambda f: f(model),
    "remove": lambda f: f(model),
    "checkpoint": lambda f: f(layer, x).sum().backward(),
    "checkpoint_sequential": lambda f: f(model, 2, x).sum().backward(),
    "compare": lambda f: f(step, model=model, policies={}, rounds=1),
    "profile": lambda f: f(step, model=model),
    "plan": lambda f: f(step, model=model, activation_budget="100%", race=False),
    "estimate": lambda f: f(step, model=model, policies={}),
    "offload": lambda f: f(min_bytes=1)(layer)(x).sum().backward(),
    "region": lambda f: f()(layer)(x).sum().backward(),
    "trace": lambda f: raises(FileNotFoundError, f("no/such/folder/step.json").__enter__),
    "explain_oom": lambda f: f(model).__enter__(),
    "memory.explain_oom": lambda f: f(model).__enter__(),
    "memory.measure_step": lambda f: f(step, device="cpu", parameters=model.parameters()),
    "planner.solve": lambda f: raises(actckpt.errors.CostTableError, f, {}, budget=1),
    "planner.simulate": lambda f: raises(actckpt.errors.CostTableError, f, {}, None),
    "rng.register_tracker": lambda f: f(tracker),
    "rng.unregister_tracker": lambda f: f(tracker),
    "te.checkpoint": lambda f: f(layer, x).sum().backward(),
    "te.unwrap": lambda f: raises(actckpt.errors.BlocksError, f, model),
    "te.wrap": lambda f: raises(actckpt.errors.BlocksError, f, model),
}
public = {"": actckpt} | {f"{name}.": getattr(actckpt, name) for name in sys.argv[2:]}
functions = {
    prefix + name: getattr(module, name)
    for prefix, module in public.items()
    for name in module.__all__
    if isinstance(getattr(module, name), types.FunctionType) or name == "region"
}
assert CALLS.keys() <= functions.keys(), CALLS.keys() - functions.keys()
for name in [*CALLS, *(functions.keys() - CALLS.keys())]:
    CALLS.get(name, lambda f: f())(functions[name])
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
def test_every_public_function_can_be_called_after_all_modules_were_imported_in_a_random_order(seed: int) -> None:
    names = [name.removeprefix("actckpt.") for name in _PUBLIC[1:]]
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(seed), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
