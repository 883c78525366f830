"""`deterministic: true` makes two runs bit-equal, also on a GPU, and restores all flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.recipes import classification_recipe

from pale.recipes import get
from pale.train import determinism
from pale.train.determinism import WORKSPACE, deterministic
from pale.train.distributed import World
from pale.train.loop import Trainer, build_trainer, train

from .test_loop import assert_same, weights

CPU = torch.device("cpu")


def repeat(folder: Path, device: str, *settings: str) -> dict[str, dict]:
    environment = {k: v for k, v in os.environ.items() if k != WORKSPACE}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("repeat.py"), folder, device, *settings],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["task"]: entry for entry in entries}


def flags() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def note_and_fail(inside: list[tuple[bool, ...]]) -> None:
    with deterministic(True, CPU):
        inside.append(flags())
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["auto", "false"], ids=["graphs", "eager"])
def test_two_runs_on_a_gpu_are_bit_equal_in_all_tasks(tmp_path, graph):
    found = repeat(tmp_path, "cuda", "deterministic=true", f"cuda_graph={graph}")
    assert len(found) == 3
    for task, entry in found.items():
        assert entry["compared"] > 100
        assert entry["differ"] == 0, (task, entry)


@pytest.mark.slow
def test_two_runs_on_a_cpu_are_bit_equal_in_all_tasks(tmp_path):
    found = repeat(tmp_path, "cpu", "deterministic=true")
    assert len(found) == 3
    for task, entry in found.items():
        assert entry["compared"] > 100
        assert entry["differ"] == 0, (task, entry)


def test_on_a_cpu_the_setting_changes_no_number_of_a_classifier(tmp_path):
    train(classification_recipe(epochs=1), tmp_path / "a", World(CPU), quiet=True)
    train(
        classification_recipe(epochs=1, deterministic=True), tmp_path / "b", World(CPU), quiet=True
    )
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.parametrize("before", [(False, False), (True, True)], ids=str)
def test_the_flags_are_set_inside_and_restored(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        outside = flags()
        inside: list[tuple[bool, ...]] = []
        with pytest.raises(ZeroDivisionError):
            note_and_fail(inside)
        assert inside == [(True, False, True, False, False)]
        assert flags() == outside
        with deterministic(False, CPU):
            assert flags() == outside
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_trains_under_the_flags_and_leaves_none(tmp_path, monkeypatch):
    seen = []
    plain = Trainer.make_step

    def step(self, iterator):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return plain(self, iterator)

    monkeypatch.setattr(Trainer, "make_step", step)
    train(
        classification_recipe(epochs=1, deterministic=True), tmp_path / "a", World(CPU), quiet=True
    )
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_trainer_changes_no_random_numbers_and_no_flags(tmp_path):
    state, before = torch.get_rng_state(), flags()
    build_trainer(classification_recipe(seed=7, deterministic=True), tmp_path, World(CPU))
    assert torch.equal(torch.get_rng_state(), state)
    assert flags() == before


def test_cublas_gets_its_setting_before_cuda_begins(monkeypatch):
    monkeypatch.setenv(WORKSPACE, "")  # so that what is set below is taken back
    monkeypatch.delenv(WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    determinism._require_fixed_workspace()
    assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":16:8")
    determinism._require_fixed_workspace()
    assert os.environ[WORKSPACE] == ":16:8"


@pytest.mark.parametrize("value", [None, ":4096:2"])
def test_where_cuda_has_begun_another_setting_of_cublas_is_an_error(monkeypatch, value):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if value is not None:
        monkeypatch.setenv(WORKSPACE, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=f"before CUDA is first used, got {value}; set it before"):
        determinism._require_fixed_workspace()


def test_a_compiled_model_is_refused():
    with pytest.raises(
        ValueError, match=r"deterministic=true needs the same kernels .* got compile=true"
    ):
        get("quickstart").override({"deterministic": True, "compile": True})
