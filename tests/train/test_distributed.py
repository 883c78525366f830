"""Several processes, started by torchrun, against one."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.datasets import write_image_folders
from support.processes import torchrun, torchrun_failing
from support.recipes import classification_recipe, token_label_recipe

from pale.data.stream import StreamSampler
from pale.recipes.files import recipe_to_yaml
from pale.train.distributed import World, join
from pale.train.log import read
from pale.train.loop import build_trainer, train

ALONE = World(torch.device("cpu"))
DIE_ONCE = """
import os, signal, sys
from pathlib import Path
from pale.cli.main import main
from pale.train.loop import Trainer

make_step = Trainer.make_step
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

def dying(self, iterator):
    if first and self.state.step == 5 and self.world.rank == 1:
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
    train(classification_recipe(data__val_samples=13), run, World(torch.device("cpu")), quiet=True)
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
    recipe.write_text(
        recipe_to_yaml(classification_recipe(data__val_samples=13, cuda_graph=True, accumulate=2))
    )
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", alone)


@pytest.mark.slow
def test_two_processes_with_half_the_batch_are_one_process(tmp_path, alone):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(classification_recipe(data__val_samples=13)))
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", alone)
    # 13 validation images on two processes: each counted once.
    last = [e for e in read(tmp_path / "run" / "log.jsonl") if e["event"] == "eval"][-1]
    assert last["images"] == 13
    start = read(tmp_path / "run" / "log.jsonl")[0]
    assert start["processes"] == 2
    # One process resumes a run of two.
    longer = classification_recipe(data__val_samples=13, epochs=4)
    assert train(longer, tmp_path / "run", ALONE, resume=True, quiet=True).step == 11
    starts = [e["step"] for e in read(tmp_path / "run/log.jsonl") if e["event"] == "start"]
    assert starts == [0, 9]
    assert [step for step, *_ in curve(tmp_path / "run")] == list(range(1, 12))


@pytest.mark.slow
def test_two_processes_mix_tokens_and_labels_as_one(tmp_path):
    star_recipe = token_label_recipe(tmp_path / "store")
    train(star_recipe, tmp_path / "alone", World(torch.device("cpu")), quiet=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(star_recipe))
    torchrun("train", "--config", recipe, "--output", tmp_path / "run")
    check(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_recovers_from_a_killed_worker(tmp_path, alone):
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "die_once.py"
    recipe.write_text(
        recipe_to_yaml(classification_recipe(data__val_samples=13, saving__every_steps=2))
    )
    script.write_text(DIE_ONCE)
    run = tmp_path / "run"
    torchrun("train", "--config", recipe, "--output", run, script=(str(script),), restarts=1)
    starts = [entry for entry in read(run / "log.jsonl") if entry["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 4]
    check(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_image_that_one_process_cannot_read_loses_no_step(tmp_path, rank, parallel):
    write_image_folders(tmp_path / "data")
    changes = {"data__root": str(tmp_path / "data"), "data__kind": "folder", "ema": None}
    settings = classification_recipe(
        batch=4, parallel=parallel, mix={"mixup": 0, "cutmix": 0}, **changes
    )
    trainer = build_trainer(settings.override({"parallel": "ddp"}), tmp_path / "x", ALONE)
    sampler = StreamSampler(trainer.stream, 0, rank, 2)
    (_, index) = list(sampler)[1][0]  # what this process alone sees in the second step
    assert index not in [i for _, i in list(StreamSampler(trainer.stream, 0, 1 - rank, 2))[1]]
    bad = Path(trainer.task.sample_name(index))
    content = bad.read_bytes()
    bad.write_bytes(content[:40])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(recipe_to_yaml(settings))
    output = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in output
    assert f"step 1 is saved; resume with: pale train --resume {run}" in output
    bad.write_bytes(content)
    torchrun("train", "--resume", run)
    starts = [entry for entry in read(run / "log.jsonl") if entry["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 1]


@pytest.mark.slow
def test_a_jpeg_damaged_behind_its_head_loses_nothing_where_the_device_decodes(tmp_path):
    write_image_folders(tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.png"):
        Image.effect_noise((40, 40), 90).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    settings = classification_recipe(
        batch=4,
        mix={"mixup": 0, "cutmix": 0},
        data={"root": str(tmp_path / "data"), "kind": "folder", "on_device": "decoding"},
    )
    trainer = build_trainer(settings, tmp_path / "x", ALONE)
    (_, index) = list(StreamSampler(trainer.stream, 0, 1, 2))[1][0]
    bad = Path(trainer.task.sample_name(index))
    bad.write_bytes(bad.read_bytes()[:-150])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(recipe_to_yaml(settings))
    output = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in output
    assert f"step 1 is saved; resume with: pale train --resume {run}" in output


@pytest.mark.slow
def test_a_validation_image_that_one_process_cannot_read_loses_no_step(tmp_path):
    write_image_folders(tmp_path / "data")
    bad = tmp_path / "data/val/a/1.png"  # the second image: of process 1
    bad.write_bytes(bad.read_bytes()[:40])
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    settings = classification_recipe(
        batch=4, data__kind="folder", data__root=str(tmp_path / "data")
    )
    recipe.write_text(recipe_to_yaml(settings))
    output = torchrun_failing("train", "--config", recipe, "--output", run)
    assert f"{bad}: cannot be read as an image" in output
    assert "step 2 is saved" in output
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000002"]


def test_one_process_needs_no_collectives():
    with join("cpu") as world:
        assert (world.rank, world.size, world.main) == (0, 1, True)
        assert world.any(True, False) == [True, False]
        assert world.mean(2.5) == 2.5
        assert world.gather("x") == ["x"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_reported():
    with pytest.raises(RuntimeError, match="no CUDA device is available"), join("cuda"):
        pass
