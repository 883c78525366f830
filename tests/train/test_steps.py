"""Runs with a length in steps, and batch norm over several processes."""

from pathlib import Path

import pytest
import torch
from support.recipes import classification_recipe
from torch import nn

from pale.core.settings import vary
from pale.data.stream import Stream
from pale.recipes import get
from pale.recipes.schema import Optim
from pale.train.distributed import World
from pale.train.optim import make_schedule
from pale.train.sync_batch_norm import sync_batch_norms


def test_a_stream_of_so_many_steps_goes_through_epoch_after_epoch():
    stream = Stream(10, 4, epochs=300, seed=0, fixed_steps=7)
    assert stream.steps == 7
    assert [stream.ends_epoch(step) for step in range(1, 8)] == [0, 0, 1, 0, 1, 0, 1]


def test_the_linear_schedule_warms_up_and_ends_at_zero():
    recipe = vary(
        classification_recipe(),
        optim=Optim(lr=1.0, scale_lr=False, min_lr=0, warmup_lr=0, schedule="linear"),
        warmup_steps=10,
    )
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], 1.0)
    rates = []
    scheduler = make_schedule(optimizer, recipe, 100, samples=22)
    for step in range(100):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:3] == pytest.approx([0, 0.1, 0.2])
    assert rates[10:] == pytest.approx([1 - step / 100 for step in range(10, 100)])


def test_a_classifier_started_from_weights_gets_a_new_head():
    recipe = get("small_data.pale_t").started_from(Path("w.safetensors"))
    assert recipe.model.weights == Path("w.safetensors")
    assert recipe.model.new_head
    recipe = get("camvid.upernet_pale_t").started_from(Path("w.safetensors"))
    assert recipe.model.init == Path("w.safetensors")


def test_alone_batch_norms_stay_as_they_are():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert type(sync_batch_norms(model, World(torch.device("cpu")))[1]) is nn.BatchNorm2d


def test_among_several_the_parameters_stay_the_same_objects():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    weight, names = model[1].weight, list(model.state_dict())
    synced = sync_batch_norms(model, World(torch.device("cpu"), 0, 2))
    assert synced[1].weight is weight
    assert list(synced.state_dict()) == names
    x = torch.randn(2, 3, 5, 5)
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    plain.load_state_dict(synced.state_dict())
    assert torch.equal(synced.eval()(x), plain(x))
