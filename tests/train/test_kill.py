"""A run that was killed and resumed is, bit for bit, the run that was not."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pale.recipes.schema import text
from pale.train.log import read

from .tiny import tiny

STEPS = 17
# One save makes six calls: three files, the manifest, the folder, the parent. Calls 1 and 2 write the recipe. So
# these are: the first file of the first save, just before it gets its name, just after, the middle of the second.
FSYNCS = [3, 7, 8, 11]


def final(run: Path) -> dict:
    (path,) = (run / "checkpoints").glob(f"step_{STEPS:08d}")
    trainer = torch.load(path / "trainer.pt", weights_only=True)
    optimizer = {
        f"{i}.{name}": value
        for i, values in trainer["optimizer"]["state"].items()
        for name, value in values.items()
    }
    assert len(optimizer) > 50
    return {
        "model": load_file(path / "model.safetensors"),
        "ema": load_file(path / "ema.safetensors"),
        "optimizer": optimizer,
        "step": trainer["step"],
        "figures": trainer["figures"],
        "best": trainer["best"],
        "groups": trainer["optimizer"]["param_groups"],
        "curve": [
            (e["step"], e["loss"], e["lr"]) for e in read(run / "log.jsonl") if e["event"] == "step"
        ],
        "evaluations": [
            (e["step"], e["top1"]) for e in read(run / "log.jsonl") if e["event"] == "eval"
        ],
    }


def assert_bit_equal(one: dict, two: dict) -> None:
    for name in one:
        if name in ("model", "ema", "optimizer"):
            assert one[name].keys() == two[name].keys()
            for key, tensor in one[name].items():
                assert torch.equal(tensor, two[name][key]), (name, key)
        else:
            assert one[name] == two[name], name


def kill(tmp_path: Path, seed: int, kills: int, fsyncs: list[int]) -> list[dict]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text(tiny(epochs=6, eval_every=3, saving__every_steps=3)))
    arguments = [tmp_path / "runs", recipe, seed, kills, *fsyncs]
    script = Path(__file__).with_name("killer.py")
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    sys.stdout.write(done.stdout)  # seeds and times, shown on failure
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    whole = final(tmp_path / "runs" / "whole")
    assert len(whole["curve"]) == STEPS
    for kill in told:
        assert_bit_equal(whole, final(tmp_path / "runs" / kill["run"]))
    return told


@pytest.mark.slow
def test_a_run_killed_inside_the_writing_of_a_checkpoint_goes_on_bit_equal(tmp_path):
    told = kill(tmp_path, 0, 0, FSYNCS)
    assert all(kill["died"] for kill in told)
    assert any(kill["writing"] for kill in told)
    assert {kill["checkpoints"] for kill in told} >= {0, 1}


@pytest.mark.slow
def test_a_run_killed_at_random_times_goes_on_bit_equal(tmp_path):
    seed = int(time.time())
    told = kill(tmp_path, seed, 10, [])
    hits = sum(kill["died"] for kill in told)
    assert hits >= 8, f"seed {seed}: {hits} of 10 kills hit a run"
