"""Out-of-memory errors name the settings that reduce memory, with their current values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.recipes import classification_recipe, detection_recipe, segmentation_recipe
from torch.utils.data import get_worker_info

from pale.cli.main import main
from pale.core.memory import command_shortage, exhausted_memory
from pale.data.loader import ImageDataset
from pale.errors import MemoryShortageError
from pale.predict import Predictor
from pale.recipes.files import recipe_to_yaml
from pale.tasks.classification.inference import ClassificationPipeline
from pale.train.distributed import World
from pale.train.evaluate import Evaluation
from pale.train.graphed import GraphedStep
from pale.train.loop import train
from pale.train.memory import training_shortage
from pale.train.step import TrainStep

CPU = World(torch.device("cpu"))
GPU = World(torch.device("cuda"))
CUDA = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 5.00 MiB free.\nmore of it"
HOST = (
    "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 8000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA), "GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "GPU"),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "GPU"),
        (MemoryError(), "host"),
        (RuntimeError(HOST), "host"),
        (RuntimeError("inconsistent tensor size"), None),
        (ValueError("DefaultCPUAllocator"), None),
    ],
    ids=lambda value: str(value)[:24],
)
def test_out_of_memory_errors_are_recognised(error, where):
    assert exhausted_memory(error) == where


def fail_at(monkeypatch, step: int, error: Exception) -> None:
    plain = TrainStep._forward_backward

    def compute(self, batch):
        if self.state.step == step and self.recipe.accumulate == 1:
            raise error
        return plain(self, batch)

    monkeypatch.setattr(TrainStep, "_forward_backward", compute)


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (torch.OutOfMemoryError(CUDA), "--accumulate 2 (now 1; same result)"),
        (RuntimeError(HOST), "--accumulate 2 (now 1; same result)"),
        (MemoryError(), "--accumulate 2 (now 1; same result)"),
    ],
    ids=["GPU", "allocator", "MemoryError"],
)
def test_training_names_settings_that_need_less_memory_and_resumes_with_them(
    tmp_path, capsys, monkeypatch, error, first
):
    (tmp_path / "recipe.yaml").write_text(
        recipe_to_yaml(classification_recipe(epochs=1, saving__every_steps=1))
    )
    fail_at(monkeypatch, 2, error)
    config = ["train", "--config", str(tmp_path / "recipe.yaml"), "--device", "cpu"]
    assert main([*config, "--output", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "memory at step 2 (" in err
    assert "8 images at a time: batch 8 in 1 parts (1 processes x accumulate 1)" in err
    assert f"Each of these needs less memory: {first}" in err
    for words in (
        "--model.checkpointing true (now false",
        "smaller images, --data.size (now 32)",
        "a smaller --batch (now 8; in a new run)",
        f"pale train --resume {tmp_path / 'run'} --",
    ):
        assert words in err, words
    assert "more of it" not in err
    words = ["train", "--resume", str(tmp_path / "run"), "--device", "cpu", "--accumulate", "2"]
    assert main(words) == 0


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (
            classification_recipe(batch=6, mix={"tokens": 0.0}),
            ("--accumulate 3 (", "--data.size (now 32)"),
        ),
        (segmentation_recipe(), ("--accumulate 2 (", "--augment.crop (now 32)")),
        (segmentation_recipe(accumulate=4), ("--model.checkpointing true", "now 8; in a new run")),
        (
            detection_recipe(augment__crop=[64, 80]),
            ("--accumulate 2 (", "--augment.crop (now (64, 80))"),
        ),
        (classification_recipe(precision="fp32"), ("--precision bf16 (now fp32)",)),
    ],
    ids=["pairs", "segmentation", "at-least-two", "detection", "precision"],
)
def test_advice_fits_the_recipe(tmp_path, recipe, expected):
    error = torch.OutOfMemoryError(CUDA)
    message = str(training_shortage("GPU", error, recipe, GPU, tmp_path, None))
    for words in expected:
        assert words in message, message
    if recipe.accumulate == 4:
        assert "--accumulate" not in message
    assert "while the run was set up (CUDA out of memory" in message


CHILD = """
import resource, sys
import torch
from pale.cli.main import main
import pale.train.loop, pale.tasks.segmentation.task, pale.model.pale_transformer
torch.set_num_threads(1)
(torch.randn(64, 64) @ torch.randn(64, 64)).sum()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20,) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_running_out_of_host_memory_is_reported_without_a_traceback(tmp_path):
    words = ["train", "quickstart", "--output", str(tmp_path), "--device", "cpu"]
    words += ["--batch", "128", "--data.size", "128", "--data.samples", "128", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "500", *words, "--warmup_epochs", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "out of host memory at step 0 (" in done.stderr
    assert "--accumulate 2 (now 1; same result)" in done.stderr
    assert "smaller images, --data.size (now 128)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", ["error", pytest.param("killed", marks=pytest.mark.slow)])
def test_running_out_of_memory_in_a_worker_names_its_settings(tmp_path, capsys, monkeypatch, kind):
    read = ImageDataset.__getitem__

    def fail(self, key):
        if get_worker_info() is None:  # the estimate before the first step
            return read(self, key)
        if kind == "killed":
            os.kill(os.getpid(), 9)  # as the kernel does if memory is short
        raise MemoryError

    monkeypatch.setattr(ImageDataset, "__getitem__", fail)
    recipe = classification_recipe(data__workers=1, epochs=1)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    words = ["train", "--config", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "run")]
    assert main([*words, "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    if kind == "error":
        assert "out of host memory at step 0 (MemoryError)" in err
        assert "--data.workers 0 (now 1)" in err
    else:
        assert "a process that reads images has died" in err
        assert "lower data.workers (now 1) or batch" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    train(classification_recipe(epochs=1), run, CPU, quiet=True)
    return run


def full(*args, **options):
    raise torch.OutOfMemoryError(CUDA)


def test_evaluation_names_its_batch_size(trained, capsys, monkeypatch):
    monkeypatch.setattr(Evaluation, "run", full)
    assert main(["eval", str(trained), "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert "out of GPU memory (CUDA out of memory" in err
    assert "a smaller --batch-size (now 64); --device cpu" in err
    assert "Traceback" not in err


def test_prediction_names_its_batch_size_and_the_image(trained, tmp_path, capsys, monkeypatch):
    for i in range(3):
        Image.new("RGB", (60 + i, 40)).save(tmp_path / f"{i}.png")
    predictor = Predictor(trained, device="cpu")
    monkeypatch.setattr(ClassificationPipeline, "postprocess", full)
    with pytest.raises(MemoryShortageError, match=r"with 3 images of up to 62x40; .* \(now 16\)"):
        predictor.batch(sorted(tmp_path.glob("*.png")))
    assert main(["predict", str(tmp_path), "--weights", str(trained), "--device", "cpu"]) == 1
    err = capsys.readouterr().err
    assert err.count("out of GPU memory (CUDA out of memory") == 3
    assert "with 1 images of up to 60x40; each of these needs less: smaller images" in err
    assert "Traceback" not in err


def test_running_out_of_memory_while_recording_a_graph_is_raised(monkeypatch):
    class Graph:
        def __enter__(self):
            full()

        def __exit__(self, *error):
            return False

    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: Graph())
    for name in ("get_rng_state", "set_rng_state", "Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, Fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr("pale.train.graphed._on_device", lambda batch: dict(batch))
    batch = {"x": torch.zeros(1)}
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        GraphedStep(lambda given: given["x"].sum(), torch.nn.Linear(1, 1), batch)


class Fake:
    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def wait_stream(self, other):
        pass


def test_commands_without_memory_options_still_give_advice():
    message = command_shortage("host", MemoryError(), {})
    assert (
        message
        == "out of host memory (MemoryError); each of these needs less: smaller images or a smaller model"
    )
