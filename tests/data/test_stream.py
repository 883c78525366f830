from collections import Counter

import numpy as np
import pytest

from pale.data.stream import Stream, StreamSampler, shard_positions


@pytest.mark.parametrize(
    ("samples", "batch"), [(12, 4), (13, 4), (3, 8), (101, 16)], ids=lambda n: str(n)
)
def test_every_sample_comes_once_an_epoch_whatever_the_batch(samples, batch):
    stream = Stream(samples, batch, epochs=3, seed=5)
    keys = [key for keys in StreamSampler(stream) for key in keys]
    seen = Counter(keys)
    assert max(seen.values()) == 1
    for epoch in range(3):
        assert sum(key[0] == epoch for key in seen) == samples
    # The last batch is filled up from the next epoch.
    assert len(keys) == stream.steps * batch
    assert len(keys) - 3 * samples < batch


def test_epochs_and_seeds_differ_in_order():
    orders = [tuple(Stream(50, 10, 2, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


@pytest.mark.parametrize(
    ("world", "accumulate"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], ids=lambda n: str(n)
)
def test_processes_and_accumulation_share_out_the_same_global_batches(world, accumulate):
    stream = Stream(37, 8, epochs=2, seed=3)
    expected = [sorted(keys) for keys in StreamSampler(stream)]
    shares = [list(StreamSampler(stream, 0, rank, world, accumulate)) for rank in range(world)]
    for step, whole in enumerate(expected):
        together = [
            key
            for share in shares
            for keys in share[step * accumulate : (step + 1) * accumulate]
            for key in keys
        ]
        assert sorted(together) == whole


def test_going_on_in_the_middle_of_an_epoch_gives_the_rest():
    stream = Stream(37, 8, epochs=3, seed=3)
    whole = list(StreamSampler(stream, accumulate=2))
    for start in range(stream.steps):
        assert list(StreamSampler(stream, start, accumulate=2)) == whole[2 * start :]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_flipping_a_shard_gives_the_partner_in_the_whole_batch(shards):
    batch = 16
    for shard in range(shards):
        positions = shard_positions(batch, shard, shards)
        assert np.array_equal(positions[::-1], batch - 1 - positions)


def test_odd_shards_are_slices_and_uneven_ones_are_refused():
    assert shard_positions(9, 1, 3).tolist() == [3, 4, 5]
    with pytest.raises(ValueError, match="batch of 10 cannot be cut into 4 equal parts"):
        shard_positions(10, 0, 4)


def test_ends_of_epochs_are_found_once_each():
    for samples, batch in ((12, 4), (13, 4), (101, 16)):
        stream = Stream(samples, batch, epochs=3, seed=0)
        ends = [step for step in range(1, stream.steps + 1) if stream.ends_epoch(step)]
        assert len(ends) == 3
        assert ends[-1] == stream.steps
