"""Extensions for tests only: compiled when a test first imports them, kept in `build/sim` until a source changes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Unit:
    """Sources that are compiled as one file, and the compiler's options."""

    sources: Sequence[Path]
    options: Sequence[str]


def _run(command: list[str], text: str = "") -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except OSError as error:
        raise ImportError(
            f"the tests need a C++ compiler, and '{command[0]}' is not found: apt install g++ | "
            "dnf install gcc-c++ | conda install -c conda-forge gxx, or name another in CXX"
        ) from error
    if done.returncode != 0:
        raise ImportError(f"this does not compile: {shlex.join(command)}\n{done.stderr}")


def _compile(units: Sequence[Unit], libraries: Sequence[str], target: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    print(f"tests/sim: compiling {target.name}, about half a minute", file=sys.__stderr__, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # renamed at the end: others may be at it too
        objects = [str(Path(folder) / f"{number}.o") for number in range(len(units))]
        options = [*compiler, "-fPIC", "-fvisibility=hidden", "-pthread"]

        def run(unit: Unit, made: str) -> None:
            text = "".join(f'#include "{source}"\n' for source in unit.sources)
            _run([*options, *unit.options, "-c", "-x", "c++", "-", "-o", made], text)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, units, objects))
        library = Path(folder) / target.name
        _run([*options, "-shared", *objects, "-o", str(library), *libraries])
        library.replace(target)


def compiled(
    name: str, units: Sequence[Unit], libraries: Sequence[str], depends: Sequence[Path], *versions: str
) -> Path:
    """Return the extension `name`, compiled from `units` unless one of the same files and versions is there."""
    content = b"".join(str(path.relative_to(ROOT)).encode() + path.read_bytes() for path in sorted(depends))
    digest = hashlib.sha256(content + "".join((sys.version, *versions)).encode()).hexdigest()[:16]
    target = ROOT / "build" / "sim" / digest / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(units, libraries, target)
    return target


def loaded(name: str, path: Path) -> Any:
    """Import the extension `name` from `path`."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_of(*folders: Path) -> list[Path]:
    """Return the C++ files below `folders`."""
    return sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))


def sources_of(*folders: Path) -> list[Path]:
    """Return those of them that are compiled."""
    return [path for path in files_of(*folders) if path.suffix == ".cpp"]
