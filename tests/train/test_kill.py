"""A run that was killed and resumed is bit-equal to one that was not.

KILLS (default 4) is the number of kills per task and number of processes; `benchmarks/kills.py` makes 100 and writes a
table.
"""

import os
import time

import pytest

from .kills import kill

# One save makes six calls: three files, the manifest, the folder, the parent. Calls 1 and 2 write the recipe. So
# these are: the first file of the first save, just before it gets its name, just after, the middle of the second.
FSYNCS = [3, 7, 8, 11]
KILLS = int(os.environ.get("KILLS", "4"))


def assert_bit_equal(compared: list[dict]) -> None:
    for entry in compared:
        assert entry["tensors"] > 50
        assert entry["differ"] == [], entry


@pytest.mark.slow
def test_a_run_killed_while_writing_a_checkpoint_resumes_bit_equal(tmp_path):
    kills, compared = kill(tmp_path, "classification", "--fsync", *FSYNCS)
    assert all(kill["died"] for kill in kills)
    assert any(kill["writing"] for kill in kills)
    assert {kill["checkpoints"] for kill in kills} >= {0, 1}
    assert len(compared) == len(FSYNCS)
    assert_bit_equal(compared)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("task", ["classification", "segmentation", "detection"])
def test_a_run_killed_at_random_times_resumes_bit_equal(tmp_path, task, processes):
    seed = int(time.time())
    options = ("--seed", seed, "--kills", KILLS, "--processes", processes)
    kills, compared = kill(tmp_path, task, *options)
    hits = sum(kill["died"] for kill in kills)
    assert hits == KILLS, f"seed {seed}: {hits} of {KILLS} kills hit a run"
    assert sum(entry["kills"] for entry in compared) == hits
    assert_bit_equal(compared)
