"""What is told of a GPU comes from NVIDIA's library, here one of our own with the same C calls; all of it may lack."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actckpt._core import nvml

_COMPILER = shutil.which("cc") or shutil.which("gcc")

#: A machine with a whole GPU (UUID GPU-1) and a part of one (MIG-2). FAILS names a call that returns an error; each
#: call is noted in the file LOG.
_LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
enum { NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int call(const char* name) {
  FILE* log = fopen(getenv("LOG"), "a");
  fprintf(log, "%s\n", name);
  fclose(log);
  return strcmp(getenv("FAILS"), name) == 0 ? NOT_SUPPORTED : 0;
}

int nvmlInitWithFlags(unsigned flags) { return call("init"); }
int nvmlShutdown(void) { return call("shutdown"); }

int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  int is_one = strcmp(uuid, "GPU-1") == 0, is_part = strcmp(uuid, "MIG-2") == 0;
  *device = (void*)(is_one ? 1L : 2L);
  return is_one || is_part ? call("handle") : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 80ULL << 30;
  memory->free = 3ULL << 30;
  memory->used = 77ULL << 30;
  return call("memory");
}

int nvmlDeviceGetMaxPcieLinkGeneration(void* device, unsigned* generation) {
  *generation = 5;
  return call("generation");
}

int nvmlDeviceGetMaxPcieLinkWidth(void* device, unsigned* width) {
  *width = 16;
  return call("width");
}

#ifndef IS_OLD
int nvmlDeviceGetMemoryAffinity(void* device, unsigned count, unsigned long* nodes, unsigned scope) {
  memset(nodes, 0, count * sizeof(*nodes));
  if (device == (void*)1L && scope == 0) nodes[1] = 8;
  return call("affinity");
}
#endif
"""
_ALL = {"free_bytes": 3 << 30, "total_bytes": 80 << 30, "link_generation": 5, "link_width": 16, "numa_node": 67}
_ASK = "import dataclasses, json, runpy, sys; facts = runpy.run_path(sys.argv[1])['facts_of'](sys.argv[2]); "
_ASK += "print(json.dumps(None if facts is None else dataclasses.asdict(facts)))"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders that hold the library: as it is now, an old one, and none."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if _COMPILER is None:
        pytest.skip("no C compiler")
    found = {name: tmp_path_factory.mktemp(name) for name in ("new", "old", "broken")}
    source = found["new"] / "nvml.c"
    source.write_text(_LIBRARY)
    for name, options in (("new", []), ("old", ["-DIS_OLD"])):
        target = str(found[name] / "libnvidia-ml.so.1")
        subprocess.run([_COMPILER, "-shared", "-fPIC", *options, str(source), "-o", target], check=True)
    (found["broken"] / "libnvidia-ml.so.1").write_text("no library")
    return found


def _ask(folder: Path, uuid: str, tmp_path: Path, *, fails: str = "") -> tuple[Any, list[str]]:
    """Return what a process with the library is told, and the calls that were made."""
    log = tmp_path / "calls"
    log.write_text("")
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder), "LOG": str(log), "FAILS": fails}
    command = [sys.executable, "-c", _ASK, str(nvml.__file__), uuid]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), log.read_text().split()


@pytest.mark.parametrize(
    ("library", "uuid", "fails", "unknown"),
    [
        ("new", "1", "", ()),
        ("new", "GPU-1", "", ()),
        ("new", "2", "", ("numa_node",)),
        ("old", "1", "", ("numa_node",)),
        ("new", "1", "memory", ("free_bytes", "total_bytes")),
        ("new", "1", "generation", ("link_generation",)),
        ("new", "1", "width", ("link_width",)),
        ("new", "1", "affinity", ("numa_node",)),
    ],
)
def test_a_gpu_or_a_part_of_one_tells_what_the_library_knows_of_it(
    libraries: dict[str, Path], tmp_path: Path, library: str, uuid: str, fails: str, unknown: tuple[str, ...]
) -> None:
    found, calls = _ask(libraries[library], uuid, tmp_path, fails=fails)
    assert found == _ALL | dict.fromkeys(unknown)
    assert calls[0] == "init" and calls[-1] == "shutdown" and calls.count("init") == calls.count("shutdown") == 1


@pytest.mark.parametrize(("uuid", "fails"), [("3", ""), ("1", "handle"), ("1", "init")])
def test_an_unknown_device_and_a_driver_that_does_not_start_tell_nothing(
    libraries: dict[str, Path], tmp_path: Path, uuid: str, fails: str
) -> None:
    found, calls = _ask(libraries["new"], uuid, tmp_path, fails=fails)
    assert found is None
    assert calls.count("shutdown") == (0 if fails == "init" else 1)


def test_without_the_library_nothing_is_told(libraries: dict[str, Path], tmp_path: Path) -> None:
    assert _ask(libraries["broken"], "1", tmp_path) == (None, [])


def test_without_the_package_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.facts_of("1") is None
