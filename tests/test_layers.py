"""Imports point one way (see docs/how-it-works.md), and importing actckpt is cheap."""

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "actckpt"
_SOURCES = _ROOT / "csrc"

#: Lower rooms first: a module may import from rooms of the lines before its own, and from its own room.
_ROOMS = [
    ["_version", "_error_base", "_text", "_show"],
    ["action", "_report_page"],
    ["_C"],
    ["errors", "config"],
    ["_core", "planner"],
    ["_rerun", "_offload"],
    ["_replay"],
    ["_bind", "_interface", "policies"],
    ["_options", "rng"],
    ["_compile"],
    ["_checkpointed_call"],
    ["regions", "api"],
    ["_blocks"],
    ["statistics", "memory"],
    ["_budget"],
    ["_cycles"],
    ["blocks"],
    ["te", "_estimate", "integrations"],
    ["budgets", "doctor", "memory_labels", "memory_profile", "tracing"],
    ["comparison"],
    ["estimation"],
    ["demo"],
    ["_commands"],
    ["cli"],
    ["__main__", "run"],
]
_RANKS = {room: rank for rank, rooms in enumerate(_ROOMS) for room in rooms}

#: The same of the C++ sources. The engine knows no other room, and only what binds it knows the engine.
_CPP_ROOMS = [["core", "engine"], ["graph", "rerun", "offload"], ["record"], ["replay"], ["bind"]]
_CPP_RANKS = {room: rank for rank, rooms in enumerate(_CPP_ROOMS) for room in rooms}


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@functools.cache
def _dotted(source: str, *, inside: bool = True) -> set[str]:
    """Return what code, or its top level, names with dots: what it imports, attributes, and those of `getattr`."""
    tree = ast.parse(source)
    found: set[str] = set()
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name, *_ = node.args
            found |= {f"{ast.unparse(owner)}.{name.value}"} if isinstance(name, ast.Constant) else set()
    return found


def _imported(path: Path, *, inside: bool = True) -> set[str]:
    """Return the names of the package that a module imports, with those that it imports inside of functions."""
    return {name for name in _dotted(path.read_text(), inside=inside) if name.split(".")[0] == "actckpt"}


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = path.relative_to(_PACKAGE).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    for name in _imported(path):
        imported = _room(name)
        if imported in _RANKS:
            assert imported == room or _RANKS[imported] < _RANKS[room], f"{path.name} imports {name}"
        else:  # `from actckpt import name`: what the package exports, for rooms above the API
            assert _RANKS[room] > _RANKS["blocks"], f"{path.name} imports the public name {name}"


@pytest.mark.parametrize("path", sorted(_PACKAGE.glob("te/*.py")), ids=lambda path: path.name)
def test_te_imports_private_rooms_through_its_interface_only(path: Path) -> None:
    private = ("_core", "_rerun", "_offload", "_replay", "_bind", "_C")
    for name in _imported(path):
        is_allowed = name == "actckpt._core.extensions" or name.startswith("actckpt._core.extensions.")
        assert is_allowed or not name.startswith(tuple(f"actckpt.{room}" for room in private)), name


@pytest.mark.parametrize("path", sorted(_SOURCES.rglob("*.*")), ids=lambda path: str(path.relative_to(_SOURCES)))
def test_includes_point_downward(path: Path) -> None:
    room = path.relative_to(_SOURCES).parts[0]
    for name in re.findall(r'#include "(\w+)/', path.read_text()):
        assert name == room or _CPP_RANKS[name] < _CPP_RANKS[room], f"{path.name} includes from {name}"
        assert name != "engine" or room in ("engine", "bind"), f"{path.name} includes from the engine"


def _defined(path: Path) -> set[str]:
    """Names of types, functions and tables that a C++ file defines for itself, and of types for all."""
    found, is_own = set(), path.suffix == ".h"
    for line in path.read_text().splitlines():
        if line == "namespace {" or line == "}  // namespace":
            is_own = line == "namespace {"
        type_name = re.match(r"(?:class|struct|enum class) (\w+)(?: : .*)? \{", line)
        table = re.match(r"(?:static )?Py\w+ (\w+)(?:\[\])? = ", line)
        if type_name or (is_own and table):
            found.add((type_name or table)[1])  # type: ignore[index]
    return found


def test_cpp_names_mean_one_thing() -> None:
    """A folder is compiled as one file (setup.py), and equal names of types in two would be one type to the linker."""
    seen: dict[tuple[str, str], Path] = {}
    for path in sorted(_SOURCES.rglob("*.*")):
        for name in _defined(path):
            key = (name, "" if path.suffix == ".h" else path.relative_to(_SOURCES).parts[0])
            assert key not in seen, f"{name} stands in {seen[key]} and in {path}"
            seen[key] = path


_FOLDERS = sorted(path.parent.name for path in _PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", _FOLDERS)
def test_modules_of_a_room_import_each_other_in_no_circle(room: str) -> None:
    """But for imports inside of functions."""
    prefix = f"actckpt.{room}."
    imports = {
        path.stem: {name.split(".")[2] for name in _imported(path, inside=False) if name.startswith(prefix)}
        for path in (_PACKAGE / room).glob("*.py")
    }
    graphlib.TopologicalSorter(imports).prepare()  # raises where there is one


#: The most names of a folder that other rooms import, and the most headers that they include: its door.
_DOORS = {"_blocks": 37, "_budget": 28, "_commands": 12, "_compile": 2, "_core": 88, "_cycles": 3, "_estimate": 7}
_DOORS |= {"_offload": 17, "_replay": 27, "_report_page": 10, "_rerun": 14, "_show": 5, "_text": 19}
_DOORS |= {"integrations": 0, "planner": 18, "te": 1}
_CPP_DOORS = {"core": 19, "engine": 13, "graph": 7, "rerun": 5, "offload": 7, "record": 11, "replay": 3, "bind": 0}


@pytest.mark.parametrize("room", _FOLDERS)
def test_few_names_cross_the_door_of_a_room(room: str) -> None:
    outside = [path for path in _PACKAGE.rglob("*.py") if path.relative_to(_PACKAGE).parts[0] != room]
    crossing = {name for path in outside for name in _imported(path) if name.startswith(f"actckpt.{room}.")}
    print(f"{len(crossing)} names cross the door of {room}")
    assert len(crossing) <= _DOORS[room], sorted(crossing)


@pytest.mark.parametrize("room", _CPP_RANKS)
def test_few_headers_cross_the_door_of_a_room(room: str) -> None:
    outside = [path for path in _SOURCES.rglob("*.*") if path.relative_to(_SOURCES).parts[0] != room]
    crossing = {name for path in outside for name in re.findall(rf'#include "({room}/[^"]+)"', path.read_text())}
    print(f"{len(crossing)} headers cross the door of {room}")
    assert len(crossing) <= _CPP_DOORS[room], sorted(crossing)


def test_every_module_has_a_room() -> None:
    rooms = {path.relative_to(_PACKAGE).parts[0].removesuffix(".py") for path in _PACKAGE.rglob("*.py")}
    assert rooms - {"__init__"} <= set(_RANKS)


_INSIDES = re.compile(r"_recompute_buffer|_RECOMPUTE_|_fp8_workspaces|_TE_|quantization_state|fp8_meta|\bOFFLOAD_")


def test_one_file_knows_the_insides_of_transformer_engine() -> None:
    names = [str(path.relative_to(_PACKAGE)) for path in _PACKAGE.rglob("*.py") if _INSIDES.search(path.read_text())]
    assert names == ["te/internals.py"]


#: The only Python that knows `torch.cuda`: what is asked of accelerators, and TransformerEngine, which has no other.
_KNOWS_CUDA = ("_core/cuda.py", "te/")


_CUDA = re.compile(r"torch\.cuda(\.\w+)*|.*\.is_cuda")


def _names_of_cuda(source: str) -> set[str]:
    """Return what code names of `torch.cuda`, and `is_cuda`, in whatever way."""
    return {name for name in _dotted(source) if _CUDA.fullmatch(name)}


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_only_the_file_for_it_knows_cuda(path: Path) -> None:
    if not str(path.relative_to(_PACKAGE)).startswith(_KNOWS_CUDA):
        assert not _names_of_cuda(path.read_text())


#: Private parts of torch that other modules may name: what libraries use without a public name, and what a room below
#: `_core` asks for.
_NAMED_ELSEWHERE = {
    "torch._ops",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
}


def _private_parts(source: str) -> set[str]:
    """Return the private parts of torch that code names, as dotted paths."""
    return {path for path in _dotted(source) if re.fullmatch(r"torch(\.[a-z]\w*)*\._[a-zA-Z]\w*(\.\w+)*", path)}


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_only_the_package_for_it_names_a_private_part_of_torch(path: Path) -> None:
    if path.parent.name == "torch_private":
        assert not _private_parts(path.read_text()), "look it up by `lookup` or `optional`: at import nothing may raise"
        return
    # A namespace of operators may begin with an underscore, as operators may: their names are public.
    found = {part for part in _private_parts(path.read_text()) if not part.startswith("torch.ops.")}
    allowed = tuple(f"{part}." for part in _NAMED_ELSEWHERE)
    assert not {part for part in found if not f"{part}.".startswith(allowed) and part != "torch._C"}


_CONTRACT = sorted((_ROOT / "tests" / "contract").rglob("*.py"))
_OWN_PRIVATE = re.compile(r"\bactckpt(\.\w+)*\._[a-zA-Z]\w*|\bfrom actckpt(\.\w+)* import \(?\s*(\w+,\s*)*_[a-zA-Z]")


@pytest.mark.parametrize("path", _CONTRACT, ids=lambda path: path.name)
def test_contract_tests_name_no_private_part_of_actckpt(path: Path) -> None:
    found = _OWN_PRIVATE.search(path.read_text())
    assert not found, f"{path.name} names {found[0]}: use public names, or tests/internals for a tool of tests"


#: What C++ may not tell devices apart by: only CPU or not matters, and which backend a device has is Python's to say.
_KIND_OF_DEVICE = re.compile(r"is_cuda|kCUDA|DeviceType|\"cuda:")


@pytest.mark.parametrize("path", sorted(_SOURCES.rglob("*.*")), ids=lambda path: str(path.relative_to(_SOURCES)))
def test_cpp_asks_no_tensor_whether_it_is_on_cuda(path: Path) -> None:
    assert not _KIND_OF_DEVICE.search(path.read_text())


@pytest.mark.parametrize(
    ("find", "source", "found"),
    [
        (_names_of_cuda, "torch.cuda.synchronize()", ["torch.cuda", "torch.cuda.synchronize"]),
        (_names_of_cuda, "x.is_cuda and hasattr(y, 'is_cuda')", ["x.is_cuda", "y.is_cuda"]),
        (_names_of_cuda, "import torch.cuda, torch.cuda.amp as amp", ["torch.cuda", "torch.cuda.amp"]),
        (_names_of_cuda, "from torch import cuda", ["torch.cuda"]),
        (_names_of_cuda, "getattr(torch, 'cuda')", ["torch.cuda"]),
        (_names_of_cuda, "torch.backends.cuda.is_built(), torch.version.cuda, torch.Tensor.cuda, 'torch.cuda'", []),
        (_private_parts, "torch._C._nn.relu(x)", ["torch._C", "torch._C._nn", "torch._C._nn.relu"]),
        (_private_parts, "from torch._C import _nn\nimport torch._dynamo", ["torch._C._nn", "torch._dynamo"]),
        (_private_parts, "torch.Tensor.__dlpack__, torch.nn.functional.relu, x._version", []),
        (_OWN_PRIVATE.search, "from actckpt._core import devices", True),
        (_OWN_PRIVATE.search, "from actckpt import (\n    config,\n    _C,\n)", True),
        (_OWN_PRIVATE.search, 'import actckpt._bind as bind; monkeypatch.setattr("actckpt.memory._now", 1)', True),
        (_OWN_PRIVATE.search, "from actckpt import memory_labels, __all__", False),
        (_KIND_OF_DEVICE.search, "reads().is_cuda", True),
        (_KIND_OF_DEVICE.search, 'X(where, "cuda:0")', True),
    ],
)
def test_every_way_to_name_what_is_private_or_of_cuda_is_found(
    find: Callable[[str], Any], source: str, found: list[str] | bool
) -> None:
    assert (sorted(find(source)) if isinstance(found, list) else bool(find(source))) == found


_PYTHON_FILES = sorted(_PACKAGE.rglob("*.py"))
_CPP_FILES = sorted(path for path in _SOURCES.rglob("*.*") if path.suffix in (".cpp", ".h"))
_MOST_LINES_OF_FUNCTION = 40


def _long_functions(source: str) -> list[str]:
    """Return the functions that have too many lines, without decorators and docstring."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                lines -= (first.end_lineno or 0) - first.lineno + 1
            if lines > _MOST_LINES_OF_FUNCTION:
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", _PYTHON_FILES, ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_functions_are_short(path: Path) -> None:
    assert not _long_functions(path.read_text())


def test_a_function_that_is_too_long_is_found() -> None:
    body = "    x = 1\n" * (_MOST_LINES_OF_FUNCTION - 1)
    assert not _long_functions(f"def f():\n{body}")
    assert _long_functions(f"class A:\n  async def f():\n{body}    x = 1\n") == ["f"]
    doc = '    """One.\n\n    More.\n    """\n'
    assert not _long_functions(f"@cache\ndef f():\n{doc}{body}")


@pytest.mark.parametrize(("files", "top"), [(_PYTHON_FILES, _PACKAGE), (_CPP_FILES, _SOURCES)], ids=["python", "c++"])
def test_no_room_holds_more_than_a_quarter_of_its_language(files: list[Path], top: Path) -> None:
    lines: Counter[str] = Counter()
    for path in files:
        lines[path.relative_to(top).parts[0]] += len(path.read_text().splitlines())
    del lines["engine"]  # a library of its own, with rooms inside
    ((largest, num_lines),) = lines.most_common(1)
    share = num_lines / lines.total()
    assert share <= 0.25, f"{largest} holds {share:.0%} of all lines but the engine's: give each thing it does a room"


def test_import_takes_less_than_a_fifth_of_the_time_of_torch(tmp_path: Path) -> None:
    # Seconds depend on what else runs on the core; torch takes longer then, too.
    # With bytecode at hand, as an installed package has it: the first import writes it.
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    code = "import time; clock = time.process_time; start = clock(); import torch; middle = clock(); import actckpt; "
    code += "print((clock() - middle) / (middle - start))"
    shares = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environ)
        shares.append(float(done.stdout))
        if shares[-1] < 0.2:
            return
    raise AssertionError(f"four imports took {min(shares):.2f} of the time of torch's, or more")
