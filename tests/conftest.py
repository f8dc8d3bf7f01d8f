"""Every test runs with one torch thread, from the same seeds, and with the audits of the default."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

import actckpt


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the contract tests run with the tensors of another device."""
    parser.addoption("--device", choices=("cpu", "sim"), default="cpu", help="where tensors of tests/contract are")
    parser.addoption(
        "--sample", type=int, default=1, help="of tests/contract run offloading, random state, and every n-th"
    )
    parser.addoption("--part", default="0/1", help="1/3: the second of three parts of tests/contract")


@pytest.fixture(autouse=True)
def _one_thread_fixed_seeds_and_audits() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    yield
    torch.set_num_threads(threads)
    actckpt.configure(audit="first")
