"""Tests run in a random order, with one torch thread, from the same seeds and settings."""

import os
import random
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import actckpt
from actckpt._cycles.meter import sweep

# Programs that tests start have one, too: they compare bits, and where several threads of a process are the first to
# call the vector functions of MKL, one of them rarely gets other numbers, that once (docs/checkpoint-limits.md).
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Tests that import the simulated device: torch has an accelerator in their process from then on.
_DEVICE_TESTS = [Path(__file__).parent / folder for folder in ("unit/sim_device", "device")]

#: Files of a few long tests, which come first, so that other processes have work meanwhile.
_LONG = ("test_benchmarks.py",)

#: Tests that `--sample` leaves cases out of: they train. Those of benchmarks, which no user runs, count as cases of one
#: test; contract/conftest.py chooses the contract tests that run on a device.
_SAMPLED = ("contract", "device", "distributed", "integrations", "te_on_cpu", *_LONG)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests run in another order, and the contract tests with the tensors of another device."""
    parser.addoption("--seed", type=int, default=None, help="of the order of files and of tests in them (random)")
    where = "where tensors of tests/contract are"
    parser.addoption("--device", choices=("cpu", "sim", "cuda"), default="cpu", help=where)
    parser.addoption("--programs", type=int, default=300, help="how many programs each test of random ones draws")
    of = "of the cases of each test that trains run every n-th, one at least, by the seed; of those on a device, see"
    parser.addoption("--sample", type=int, default=1, help=f"{of} tests/contract/conftest.py")


@pytest.hookimpl(tryfirst=True)  # other conftest.py files read the seed
def pytest_configure(config: pytest.Config) -> None:
    """Draw a seed, the same in all processes of a run; refuse a device that is not there."""
    if config.option.seed is None:
        drawn = random.SystemRandom().randrange(2**16)
        config.option.seed = getattr(config, "workerinput", {}).get("seed", drawn)
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device here")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    """Give a worker the seed of the run."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed, also where nothing fails: some failures show in another run only."""
    return f"order of tests: --seed {config.option.seed}"


@pytest.hookimpl(tryfirst=True)  # pytest then moves tests together that share a parameter of a module's fixture
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Shuffle files, and tests in them. Two tests keep their order where others are left out."""

    def place(text: str) -> float:
        return random.Random(f"{config.option.seed} {text}").random()

    items.sort(
        key=lambda item: (item.path.name not in _LONG, place(item.nodeid.partition("::")[0]), place(item.nodeid))
    )
    if config.option.sample > 1:
        names = _SAMPLED if config.option.device == "cpu" else ("device",)
        left_out = _left_out(items, [Path(__file__).parent / name for name in names], config.option.sample)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def _left_out(items: Sequence[pytest.Item], sampled: Collection[Path], every: int) -> set[str]:
    """Return the cases that a sample leaves out: of each test the first ones run, in the order of the seed."""
    cases: dict[str, list[str]] = {}
    for item in items:
        if not any(path in (item.path, *item.path.parents) for path in sampled) or item.get_closest_marker("soak"):
            continue  # a mark may leave out that one
        test = item.nodeid.partition("::" if item.path.name in _LONG else "[")[0]
        cases.setdefault(test, []).append(item.nodeid)
    return {nodeid for nodeids in cases.values() for nodeid in nodeids[-(-len(nodeids) // every) :]}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of the simulated device where it is not asked for."""
    return True if config.getoption("--device") != "sim" and collection_path in _DEVICE_TESTS else None


def _global_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


@pytest.fixture(autouse=True)
def _no_state_is_left() -> Iterator[None]:
    before = _global_state()
    yield
    sweep()  # a meter that ended inside of backward stays on the stack, and counts nothing, until a forward
    after = _global_state()
    left = {name: (value, after[name]) for name, value in before.items() if value != after[name]}
    assert not left, f"a test left state behind, which the next ones find: {left}"


@pytest.fixture(autouse=True)
def _one_thread_fixed_seeds_and_settings(_no_state_is_left: None) -> Iterator[None]:
    settings = vars(actckpt.configure())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    yield
    torch.set_num_threads(threads)
    actckpt.configure(**settings)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch.compile forget what it made before the test and in it; its own code warns while it compiles."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()
