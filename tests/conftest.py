"""Every test runs with one torch thread, from the same seeds, and with the audits of the default."""

import random
from collections.abc import Iterator

import numpy
import pytest
import torch

import actckpt


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
