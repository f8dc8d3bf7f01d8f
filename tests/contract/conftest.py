"""The counter of the oracle counts in forward and in backward, and changes nothing. Fixtures of several modules."""

import gc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import on_cuda
import pytest
import random_programs
import torch
from device_exemptions import is_expected, why_exempt
from internals.settings import settings_as_before
from internals.stores import offload_from, own_stores, store_of_kind
from on_device import tensors_on
from oracle import CountOperators

import actckpt

__all__ = ["settings_as_before"]


def pytest_configure(config: pytest.Config) -> None:
    """Tell the tests of random programs how many to draw, from which seed, before they are imported."""
    random_programs.num_programs = config.getoption("--programs")
    random_programs.seed_of_run = config.option.seed


#: Run whole in each sample: what they look at is another thing on a device, in each of their tests.
_ALWAYS = ("test_random_state.py",)


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test belongs to the sample of the command line and the seed; random programs do to all of them only."""
    sample = config.getoption("--sample")
    if sample > 1 and item.path.stem.endswith("_property"):
        return False
    always = item.path.parent.name == "offload" or item.path.name in _ALWAYS
    always = always or "test_the_smallest_budget_of_activations_is_met[loss " in item.name
    if sample > 1 and item.path.name == "test_budget_matrix.py":  # many, of few seconds each
        sample *= 2
    return always or zlib.crc32(f"{config.option.seed} {item.nodeid}".encode()) % sample == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what does not run on the device that is asked for."""
    device = items[0].config.getoption("--device") if items else "cpu"
    if device != "cpu":
        here = Path(__file__).parent
        items[:] = [item for item in items if here not in item.path.parents or _is_wanted(item, item.config)]
        for item in items:
            for warning in on_cuda.EXPECTED_WARNINGS if device == "cuda" else ():
                item.add_marker(pytest.mark.filterwarnings(warning))
            reason = why_exempt(item, device)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on the device of the command line, which must have no fault to tell of."""
    name: str = request.config.getoption("--device")
    if gc.get_freeze_count() == 0:  # torch and all tests, which each collection of a test would look through
        gc.collect()
        gc.freeze()
    if name == "cpu":
        yield name
        return
    with (_on_gpu if name == "cuda" else _on_simulated)(request.node), tensors_on(name):
        yield name
        gc.collect()


@contextmanager
def _on_gpu(item: pytest.Item) -> Iterator[None]:
    torch.cuda.manual_seed_all(0)
    torch.cuda.reset_peak_memory_stats()
    with own_stores(), on_cuda.deterministic():
        yield


@contextmanager
def _on_simulated(item: pytest.Item) -> Iterator[None]:
    from sim.device import accelerator, checked, settle, take_faults

    with accelerator.offloading(), checked():
        torch.accelerator.reset_peak_memory_stats()  # what a first step finds out must not depend on earlier tests
        yield
        settle()
        faults = [fault for fault in take_faults() if not is_expected(item, fault)]
        assert not faults, "\n".join(faults)


@pytest.fixture(autouse=True)
def _counters_only_observe() -> None:
    actckpt.configure(observers=[CountOperators])  # until the fixture of all tests puts it back, as in `no_audit`


@pytest.fixture
def no_audit() -> None:
    """Let nothing that is wrong be put right by an audit, and no checksums count as operators or bytes."""
    actckpt.configure(audit="off")  # until the fixture of all tests puts it back


@pytest.fixture
def small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of 4 KiB be offloaded, too."""
    offload_from(monkeypatch, 4 << 10)


@pytest.fixture
def small_tensors_on_disk(tmp_path: Path, small_tensors: None) -> None:
    """Let them be offloaded to a folder of the test."""
    actckpt.configure(spill_dir=tmp_path)


@pytest.fixture
def store_in_memory() -> Iterator[None]:
    """Let what is offloaded stay in memory."""
    with store_of_kind("memory"):
        yield
