"""Imports point one way (see docs/how-it-works.md), and importing actckpt is cheap."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

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


def _imported(path: Path, *, inside: bool = True) -> set[str]:
    """Return the names of the package that a module imports, with those that it imports inside of functions."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "actckpt"}


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
_DOORS = {
    "_blocks": 37,
    "_budget": 28,
    "_commands": 12,
    "_compile": 2,
    "_core": 88,
    "_cycles": 3,
    "_estimate": 7,
    "_offload": 17,
}
_DOORS |= {
    "_replay": 27,
    "_report_page": 10,
    "_rerun": 14,
    "_show": 5,
    "_text": 19,
    "integrations": 0,
    "planner": 18,
    "te": 1,
}
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


#: The only Python that knows `torch.cuda`: what is asked of accelerators, and TransformerEngine, which has no other.
_KNOWS_CUDA = ("_core/cuda.py", "te/")


def _names_of_cuda(source: str) -> list[int]:
    """Return the lines on which code names `torch.cuda` or `is_cuda`, in whatever way."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_named = node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node.value) == "torch")
        elif isinstance(node, ast.Import):
            is_named = any(f"{alias.name}.".startswith("torch.cuda.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}." for alias in node.names]
            is_named = any(name.startswith("torch.cuda.") for name in names)
        elif isinstance(node, ast.Call):  # getattr(torch, "cuda")
            values = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            is_named = ast.unparse(node.func) in ("getattr", "hasattr") and any(
                v in ("cuda", "is_cuda") for v in values
            )
        else:
            continue
        if is_named:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sorted(_PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_only_the_file_for_it_knows_cuda(path: Path) -> None:
    if not str(path.relative_to(_PACKAGE)).startswith(_KNOWS_CUDA):
        assert not (lines := _names_of_cuda(path.read_text())), f"{path.name} names torch.cuda on lines {lines}"


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
    paths: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            paths.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            paths |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in paths if re.fullmatch(r"torch(\.[a-z]\w*)*\._[a-zA-Z]\w*(\.\w+)*", path)}


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
    ("find", "source", "count"),
    [
        (_names_of_cuda, "torch.cuda.synchronize()", 1),
        (_names_of_cuda, "x.is_cuda and y.is_cuda", 2),
        (_names_of_cuda, "import torch.cuda", 1),
        (_names_of_cuda, "import torch.cuda.amp as amp", 1),
        (_names_of_cuda, "from torch import cuda", 1),
        (_names_of_cuda, "from torch.cuda import synchronize", 1),
        (_names_of_cuda, "getattr(torch, 'cuda'), hasattr(x, 'is_cuda')", 2),
        (_names_of_cuda, "torch.backends.cuda.is_built(), torch.version.cuda, torch.Tensor.cuda, 'torch.cuda'", 0),
        (_names_of_cuda, "import torch.backends.cuda, torch.cudart", 0),
        (_private_parts, "torch._C._set_grad_enabled(True)", 2),
        (_private_parts, "from torch._C import _nn", 1),
        (_private_parts, "import torch._dynamo", 1),
        (_private_parts, "from torch.utils._device import x", 1),
        (_private_parts, "torch.Tensor.__dlpack__, torch.nn.functional.relu, x._version", 0),
        (_OWN_PRIVATE.findall, "from actckpt._core import devices", 1),
        (_OWN_PRIVATE.findall, "from actckpt import _C, config", 1),
        (_OWN_PRIVATE.findall, "from actckpt import (\n    config,\n    _C,\n)", 1),
        (_OWN_PRIVATE.findall, "import actckpt._bind as bind", 1),
        (_OWN_PRIVATE.findall, "actckpt._C.numerics()", 1),
        (_OWN_PRIVATE.findall, 'monkeypatch.setattr("actckpt.memory._now", 1)', 1),
        (_OWN_PRIVATE.findall, "from actckpt import memory_labels\nfrom actckpt.errors import OffloadError", 0),
        (_OWN_PRIVATE.findall, "actckpt.__all__", 0),
        (_KIND_OF_DEVICE.findall, "reads().is_cuda, tensor.is_cuda()", 2),
        (_KIND_OF_DEVICE.findall, 'c10::kCUDA, DeviceType::CUDA, X(where, "cuda:0")', 3),
    ],
)
def test_every_way_to_name_what_is_private_or_of_cuda_is_found(
    find: Callable[[str], Collection[object]], source: str, count: int
) -> None:
    assert len(find(source)) == count


_PYTHON_FILES = sorted(_PACKAGE.rglob("*.py"))
_CPP_FILES = sorted(path for path in _SOURCES.rglob("*.*") if path.suffix in (".cpp", ".h"))
_MOST_LINES_OF_FUNCTION = 40


def _num_lines(text: str) -> int:
    return len(text.splitlines())


def _lines_by_room(files: list[Path], top: Path) -> dict[str, int]:
    """Return the lines of each folder, with those inside of it; what is in none is a room of its own."""
    found: dict[str, int] = {}
    for path in files:
        room = path.relative_to(top).parts[0]
        found[room] = found.get(room, 0) + _num_lines(path.read_text())
    return found


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
    rooms = _lines_by_room(files, top)
    rooms.pop("engine", None)  # a library of its own, with rooms inside
    largest = max(rooms, key=lambda room: rooms[room])
    share = rooms[largest] / sum(rooms.values())
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
