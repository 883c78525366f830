"""Random numbers that depend on what they are for, (seed, epoch, sample) or (seed, step), and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def number(*key: int) -> int:
    """A 63-bit number that depends on all of `key`, for generators that take a seed."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Inside, the CPU generators of Python, NumPy and PyTorch are seeded by `key`; after, they are as before."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = number(*key)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
