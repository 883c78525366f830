"""The order of the samples: one stream from the first step to the last, cut into global batches.

Every epoch is a permutation drawn from (seed, epoch), the epochs follow each other without a gap, and
step s takes positions s B to (s + 1) B of that stream. So each sample comes exactly once an epoch
whatever B is, the state of the order is the step number alone, and neither the number of processes nor
that of workers nor gradient accumulation changes what a step sees. The last batch is filled up from one
more epoch. With groups, every epoch is ordered such that a step's samples are of one group, but for one
or two steps an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

Key = tuple[int, int]  # epoch and sample


def shard_positions(batch: int, shard: int, shards: int) -> NDArray[np.int64]:
    """Positions in the global batch that one shard holds.

    Mixup pairs position p with batch - 1 - p. A shard takes a piece of the front half and its mirror
    image, in order, so that pairs stay together and flipping the shard gives each sample its partner.
    A shard of odd size is a plain slice and cannot be mixed.
    """
    each, rest = divmod(batch, shards)
    if rest or not each:
        raise ValueError(
            f"a batch of {batch} cannot be cut into {shards} equal parts (processes x accumulate); "
            f"choose a batch that is a multiple of {shards}"
        )
    if each % 2:
        return np.arange(shard * each, (shard + 1) * each)
    front = np.arange(shard * each // 2, (shard + 1) * each // 2)
    return np.concatenate([front, batch - 1 - front[::-1]])


def grouped(
    order: NDArray[np.int64],
    groups: NDArray[np.int64],
    batch: int,
    start: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """The same samples, with whole batches of one group in random order.

    The largest group fills the pieces of batches at both ends, which other epochs complete. What the other
    groups leave over shares its batches with it.

    Args:
        order: a permutation of the samples.
        groups: of each sample.
        batch: the global batch.
        start: position of the first whole batch.
        rng: for the order of the batches.
    """
    found, counts = np.unique(groups, return_counts=True)
    found = found[np.argsort(-counts, kind="stable")]
    members = [order[groups[order] == group] for group in found]
    start = min(start, len(order))
    end = (len(order) - start) % batch
    largest = members[0]
    if len(largest) < start + end:  # too few for both ends: hardly a set to be grouped
        return order
    first, last = largest[:start], largest[start : start + end]
    rest = [m[len(m) % batch :] for m in members[1:]]
    over = [m[: len(m) % batch] for m in members[1:]]
    mixed = np.concatenate([*over, largest[start + end :]])
    whole = np.concatenate([mixed, *rest]).reshape(-1, batch)
    return np.concatenate([first, whole[rng.permutation(len(whole))].ravel(), last])


@dataclass(frozen=True)
class Stream:
    """Which sample stands where."""

    samples: int
    batch: int
    epochs: int
    seed: int
    exactly: int | None = None  # steps, whatever `epochs` says
    groups: NDArray[np.int64] | None = None  # of each sample; a step sees one of them where it can

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return self.exactly or -(-self.samples * self.epochs // self.batch)

    def epoch(self, step: int) -> int:
        """The epoch in which a step begins, from 0."""
        return step * self.batch // self.samples

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is complete after `step` steps and was not before the last of them."""
        return step == self.steps or self.epoch(step) > self.epoch(step - 1)

    @cached_property
    def _orders(self) -> dict[int, NDArray[np.int64]]:
        return {}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of an epoch; the last two asked for are kept."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            rng = np.random.default_rng((self.seed, epoch))
            order = rng.permutation(self.samples)
            if self.groups is not None:
                start = (
                    -epoch * self.samples % self.batch
                )  # where the epoch's first whole batch begins
                order = grouped(order, self.groups, self.batch, start, rng)
            self._orders[epoch] = order
        return self._orders[epoch]

    def keys(self, step: int, positions: NDArray[np.int64]) -> list[Key]:
        """What stands at `positions` of the global batch of a step."""
        epochs, offsets = np.divmod(step * self.batch + positions, self.samples)
        return [
            (int(epoch), int(self.order(int(epoch))[offset]))
            for epoch, offset in zip(epochs, offsets, strict=True)
        ]


class StreamSampler(Sampler[list[Key]]):
    """The batches of one process, from a step on: `accumulate` of them a step."""

    def __init__(
        self,
        stream: Stream,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.stream, self.start = stream, start
        shards = world * accumulate
        self.positions = [
            shard_positions(stream.batch, rank * accumulate + i, shards) for i in range(accumulate)
        ]

    def __len__(self) -> int:
        return (self.stream.steps - self.start) * len(self.positions)

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stream.steps):
            for positions in self.positions:
                yield self.stream.keys(step, positions)
