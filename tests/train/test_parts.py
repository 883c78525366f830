"""Drop path, optimizer, schedule, moving average, display: each against timm's or the formula."""

import math

import numpy as np
import pytest
import torch
from timm.layers import DropPath
from timm.layers.drop import drop_path

import pale
from pale.data.stream import shard_positions
from pale.recipes import get
from pale.train.drop_path import DropPaths, SampledDropPath
from pale.train.log import Display, Log, read, sparkline
from pale.train.optim import optimizer, schedule


def nano(**arguments):
    return pale.create_model("pale_nano", num_classes=4, **arguments)


def test_drop_path_equals_timms_on_the_same_draw():
    x = torch.randn(16, 3, 3, 5)
    torch.manual_seed(1)
    expected = drop_path(x, 0.4, training=True)
    torch.manual_seed(1)
    mask = drop_path(torch.ones(16, 1), 0.4, training=True)[:, 0]
    ours = SampledDropPath(mask)
    assert torch.equal(ours(x), expected)
    assert 0 < (mask == 0).sum() < 16
    assert torch.equal(ours.eval()(x), x)


def test_every_drop_path_of_a_model_is_drawn_and_shards_make_up_the_whole():
    model = nano(drop_path_rate=0.5)
    whole = DropPaths(model, 16, 16, seed=3)
    assert not any(isinstance(module, DropPath) for module in model.modules())
    assert len(whole.masks) == 2 * (sum(pale.pale_transformer.PALE_NANO.depths) - 1)
    whole.draw(7, np.arange(16))
    for shard in range(4):
        part = DropPaths(nano(drop_path_rate=0.5), 16, 4, seed=3)
        positions = shard_positions(16, shard, 4)
        part.draw(7, positions)
        assert torch.equal(part.masks, whole.masks[:, positions])
    before = whole.masks.clone()
    whole.draw(8, np.arange(16))
    assert not torch.equal(whole.masks, before)


def test_drop_path_keeps_the_share_it_should():
    model = torch.nn.Sequential(DropPath(0.3), torch.nn.Linear(1, 1))
    drop = DropPaths(model, 64, 64, seed=0)
    kept = []
    for step in range(50):
        drop.draw(step, np.arange(64))
        kept.append(drop.masks.clone())
    masks = torch.stack(kept)
    assert (masks > 0).float().mean().item() == pytest.approx(0.7, abs=0.03)
    assert masks.unique().tolist() == pytest.approx([0, 1 / 0.7])


def test_norms_biases_and_ape_are_not_decayed():
    model = nano(position="ape")
    groups = optimizer(model, get("imagenet.pale_t")).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = parameter.ndim <= 1 or name.endswith("ape.map")
        assert decay[id(parameter)] == (0 if spared else 0.05), name


def test_layer_decay_makes_early_blocks_slow_and_the_head_fast():
    model = nano()
    recipe = get("finetune.pale_t")
    adam = optimizer(model, recipe)
    schedule(adam, recipe, 100, 256 * 10).step_update(50)
    rate = {id(p): group["lr"] for group in adam.param_groups for p in group["params"]}
    rates = [
        rate[id(p)]
        for p in (
            model.stages[0].merge.conv.weight,
            model.stages[1].blocks[0].norm1.weight,
            model.stages[3].blocks[1].norm1.weight,
            model.head.fc.weight,
        )
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 * rates[-1]


def test_learning_rate_scales_with_the_batch_unless_fixed():
    assert get("imagenet.pale_t").peak_lr == 1e-3
    assert get("imagenet.pale_t").override({"batch": 256}).peak_lr == 2.5e-4
    fixed = get("imagenet.pale_t").override({"batch": 256, "optim.scale_lr": False})
    assert fixed.peak_lr == 1e-3


def test_schedule_is_a_linear_rise_then_a_cosine():
    recipe = get("imagenet.pale_t").override({"epochs": 10, "warmup_epochs": 2})
    adam = optimizer(nano(), recipe)
    plan = schedule(adam, recipe, steps=100, samples=1024 * 10)
    rates = []
    for step in range(100):
        plan.step_update(step)
        rates.append(adam.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-6)
    assert rates[10] == pytest.approx(1e-6 + (1e-3 - 1e-6) / 2)
    for step in (20, 50, 99):
        cosine = 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 100))
        assert rates[step] == pytest.approx(cosine)


def test_log_that_goes_on_forgets_what_came_later(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path, 0)
    for step in range(5):
        log.write("step", step=step)
    log.close()
    with path.open("a") as file:
        file.write('{"event": "ste')  # cut short by a kill
    log = Log(path, 2)
    log.write("step", step=3, again=True)
    log.close()
    assert [e["step"] for e in read(path)] == [0, 1, 2, 3]
    assert read(path)[-1]["again"]


def test_display_is_live_on_a_terminal_and_plain_elsewhere(capsys, monkeypatch):
    figures = {
        "epoch": 0.5,
        "loss": 1.5,
        "lr": 1e-3,
        "images_per_s": 10.0,
        "data_wait": 0.25,
        "memory_mb": 12.0,
    }
    with Display("title", 10, 0) as display:
        display.step(step=10, **figures)
    plain = capsys.readouterr().out
    assert "step 10/10, epoch 0.50, loss 1.5000, lr 1.00e-03, 10 images/s" in plain
    assert "waiting for data 25%, 12 MB" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Display("title", 10, 0) as display:
        assert display.live is not None
        display.step(step=5, **figures)
        display.evaluated("top1 50")
    live = capsys.readouterr().out
    for text in ("title", "step 5/10", "loss 1.5000", "waiting for data 25%", "12 MB", "top1 50"):
        assert text in live


def test_sparkline_falls_with_its_values():
    assert sparkline([]) == ""
    assert sparkline([2, 1, 0]) == "█▄ "
    assert len(sparkline(range(1000), width=50)) == 50
    assert sparkline([0, 0]) == "  "
