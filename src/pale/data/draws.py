"""Random numbers that depend on what they are for, (seed, epoch, sample) or (seed, step), and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info


def number(*key: int) -> int:
    """A 63-bit number that depends on all of `key`, for generators that take a seed."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Inside, the CPU generators of Python, NumPy and PyTorch are seeded by `key`; after, they are as before.

    But not in a worker of a loader, where nothing else draws and an image's worth of saving counts.
    """
    alone = get_worker_info() is not None
    if not alone:
        python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = number(*key)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        if not alone:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(pytorch)


def hashed(seeds: Tensor, places: Tensor) -> Tensor:
    """64 random bits for every place of every seed, int64, the same on every device and in every batch (splitmix64)."""
    z = seeds + (places + 1) * -7046029254386353131
    z = (z ^ shifted(z, 30)) * -4658895280553007687
    z = (z ^ shifted(z, 27)) * -7723592293110705685
    return z ^ shifted(z, 31)


def shifted(z: Tensor, bits: int) -> Tensor:
    """To the right, with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
