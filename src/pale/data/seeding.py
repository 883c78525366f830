"""Random numbers that are functions of (seed, epoch, sample) or (seed, step) only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info


def derive_seed(*key: int) -> int:
    """Return a 63-bit seed that depends on all of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the CPU generators of Python, NumPy and PyTorch by `key`, and restore their states on exit.

    In a loader worker the states are not restored: nothing else draws there, and saving them for each image takes time.
    """
    in_worker = get_worker_info() is not None
    if not in_worker:
        python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = derive_seed(*key)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        if not in_worker:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(pytorch)


def hash_bits(seeds: Tensor, places: Tensor) -> Tensor:
    """Return 64 random bits (int64) per seed and place, equal on all devices and in all batches (splitmix64)."""
    z = seeds + (places + 1) * -7046029254386353131
    z = (z ^ shift_right(z, 30)) * -4658895280553007687
    z = (z ^ shift_right(z, 27)) * -7723592293110705685
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right and fill with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
