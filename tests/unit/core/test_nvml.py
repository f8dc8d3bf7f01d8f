"""Facts about a GPU come from NVIDIA's package, here a stand-in with its calls; each fact may be missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from actckpt._core import nvml
from actckpt._core.nvml import GpuFacts


class _Library(ModuleType):
    """Knows a whole GPU (UUID GPU-1) and a part of one (MIG-2), and notes its calls, of which one may fail."""

    NVML_AFFINITY_SCOPE_NODE = 0

    class NVMLError(Exception):
        """What calls raise that are unknown, unsupported, or newer than the library."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("pynvml")
        self.fails = fails
        self.calls: list[str] = []

    def _answer(self, call: str, answer: Any = None) -> Any:
        self.calls.append(call)
        if call == self.fails:
            raise self.NVMLError(call)
        return answer

    def nvmlInit(self) -> None:  # noqa: N802 - names of the package
        self._answer("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._answer("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in ("GPU-1", "MIG-2"):
            raise self.NVMLError(uuid)
        return str(self._answer("handle", uuid))

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:  # noqa: N802
        return self._answer("memory", SimpleNamespace(total=80 << 30, free=3 << 30, used=77 << 30))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, _: str) -> Any:  # noqa: N802
        return self._answer("generation", 5)

    def nvmlDeviceGetMaxPcieLinkWidth(self, _: str) -> Any:  # noqa: N802
        return self._answer("width", 16)

    def nvmlDeviceGetMemoryAffinity(self, device: str, num_words: int, scope: int) -> Any:  # noqa: N802
        words = [0] * num_words
        words[1] = 8 if device == "GPU-1" and scope == self.NVML_AFFINITY_SCOPE_NODE else 0
        return self._answer("affinity", words)


_ALL = {"free_bytes": 3 << 30, "total_bytes": 80 << 30, "link_generation": 5, "link_width": 16, "numa_node": 67}


@pytest.mark.parametrize(
    ("uuid", "fails", "unknown"),
    [
        ("1", "", ()),
        ("GPU-1", "", ()),
        ("2", "", ("numa_node",)),
        ("1", "memory", ("free_bytes", "total_bytes")),
        ("1", "generation", ("link_generation",)),
        ("1", "width", ("link_width",)),
        ("1", "affinity", ("numa_node",)),
        ("3", "", None),
        ("1", "handle", None),
        ("1", "init", None),
    ],
)
def test_a_gpu_or_a_part_of_one_tells_what_the_library_knows_of_it(
    uuid: str, fails: str, unknown: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library(fails)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    expected = None if unknown is None else GpuFacts(**(_ALL | dict.fromkeys(unknown)))
    assert nvml.facts_of(uuid) == expected
    assert library.calls.count("init") == 1 and library.calls[0] == "init"
    assert library.calls.count("shutdown") == (fails != "init") and (fails == "init" or library.calls[-1] == "shutdown")


def test_the_package_has_the_names_that_are_asked_for() -> None:
    package = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in vars(_Library) if name.upper().startswith("NVML")]
    assert len(names) == 9 and all(hasattr(package, name) for name in names)


def test_without_the_package_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.facts_of("1") is None
