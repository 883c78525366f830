"""Sharded models on two processes equal the whole model on one, also across checkpoints."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from support.processes import torchrun
from support.recipes import classification_recipe
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import pale
from pale.recipes.files import recipe_to_yaml
from pale.train import checkpoint, sharded
from pale.train.distributed import World
from pale.train.evaluate import Evaluation, autocast
from pale.train.log import read
from pale.train.loop import build_trainer, train
from pale.train.sharded import restore

from .sharding import COUNTS, HARD
from .test_distributed import curve

ALONE = World(torch.device("cpu"))
KILL_INSIDE_A_CHECKPOINT = """
import os, signal, sys
from pale.cli.main import main

plain, calls = os.fsync, 0

def fsync(descriptor):
    global calls
    calls += 1
    if calls == 5:  # two a checkpoint on this process: inside the writing of the third, after step 6
        os.kill(os.getpid(), signal.SIGKILL)
    plain(descriptor)

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os.fsync = fsync
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(classification_recipe(**COUNTS), folder / "alone", ALONE, quiet=True)
    train(classification_recipe(**COUNTS, **HARD), folder / "hard_alone", ALONE, quiet=True)
    bf16 = classification_recipe(**COUNTS, precision="bf16", epochs=1)
    train(bf16, folder / "bf16_alone", ALONE, quiet=True)
    torchrun(folder, script=(str(Path(__file__).with_name("sharding.py")),))
    return folder


def shards(run: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted((run / "checkpoints/step_00000009").glob("shard-*")):
        found |= {f"{path.name[:11]}.{n}": t for n, t in load_file(path).items()}
    return found


def assert_bit_equal(one: Path, two: Path) -> None:
    assert curve(one) == curve(two)
    ours, theirs = shards(one), shards(two)
    assert len(ours) > 300  # weights, averages, two moments, on two processes
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_close(one: Path, two: Path, rel: float = 2e-3, weights: bool = True) -> None:
    assert curve(one)
    for a, b in zip(curve(one), curve(two), strict=True):
        assert a == pytest.approx(b, rel=rel)
    scores = [
        [
            (e["images"], e["top1"], e["loss"])
            for e in read(run / "log.jsonl")
            if e["event"] == "eval"
        ]
        for run in (one, two)
    ]
    for a, b in zip(*scores, strict=True):
        assert a == pytest.approx(b, rel=rel)
    if weights:
        for name, tensor in load_file(two / "weights.safetensors").items():
            ours = load_file(one / "weights.safetensors")[name]
            assert torch.allclose(ours, tensor, atol=2e-3), name


@pytest.mark.slow
def test_two_processes_with_shards_equal_one_with_the_whole_model(runs):
    assert_close(runs / "fsdp", runs / "alone")
    last = [e for e in read(runs / "fsdp/log.jsonl") if e["event"] == "eval"][-1]
    assert last["images"] == 17  # three batches on one process and two on the other


@pytest.mark.slow
def test_accumulation_checkpointed_blocks_and_parameters_of_one_row_work_in_shards(runs):
    assert_close(runs / "hard", runs / "hard_alone")


@pytest.mark.slow
def test_bf16_in_shards_is_bf16_on_one_process_but_for_norms_in_bf16(runs):
    assert_close(runs / "bf16_fsdp", runs / "bf16_alone", rel=0.03, weights=False)


@pytest.mark.slow
def test_each_process_holds_its_shard_and_checkpoints_are_safetensors(runs):
    path = runs / "fsdp/checkpoints/step_00000009"
    names = {file.name for file in path.iterdir()}
    assert names == {
        "manifest.json",
        "trainer.pt",
        *(f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)),
    }
    sizes = []
    for file in sorted(path.glob("shard-*")):
        with safe_open(file, "pt") as content:
            sizes.append(sum(content.get_tensor(n).numel() for n in content.keys()))  # noqa: SIM118
    whole = sum(t.numel() for t in load_file(runs / "fsdp/weights.safetensors").values())
    assert sum(sizes) == 4 * whole  # weights, averages, two moments: nothing twice
    assert max(sizes) < 1.1 * min(sizes)
    assert json.loads((path / "manifest.json").read_text())["step"] == 9


@pytest.mark.slow
def test_a_run_in_shards_resumes_bit_equal(runs):
    assert_bit_equal(runs / "resumed", runs / "fsdp")
    starts = [e["step"] for e in read(runs / "resumed/log.jsonl") if e["event"] == "start"]
    assert starts == [0, 4]


@pytest.mark.slow
def test_whole_models_resume_in_shards_and_shards_as_whole_models(runs, tmp_path):
    assert_close(runs / "into_shards", runs / "alone")
    assert_close(runs / "out_of_shards", runs / "alone")
    # And on another number of processes.
    run = tmp_path / "one"
    shutil.copytree(runs / "fsdp", run)
    for path in (run / "checkpoints").iterdir():
        if path.name > "step_00000004":
            shutil.rmtree(path)
    train(classification_recipe(**COUNTS, parallel="fsdp"), run, ALONE, resume=True, quiet=True)
    assert_close(run, runs / "alone")
    assert (run / "checkpoints/step_00000009/model.safetensors").exists()


@pytest.mark.slow
def test_a_moving_average_can_start_from_shards(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / "fsdp", run)
    path = run / "checkpoints/step_00000009"
    state = torch.load(path / "trainer.pt", weights_only=True)
    torch.save(state | {"models": ["model"]}, path / "trainer.pt")
    assert checkpoint.newest(run / "checkpoints").name == "step_00000008"  # a changed file is found
    trainer = build_trainer(classification_recipe(**COUNTS), run, ALONE)
    restore(path, trainer.state.models, trainer.state.optimizer, ALONE.device)
    for name, value in trainer.state.model.state_dict().items():
        assert torch.equal(value, trainer.state.ema.module.state_dict()[name])


@pytest.mark.slow
def test_a_full_disk_on_one_process_is_reported_by_all_and_loses_nothing(runs):
    words = [(runs / f"full{rank}.txt").read_text() for rank in (0, 1)]
    for text in words:
        assert "the checkpoint of step 2 could not be written" in text
        assert f"resume with: pale train --resume {runs / 'full'}" in text
    assert list((runs / "full/checkpoints").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])  # looked at later and at once
def test_a_bad_loss_on_one_process_stops_all_at_the_same_step(runs, parallel):
    words = [(runs / f"bad_{parallel}{rank}.txt").read_text() for rank in (0, 1)]
    assert words[0] == words[1]
    assert words[0].startswith("step 4: loss ")
    checkpoints = (runs / f"bad_{parallel}/checkpoints").iterdir()
    assert [path.name for path in checkpoints] == ["step_00000004"]


@pytest.mark.slow
def test_torchrun_recovers_from_a_worker_killed_inside_a_checkpoint_bit_equal(runs, tmp_path):
    recipe, script = tmp_path / "recipe.yaml", tmp_path / "kill.py"
    recipe.write_text(recipe_to_yaml(classification_recipe(**COUNTS, parallel="fsdp")))
    script.write_text(KILL_INSIDE_A_CHECKPOINT)
    run = tmp_path / "run"
    torchrun("train", "--config", recipe, "--output", run, script=(str(script),), restarts=1)
    assert [e["step"] for e in read(run / "log.jsonl") if e["event"] == "start"] == [0, 4]
    assert_bit_equal(run, runs / "fsdp")


@pytest.mark.slow
def test_shards_of_another_model_are_refused(runs):
    path = runs / "fsdp/checkpoints/step_00000009"
    trainer = build_trainer(classification_recipe(model__position="ape"), runs, ALONE)
    with pytest.raises(
        ValueError, match=r"9 does not fit this recipe \(it has \d+ parameters, the"
    ):
        restore(path, trainer.state.models, trainer.state.optimizer, ALONE.device)
    # As many, but other ones.
    trainer = build_trainer(classification_recipe(), runs, ALONE)
    trainer.state.model.register_parameter("other", trainer.state.model.norm.weight)
    with pytest.raises(ValueError, match=r"does not fit this recipe \(on process 0: Missing key"):
        restore(path, trainer.state.models, trainer.state.optimizer, ALONE.device)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "fp16"}, "parallel=fsdp supports bf16 and fp32, got precision=fp16"),
        (
            {"cuda_graph": True},
            "cuda_graph=true needs the whole model in each process, got parallel=fsdp",
        ),
    ],
)
def test_settings_that_shards_do_not_support_are_reported(changes, words):
    with pytest.raises(ValueError, match=words):
        classification_recipe(parallel="fsdp", **changes)


def test_one_process_uses_no_shards(tmp_path):
    train(classification_recipe(epochs=1), tmp_path / "plain", ALONE, quiet=True)
    train(classification_recipe(epochs=1, parallel="fsdp"), tmp_path / "fsdp", ALONE, quiet=True)
    one, two = (load_file(tmp_path / n / "weights.safetensors") for n in ("plain", "fsdp"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def group():
    """A process group of one process, whose shards are the whole model."""
    kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_shard_gives_the_losses_and_gradients_of_the_model_and_comes_back_from_disk(
    tmp_path, device, dtype
):
    world = World(torch.device(device))
    model = pale.create_model("pale_nano", num_classes=4)
    cut = copy.deepcopy(model)
    sharded.shard(cut, world, dtype)
    assert all(p.device.type == device and p.dtype == torch.float32 for p in cut.parameters())
    model.to(device)
    x = torch.randn(4, 3, 64, 64, device=device)
    losses = []
    for network in (model, cut):
        with autocast(world.device, dtype):
            loss = network(x).float().logsumexp(1).mean()
        loss.backward()
        losses.append(loss.item())
    rounding = 5e-2 if dtype else 1e-4
    assert losses[1] == pytest.approx(losses[0], rel=rounding)
    for (name, p), q in zip(model.named_parameters(), cut.parameters(), strict=True):
        assert q.grad.dtype == torch.float32
        error = (sharded.gather_tensor(q.grad) - p.grad).norm()
        assert error <= rounding * p.grad.norm() + 1e-5, name
    optimizer = torch.optim.AdamW(cut.parameters(), fused=device == "cuda" or None)
    optimizer.step()
    before = {n: v.clone() for n, v in sharded.gather_state(cut, world).items()}
    moment = sharded.gather_tensor(optimizer.state[cut.head.fc.weight]["exp_avg"]).clone()
    sharded.save(tmp_path, 1, {"model": cut}, optimizer, {"step": 1}, world)
    for value in (*cut.parameters(), optimizer.state[cut.head.fc.weight]["exp_avg"]):
        value.detach().zero_()
    (path,) = tmp_path.iterdir()
    assert checkpoint.is_good(path)
    assert sharded.restore(path, {"model": cut}, optimizer, world.device)["step"] == 1
    after = sharded.gather_state(cut, world)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for value in after.values())
    assert torch.equal(
        sharded.gather_tensor(optimizer.state[cut.head.fc.weight]["exp_avg"]), moment
    )


@pytest.mark.usefixtures("group")
def test_every_block_is_gathered_on_its_own_and_other_models_as_a_whole():
    model = pale.create_model("pale_nano", num_classes=4)
    sharded.shard(model, ALONE, None)
    cut = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    depths = pale.model.pale_transformer.PALE_NANO.depths
    assert cut == ["", *(f"stages.{i}.blocks.{j}" for i, n in enumerate(depths) for j in range(n))]
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    sharded.shard(plain, ALONE, None)
    assert [isinstance(m, FSDPModule) for m in plain.modules()] == [True, False]


@pytest.mark.usefixtures("group")
def test_nothing_stays_gathered_after_an_evaluation():
    task = classification_recipe().task()
    model = task.model()
    sharded.shard(model, ALONE, None)
    with torch.no_grad():
        model(torch.ones(1, 3, 32, 32))
    assert not all(isinstance(p, DTensor) for p in model.parameters())
    Evaluation(task, ALONE, 4, 0, even=True).run(model, None)
    assert all(isinstance(p, DTensor) for p in model.parameters())
