"""A torch that lacks a private name: the package imports, and what needs the name says so or works without it."""

import json
import subprocess
import sys

import pytest

#: Forks a process per name that is needed, and one for all that are optional. It takes names away from torch, imports
#: the package, and trains in each way. Where torch itself cannot train without one of several, they are halved. Its two
#: arguments are a seed and n: it does so for one in n of the names that are needed.
_PROGRAM = """
import functools, gc, importlib, json, os, random, re, sys, traceback
import torch
sys.dont_write_bytecode = False  # many processes import the package

def gradients(method):
    if method != "plain":
        import actckpt
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(2)]
    model, x = torch.nn.Sequential(*blocks), torch.randn(64, 8)
    call = model
    if method == "checkpoint":
        call = functools.partial(actckpt.checkpoint, model)
    elif method == "region":
        call = functools.partial(actckpt.checkpoint, model, policy="matmuls")
    elif method == "budget":
        actckpt.apply(model, activation_budget="90%")
    call(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]

def use_torch():
    from torch.utils._python_dispatch import TorchDispatchMode
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient)
    with Mode(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        x.exp().sum().backward()
    torch.distributed.is_available() and torch.distributed.is_initialized()
    torch.accelerator.current_accelerator()

class Gone:
    def __init__(self, name):
        self.name = name
    def __get__(self, *_):
        raise AttributeError(f"no attribute '{self.name}'")

class Without:
    def __init__(self, owner, name):
        self.__dict__.update(owner=owner, name=name)
    def __getattr__(self, name):
        if name == self.name:
            raise AttributeError(name)
        return getattr(self.owner, name)

def take_away(path):
    path = re.sub(r"([.](m|__(get|dict|func|code)__))+$", "", path)
    if path in sys.modules:
        sys.modules[path] = None
    *parts, name = path.split(".")
    outer, owner = None, sys.modules["torch"]
    for part in parts[1:]:
        outer, owner = owner, getattr(owner, part)
    try:
        delattr(owner, name)
    except (AttributeError, TypeError):  # inherited, or of an object whose names are fixed
        if isinstance(owner, type):
            setattr(owner, name, Gone(name))
        else:
            setattr(outer, parts[-1], Without(owner, name))

def names():
    for method in ("checkpoint", "region", "budget"):
        gradients(method)
    from actckpt._core.torch_private.lookup import LOOKED_UP, optional
    torch_modules = [name for name in sys.modules if name.split(".")[0] != "actckpt"]
    # `import torch` itself imports these by name.
    begins_with = ("torch._ops.OpOverload", "torch.utils._python_dispatch")
    needed = [[path] for path, is_needed in sorted(LOOKED_UP.items()) if is_needed and path not in begins_with]
    others = [path for path, is_needed in LOOKED_UP.items() if not is_needed and optional(path) is not None]
    return [*needed, others], torch_modules

def without(paths):
    for path in paths:
        take_away(path)
    try:
        use_torch()
        expected = gradients("plain")
    except Exception:
        return {"plain": "torch fails"}
    try:
        import actckpt
    except Exception:
        return {"import": traceback.format_exc()}
    found = {}
    for method in ("checkpoint", "region", "budget"):
        try:
            same = all(map(torch.equal, expected, gradients(method)))
            found[method] = "right" if same else "WRONG"
        except actckpt.errors.ActckptError as error:
            found[method] = "clear" if f"torch {torch.__version__} has no torch." in str(error) else str(error)
        except AttributeError as error:  # C++ reads `_cdata` of each tensor that it meets, by name
            found[method] = "clear" if "no attribute '_cdata'" in str(error) else traceback.format_exc()
        except Exception:
            found[method] = traceback.format_exc()
    return found

def in_child(function):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = function()
        except BaseException:
            said = {"import": traceback.format_exc()}
        with open(write, "w") as file:
            json.dump(said, file)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        said = file.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(said) if status == 0 else {"status": status}

def check(paths):
    said = in_child(functools.partial(without, paths))
    if "plain" in said and len(paths) > 1:
        check(paths[: len(paths) // 2])
        check(paths[len(paths) // 2 :])
    else:
        print(json.dumps([paths, said]), flush=True)

collected = in_child(names)
assert isinstance(collected, list), collected
groups, modules = collected
for module in modules:  # once, and not in each child
    try:
        importlib.import_module(module)
    except ImportError:
        pass
torch.set_num_threads(1)
gc.freeze()
*needed, others = groups
assert len(needed) > 50
random.Random(sys.argv[1]).shuffle(needed)
for paths in [*needed[:: int(sys.argv[2])], others]:
    check(paths)
"""


def test_without_any_one_private_name_the_package_imports_and_trains_or_says_what_is_missing(
    pytestconfig: pytest.Config,
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(pytestconfig.option.seed), str(pytestconfig.option.sample)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) > 10
    wrong = [(paths, said) for paths, said in found if not set(said.values()) <= {"right", "clear", "torch fails"}]
    assert not wrong, json.dumps(wrong, indent=1)
