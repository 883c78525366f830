from collections import Counter

import numpy as np
import pytest

from pale.data.stream import Part, Stream, StreamSampler, shard_positions


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


def test_every_epoch_takes_the_quota_of_each_part():
    parts = (Part(10, 25), Part(40, 8), Part(3, 3))
    stream = Stream(36, 12, epochs=40, seed=5, parts=parts)
    seen: Counter = Counter()
    for epoch in range(40):
        index = stream.order(epoch)[:, 1]
        assert [
            int(((index >= a) & (index < b)).sum()) for a, b in ((0, 10), (10, 50), (50, 53))
        ] == [
            25,
            8,
            3,
        ]
        seen.update(index.tolist())
    # Within a part all samples are drawn equally often: 25 * 40 / 10, 8 * 40 / 40, 3 * 40 / 3.
    assert {seen[i] for i in range(10)} == {100}
    assert {seen[i] for i in range(10, 50)} == {8}
    assert {seen[i] for i in range(50, 53)} == {40}


def test_no_key_of_a_mixture_occurs_twice_and_ranks_share_the_batches():
    stream = Stream(36, 12, epochs=5, seed=5, parts=(Part(10, 25), Part(40, 11)))
    alone = list(StreamSampler(stream))
    every = [key for keys in alone for key in keys]
    assert len(set(every)) == len(every) == 180
    both = [
        [key for rank in range(2) for key in next(iter(StreamSampler(stream, step, rank, 2)))]
        for step in range(15)
    ]
    assert [sorted(keys) for keys in both] == [sorted(keys) for keys in alone]
    # Any step can be the first.
    again = Stream(36, 12, epochs=5, seed=5, parts=stream.parts)
    assert next(iter(StreamSampler(again, 11))) == alone[11]


def test_a_sampler_stops_where_a_phase_ends():
    sampler = StreamSampler(Stream(20, 4, epochs=2, seed=0), 3)
    sampler.stop = 5
    assert len(sampler) == len(list(sampler)) == 2
