"""Every test runs with one torch thread and from the same seeds."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seeds() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    yield
    torch.set_num_threads(threads)
