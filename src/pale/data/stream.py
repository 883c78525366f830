"""Order of the samples: one stream over all epochs, cut into global batches.

Every epoch is a permutation drawn from (seed, epoch), the epochs follow each other without a gap, and
step s takes positions s B to (s + 1) B of that stream, where B is the global batch size. Each sample
therefore occurs exactly once per epoch for any B, the step number is the whole state of the order, and
the samples of a step do not depend on the number of processes, of workers or of accumulated batches.
The last batch is filled up from one more epoch. With groups, every epoch is ordered such that all
samples of a step are of one group, except in one or two steps per epoch.

With parts (the sources of a mixture), an epoch takes a fixed number of samples from each part. Each part has its own
stream, a sequence of permutations drawn from (seed, part, pass), so its samples are drawn equally often. The epoch is
the union of all parts in an order drawn from (seed, epoch). The first number of a key is then the pass: it is unique
for each occurrence of a sample, also if an epoch takes a sample several times.
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
    """Return the positions of one shard in the global batch.

    Mixup pairs position p with batch - 1 - p. A shard holds a slice of the front half and its mirror
    image, in order, so that both samples of a pair are in one shard, and flipping the shard gives each
    sample its partner. A shard of odd size is a plain slice and cannot be mixed.
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


def group_batches(
    order: NDArray[np.int64],
    groups: NDArray[np.int64],
    batch: int,
    start: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Reorder the samples of an epoch such that whole batches are of one group, in random order.

    The partial batches at both ends, which other epochs complete, are filled from the largest group. So are the
    batches with the remainders of the other groups.

    Args:
        order: a permutation of the samples.
        groups: group of each sample.
        batch: global batch size.
        start: position of the first whole batch.
        rng: draws the order of the batches.
    """
    found, counts = np.unique(groups, return_counts=True)
    found = found[np.argsort(-counts, kind="stable")]
    members = [order[groups[order] == group] for group in found]
    start = min(start, len(order))
    end = (len(order) - start) % batch
    largest = members[0]
    if len(largest) < start + end:  # too few samples for grouping
        return order
    first, last = largest[:start], largest[start : start + end]
    rest = [m[len(m) % batch :] for m in members[1:]]
    remainders = [m[: len(m) % batch] for m in members[1:]]
    mixed = np.concatenate([*remainders, largest[start + end :]])
    whole = np.concatenate([mixed, *rest]).reshape(-1, batch)
    return np.concatenate([first, whole[rng.permutation(len(whole))].ravel(), last])


@dataclass(frozen=True)
class Part:
    """Consecutive samples of which an epoch takes a fixed number.

    Attributes:
        samples: number of samples.
        quota: number of samples that an epoch takes.
    """

    samples: int
    quota: int


@dataclass(frozen=True)
class Stream:
    """Order of the samples over all epochs (see the module).

    Attributes:
        samples: number of samples per epoch.
        batch: global batch size.
        epochs: number of epochs.
        seed: seed of the permutations.
        fixed_steps: number of steps, instead of `epochs`.
        groups: group of each sample; a step has samples of one group where possible.
        parts: parts of the samples; `samples` is then the sum of their quotas, and there are no groups.
    """

    samples: int
    batch: int
    epochs: int
    seed: int
    fixed_steps: int | None = None
    groups: NDArray[np.int64] | None = None
    parts: tuple[Part, ...] = ()

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return self.fixed_steps or -(-self.samples * self.epochs // self.batch)

    def epoch(self, step: int) -> int:
        """Return the epoch in which a step starts, counted from 0."""
        return step * self.batch // self.samples

    def ends_epoch(self, step: int) -> bool:
        """Return whether the last of `step` steps completes an epoch."""
        return step == self.steps or self.epoch(step) > self.epoch(step - 1)

    @cached_property
    def _orders(self) -> dict[int, NDArray[np.int64]]:
        return {}

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in order; the last two epochs are cached.

        Without parts they are indices (samples,), with parts keys (samples, 2).
        """
        if epoch not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            rng = np.random.default_rng((self.seed, epoch))
            order = rng.permutation(self.samples)
            if self.parts:
                order = self._part_keys(epoch)[order]
            elif self.groups is not None:
                # Position of the first whole batch of this epoch.
                start = -epoch * self.samples % self.batch
                order = group_batches(order, self.groups, self.batch, start, rng)
            self._orders[epoch] = order
        return self._orders[epoch]

    def keys(self, step: int, positions: NDArray[np.int64]) -> list[Key]:
        """Return the keys at `positions` of the global batch of a step."""
        epochs, offsets = np.divmod(step * self.batch + positions, self.samples)
        if self.parts:
            rows = np.empty((len(positions), 2), np.int64)
            for epoch in np.unique(epochs):
                rows[epochs == epoch] = self.order(int(epoch))[offsets[epochs == epoch]]
            return [(turn, index) for turn, index in rows.tolist()]
        return [
            (int(epoch), int(self.order(int(epoch))[offset]))
            for epoch, offset in zip(epochs, offsets, strict=True)
        ]

    def _part_keys(self, epoch: int) -> NDArray[np.int64]:
        """Return the keys of an epoch by part: pass and index, (samples, 2)."""
        keys, first = [], 0
        for number, part in enumerate(self.parts):
            at = np.arange(epoch * part.quota, (epoch + 1) * part.quota)
            passes, places = np.divmod(at, part.samples)
            index = np.empty(part.quota, np.int64)
            for turn in np.unique(passes):
                rng = np.random.default_rng((self.seed, number, int(turn), len(self.parts)))
                chosen = passes == turn
                index[chosen] = rng.permutation(part.samples)[places[chosen]]
            keys.append(np.stack([passes, first + index], 1))
            first += part.samples
        return np.concatenate(keys)


class StreamSampler(Sampler[list[Key]]):
    """Yield the batches of one process, `accumulate` per step, from step `start` to `stop` or the end."""

    def __init__(
        self,
        stream: Stream,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        accumulate: int = 1,
    ) -> None:
        self.stream, self.start, self.stop = stream, start, stream.steps
        shards = world * accumulate
        self.positions = [
            shard_positions(stream.batch, rank * accumulate + i, shards) for i in range(accumulate)
        ]

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.positions)

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stop):
            for positions in self.positions:
                yield self.stream.keys(step, positions)
