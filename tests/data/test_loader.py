"""Workers of a loader: how many, how long they stay, and that they never keep a program from ending."""

import pickle
import subprocess
import sys

import pytest
import torch
from torch.utils.data import Dataset

from pale.data.loader import MAX_PIPE_BYTES, PipeBatch, iterate_batches, make_loader, usable_cores
from pale.train.distributed import World
from pale.train.evaluate import Evaluation, ShareSampler

LEFT_OPEN = """
import atexit
import torch
from pale.data.loader import iterate_batches, make_loader
from pale.data.stream import Stream, StreamSampler

class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, key):
        return key[1]

def start(persistent):
    sampler = StreamSampler(Stream(64, 2, 9, 0))
    return iterate_batches(make_loader(Numbers(), sampler, list, 1, False, persistent))

begin = torch.utils.data.DataLoader.__iter__

def pinned(loader):  # at its end PyTorch 2.11 waits for workers so, where memory is pinned
    iterator = begin(loader)
    for worker in iterator._workers:
        atexit.register(worker.join, 100)
    return iterator

torch.utils.data.DataLoader.__iter__ = pinned
iterators = start(True), start(False)
print([len(next(iterator)) for iterator in iterators])
raise SystemError("something unforeseen")
"""


class Workers(Dataset):
    """Which process reads each sample."""

    def __len__(self):
        return 6

    def __getitem__(self, key):
        return torch.utils.data.get_worker_info().seed - torch.utils.data.get_worker_info().id


@pytest.mark.slow
def test_a_program_that_fails_with_workers_at_work_still_ends():
    # They leave SIGTERM to the main process, and it is by SIGTERM that Python ends them.
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "[2, 2]\n"
    assert done.stderr.strip().endswith("SystemError: something unforeseen")


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "for_one_pass"])
def test_workers_stay_from_pass_to_pass_where_asked(persistent):
    share = ShareSampler(6, 3, World(torch.device("cpu")))
    loader = make_loader(Workers(), share, list, 1, False, persistent)
    passes = [[seed for batch in iterate_batches(loader) for seed in batch] for _ in range(2)]
    assert [len(set(seeds)) for seeds in passes] == [1, 1]
    assert (passes[0] == passes[1]) == persistent


class Denied(Workers):
    def __getitem__(self, key):
        raise PermissionError(13, "Permission denied", "a.npy")


def test_a_file_that_the_system_refuses_is_told_in_one_line():
    share = ShareSampler(6, 3, World(torch.device("cpu")))
    with pytest.raises(ValueError, match=r"^\[Errno 13\] Permission denied: 'a.npy'$"):
        next(iterate_batches(make_loader(Denied(), share, list, 0, False)))


def test_no_more_workers_than_batches_or_cores():
    share = ShareSampler(6, 3, World(torch.device("cpu")))
    assert make_loader(Workers(), share, list, 64, False).num_workers == min(2, usable_cores())
    assert make_loader(Workers(), share, list, 0, False, persistent=True).num_workers == 0


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 9, 17])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_even_shares_are_as_many_batches_and_each_sample_counts_once(samples, processes):
    shares = [
        ShareSampler(samples, 2, World(torch.device("cpu"), rank, processes), even=True)
        for rank in range(processes)
    ]
    passes = [list(share) for share in shares]
    assert len({len(p) for p in passes}) == 1
    assert [len(p) for p in passes] == [len(share) for share in shares]
    counted = [
        key
        for share, taken in zip(shares, passes, strict=True)
        for batch in taken[: share.own]
        for key in batch
    ]
    assert sorted(counted) == [(0, index) for index in range(samples)]


def test_evaluation_gives_the_same_again_with_the_same_workers():
    from pale.recipes import get

    recipe = get("quickstart").override({"data.val_samples": 10, "data.workers": 2})
    model = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 8)
    )
    evaluation = Evaluation(recipe.task(), World(torch.device("cpu")), 4, recipe.workers)
    first, second = (evaluation.run(model, None)[0] for _ in range(2))
    assert first == second
    assert first["images"] == 10


def test_small_tensors_of_a_batch_pass_the_pipe_by_value_and_unchanged():
    channels_last = torch.arange(24.0).reshape(1, 2, 3, 4).permute(0, 3, 1, 2)
    batch = {
        "labels": torch.tensor([3, 1]),
        "images": channels_last,
        "large": torch.zeros(MAX_PIPE_BYTES, dtype=torch.int16),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "names": ["a", "b"],
    }
    function, (rest, arrays, names) = PipeBatch(batch).__reduce__()
    assert list(arrays) == ["labels"]
    sent = function(rest, pickle.loads(pickle.dumps(arrays)), names)
    assert list(sent) == list(batch)
    assert sent["labels"].dtype == torch.int64
    assert torch.equal(sent["labels"], batch["labels"])
    assert all(sent[name] is batch[name] for name in batch if name != "labels")
