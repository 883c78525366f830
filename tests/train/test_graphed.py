"""A step recorded as a CUDA graph equals the eager step. Most tests need a GPU."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.recipes import classification_recipe
from torch import nn

import pale
from pale.train.distributed import World
from pale.train.drop_path import DropPaths
from pale.train.evaluate import autocast
from pale.train.graphed import GraphedStep, renew_accumulators
from pale.train.loop import build_trainer, train

from .test_loop import assert_same, events, weights

CPU = World(torch.device("cpu"))


def test_a_batch_that_is_not_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="needs a batch with tensors on a CUDA device, got none"):
        GraphedStep(lambda batch: batch["x"], nn.Linear(1, 1), {"x": torch.ones(1)})


def test_without_a_gpu_it_changes_nothing_and_is_reported(tmp_path, capsys):
    train(classification_recipe(epochs=1), tmp_path / "plain", CPU, quiet=True)
    train(classification_recipe(epochs=1, cuda_graph=True), tmp_path / "graph", CPU)
    assert "cuda_graph=true has no effect: there is no CUDA device" in capsys.readouterr().out
    assert_same(weights(tmp_path / "plain"), weights(tmp_path / "graph"))


def test_renewed_accumulators_are_other_nodes_and_data_stays_where_it_is():
    model = nn.Linear(3, 2, dtype=torch.float64)
    kept = model(
        torch.ones(1, 3, dtype=torch.float64)
    )  # an autograd graph, as a recording keeps one

    def node():
        return model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]

    old, place, values = node(), model.weight.data_ptr(), model.weight.detach().clone()
    assert node() is old
    renew_accumulators(model)
    assert node() is not old
    assert model.weight.data_ptr() == place
    assert torch.equal(model.weight, values)
    kept.sum().backward()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "cuda", "processes", "expected"),
    [
        ({}, True, 1, True),
        ({}, False, 1, False),
        ({}, True, 2, False),
        ({"cuda_graph": True}, True, 2, True),
        ({"cuda_graph": True}, False, 1, False),
        ({"cuda_graph": False}, True, 1, False),
        ({"compile": True}, True, 1, False),
        ({"model.checkpointing": True}, True, 1, False),
        ({"model.name": "resnet18"}, True, 1, False),
        ({"model.options": {"backend": "reference"}}, True, 1, False),
    ],
    ids=str,
)
def test_by_default_steps_are_graphs_where_that_is_known_to_work(
    changes, cuda, processes, expected
):
    assert classification_recipe().override(changes).uses_cuda_graph(cuda, processes) is expected


def step_of(model, dtype):
    def compute(batch):
        with autocast(torch.device("cuda"), dtype):
            loss = F.cross_entropy(model(batch["images"]).float(), batch["targets"])
        loss.backward()
        return loss.detach()

    return compute


def batch_of(seed, size=8):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 64, 64, generator=generator)
    targets = torch.rand(size, 4, generator=generator).softmax(1)
    return {"images": images.cuda(), "targets": targets.cuda(), "keys": torch.zeros(size, 2)}


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_losses_and_gradients_are_those_of_eager_steps(dtype):
    torch.manual_seed(0)
    model = pale.create_model("pale_nano", num_classes=4, drop_path_rate=0.5).cuda()
    drop_paths = DropPaths(model, 8, 8, seed=1)
    compute = step_of(model, dtype)
    rounding = 2e-2 if dtype else 1e-4
    expected = []
    for step in range(4):
        drop_paths.draw(step, np.arange(8))
        loss = compute(batch_of(step))
        expected.append((loss.item(), gradients(model)))
        model.zero_grad()
    drop_paths.draw(100, np.arange(8))
    graphed = GraphedStep(compute, model, batch_of(100))
    assert all(not g.any() for g in gradients(model).values())  # the warm-up leaves nothing
    places = [p.grad.data_ptr() for p in model.parameters()]
    for step, (loss, grads) in enumerate(expected):
        drop_paths.draw(step, np.arange(8))
        assert graphed(batch_of(step)).item() == pytest.approx(loss, rel=rounding)
        for name, grad in gradients(model).items():
            error = (grad - grads[name]).norm() / grads[name].norm().clamp(min=1e-6)
            assert error < rounding, (step, name)
        graphed.zero_grad()
    assert [p.grad.data_ptr() for p in model.parameters()] == places
    assert len({round(loss, 6) for loss, _ in expected}) == 4


@pytest.mark.gpu
def test_replays_add_up_buffers_move_once_and_unused_parameters_have_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1))
    model = model.append(nn.Flatten()).cuda()
    model.register_parameter("idle", nn.Parameter(torch.ones(2, device="cuda")))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2, device="cuda"), False))
    compute = step_of(model, None)
    compute(batch_of(1))
    once = gradients(model)
    states = {name: value.clone() for name, value in model[1].named_buffers()}
    model.zero_grad()
    model[1].reset_running_stats()
    graphed = GraphedStep(compute, model, batch_of(2))
    assert model[1].num_batches_tracked.item() == 0
    graphed(batch_of(1))
    for name, value in model[1].named_buffers():
        torch.testing.assert_close(value, states[name])
    first = graphed(batch_of(1)).clone()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, 2 * once[name], rtol=1e-4, atol=1e-5)
    assert model.idle.grad is None
    kept = graphed(batch_of(3))
    graphed(batch_of(1))
    assert kept.item() != first.item()  # a loss stays what it was


@pytest.mark.gpu
def test_another_batch_size_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 4)).cuda()
    graphed = GraphedStep(step_of(model, None), model, batch_of(0))
    with pytest.raises(ValueError, match=r"needs batches of shapes .*\(8, 4\).*, got .*\(6, 4\)"):
        graphed(batch_of(0, size=6))


WAITS = """
import torch
from torch import nn
from pale.train.graphed import GraphedStep, renew_accumulators

model = nn.Linear(4, 4).cuda()

def compute(batch):
    loss = model(batch["x"]).sum()
    loss.backward()
    loss.item()
    return loss.detach()

GraphedStep(compute, model, {"x": torch.ones(2, 4, device="cuda")})
"""


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_cannot_be_recorded():
    # In a process of its own, as a broken recording can leave the allocator in disorder.
    done = subprocess.run(
        [sys.executable, "-c", WAITS], capture_output=True, text=True, check=False
    )
    assert (
        "UnavailableError: the step of this model cannot be recorded as a CUDA graph" in done.stderr
    )
    assert "set cuda_graph=false" in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_run_with_a_graph_is_the_run_without(tmp_path, precision, accumulate):
    world = World(torch.device("cuda"))
    changes = {"precision": precision, "accumulate": accumulate, "data__workers": 2}
    train(classification_recipe(**changes, cuda_graph=False), tmp_path / "eager", world, quiet=True)
    train(classification_recipe(**changes, cuda_graph=True), tmp_path / "graph", world, quiet=True)
    for a, b in zip(
        events(tmp_path / "eager", "step"), events(tmp_path / "graph", "step"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2 if precision != "fp32" else 1e-3)
    # And it goes on after a stop.
    for path in (tmp_path / "graph/checkpoints").iterdir():
        assert path.name == "step_00000009"
    outcome = train(
        classification_recipe(**changes, cuda_graph=True, epochs=4),
        tmp_path / "graph",
        world,
        resume=True,
        quiet=True,
    )
    assert outcome.step == 11


@pytest.mark.gpu
def test_on_cuda_steps_are_checked_later_without_synchronisation(tmp_path):
    world = World(torch.device("cuda"))
    trainer = build_trainer(classification_recipe(cuda_graph=False), tmp_path, world)
    assert trainer.stepper.guard is not None
    loader = torch.utils.data.DataLoader(
        trainer.data,
        batch_sampler=trainer.sampler,
        collate_fn=trainer.task.collate,
        pin_memory=True,
    )
    iterator = iter(loader)
    for _ in range(3):
        trainer.make_step(iterator)
    batch, losses = next(iterator), torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.stepper.network.drop_paths.draw(4, trainer.sampler.positions[0])
        images = batch["images"].to("cuda", non_blocking=True).float()
        prepared = {"images": images, "targets": torch.ones(len(images), 8, device="cuda") / 8}
        loss = trainer.stepper._compute(prepared)
        norm = nn.utils.clip_grad_norm_(trainer.state.model.parameters(), 5.0)
        trainer.stepper._update(loss, norm, batch["keys"])
        trainer.stepper.zero_grad()
        losses += loss
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.settle()
    assert losses.isfinite().item()
