"""Several processes, started by torchrun as a user does, against one."""

import json
from pathlib import Path

import pytest
import torch
from launching import torchrun, torchrun_failing
from PIL import Image
from safetensors.torch import load_file

from pale.data.stream import StreamSampler
from pale.recipes.schema import text
from pale.train.distributed import World, join
from pale.train.log import read
from pale.train.loop import Trainer, train

from .tiny import picture_folders, star, tiny

ALONE = World(torch.device("cpu"))
DIE_ONCE = """
import os, signal, sys
from pathlib import Path
from pale.cli import main
from pale.train.loop import Trainer

make_step = Trainer.make_step
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def dying(self, iterator):
    if first and self.step == 5 and self.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_step(self, iterator)

Trainer.make_step = dying
sys.exit(main(sys.argv[1:]))
"""


def curve(run: Path) -> list[tuple[int, float, float]]:
    return [
        (e["step"], e["loss"], e["grad_norm"])
        for e in read(run / "log.jsonl")
        if e["event"] == "step"
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("alone")
    train(tiny(data__val_samples=13), run, World(torch.device("cpu")), quiet=True)
    return run


def check(run: Path, alone: Path) -> None:
    assert len(curve(run)) == 9
    for one, two in zip(curve(run), curve(alone), strict=True):
        assert one == pytest.approx(two, rel=2e-3)
    ours, theirs = load_file(run / "weights.safetensors"), load_file(alone / "weights.safetensors")
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-3), name


@pytest.mark.slow
def test_gradients_averaged_after_the_backward_pass_are_those_of_ddp(tmp_path, alone):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text(tiny(data__val_samples=13, cuda_graph=True, accumulate=2)))
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_processes_with_half_the_batch_are_one_process(tmp_path, alone):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text(tiny(data__val_samples=13)))
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", alone)
    # 13 validation images on two processes: each counted once.
    last = [e for e in read(tmp_path / "run" / "log.jsonl") if e["event"] == "eval"][-1]
    assert last["images"] == 13
    start = read(tmp_path / "run" / "log.jsonl")[0]
    assert start["processes"] == 2
    # One process goes on where two stopped.
    assert (
        json.loads((tmp_path / "run/checkpoints/step_00000009/manifest.json").read_text())["step"]
        == 9
    )


@pytest.mark.slow
def test_two_processes_mix_tokens_and_labels_as_one(tmp_path):
    star_recipe = star(tmp_path / "store")
    train(star_recipe, tmp_path / "alone", World(torch.device("cpu")), quiet=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text(star_recipe))
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_recovers_from_a_killed_worker(tmp_path, alone):
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "die_once.py"
    recipe.write_text(text(tiny(data__val_samples=13, saving__every_steps=2)))
    script.write_text(DIE_ONCE)
    run = tmp_path / "run"
    torchrun("train", "--config", recipe, "--output", run, script=(str(script),), restarts=1)
    starts = [entry for entry in read(run / "log.jsonl") if entry["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 4]
    check(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_picture_that_any_process_cannot_read_loses_nothing(tmp_path, rank, parallel):
    picture_folders(tmp_path / "data")
    changes = {"data__root": str(tmp_path / "data"), "data__kind": "folder", "ema": None}
    settings = tiny(batch=4, parallel=parallel, mix={"mixup": 0, "cutmix": 0}, **changes)
    trainer = Trainer(settings.override({"parallel": "ddp"}), tmp_path / "x", ALONE)
    sampler = StreamSampler(trainer.stream, 0, rank, 2)
    (_, index) = list(sampler)[1][0]  # what this process alone sees in the second step
    assert index not in [i for _, i in list(StreamSampler(trainer.stream, 0, 1 - rank, 2))[1]]
    bad = Path(trainer.task.sample_name(index))
    content = bad.read_bytes()
    bad.write_bytes(content[:40])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(text(settings))
    said = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in said
    assert f"step 1 is saved, go on with: pale train --resume {run}" in said
    bad.write_bytes(content)
    torchrun("train", "--resume", run)
    starts = [entry for entry in read(run / "log.jsonl") if entry["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 1]


@pytest.mark.slow
def test_a_jpeg_damaged_behind_its_head_loses_nothing_where_the_device_decodes(tmp_path):
    picture_folders(tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.png"):
        Image.effect_noise((40, 40), 90).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    settings = tiny(
        batch=4,
        mix={"mixup": 0, "cutmix": 0},
        data={"root": str(tmp_path / "data"), "kind": "folder", "on_device": "decoding"},
    )
    trainer = Trainer(settings, tmp_path / "x", ALONE)
    (_, index) = list(StreamSampler(trainer.stream, 0, 1, 2))[1][0]
    bad = Path(trainer.task.sample_name(index))
    bad.write_bytes(bad.read_bytes()[:-150])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(text(settings))
    said = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in said
    assert f"step 1 is saved, go on with: pale train --resume {run}" in said


@pytest.mark.slow
def test_a_picture_of_the_evaluation_that_one_process_cannot_read_loses_nothing(tmp_path):
    picture_folders(tmp_path / "data")
    bad = tmp_path / "data/val/a/1.png"  # the second image: of process 1
    bad.write_bytes(bad.read_bytes()[:40])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    settings = tiny(batch=4, data__kind="folder", data__root=str(tmp_path / "data"))
    recipe.write_text(text(settings))
    said = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in said
    assert "step 2 is saved" in said
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000002"]


def test_alone_there_is_nothing_to_agree_on():
    with join("cpu") as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        assert world.any(True, False) == [True, False]
        assert world.mean(2.5) == 2.5
        assert world.gather("x") == ["x"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said():
    with pytest.raises(ValueError, match="no CUDA device here"), join("cuda"):
        pass
