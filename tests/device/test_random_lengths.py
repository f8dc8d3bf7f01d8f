"""Sequences of random lengths on a device that is too small for plain training of long ones."""

from __future__ import annotations

import random

import pytest
import torch
from demo_training import Training
from oracle import assert_equal
from sim import device
from torch import Tensor

import actckpt

#: Bytes of the device. Plainly the longest sequences need 25 MiB; with everything recomputed 6.7 MiB.
_CAPACITY = 12 << 20
_LENGTHS = range(16, 129)
#: Most new lengths are among the first ones.
_NUM_STEPS = 60


def _gradients(training: Training, length: int) -> list[Tensor]:
    everything = training.tokens
    training.tokens = everything[:, :length]
    try:
        return training.gradients()
    finally:
        training.tokens = everything


def test_no_allocation_fails_whatever_the_lengths() -> None:
    lengths = random.Random(0).choices(_LENGTHS, k=_NUM_STEPS)
    plain = Training()
    expected = {length: _gradients(plain, length) for length in lengths[::10]}
    del plain
    torch.accelerator.empty_cache()
    with device.capacity(0, _CAPACITY):
        with pytest.raises(torch.OutOfMemoryError):
            Training().gradients()
        training = Training()
        actckpt.apply(training.model, budget="auto")
        for number, length in enumerate(lengths):
            gradients = _gradients(training, length)
            if number % 10 == 0:
                assert_equal(gradients, expected[length])
