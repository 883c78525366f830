"""Drop path, optimizer, schedule, moving average and display, against timm or the formula."""

import copy
import math
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from timm.layers import DropPath
from timm.layers.drop import drop_path
from timm.optim import param_groups_weight_decay
from timm.optim.muon import zeropower_via_newtonschulz

import pale
from pale.data.stream import shard_positions
from pale.recipes import get
from pale.train.drop_path import DropPaths, SampledDropPath
from pale.train.log import Display, Log, read, sparkline
from pale.train.optim import make_optimizer, make_schedule


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
    assert len(whole.masks) == 2 * (sum(pale.model.pale_transformer.PALE_NANO.depths) - 1)
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
    groups = make_optimizer(model, get("imagenet.pale_t")).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = parameter.ndim <= 1 or name.endswith("ape.map")
        assert decay[id(parameter)] == (0 if spared else 0.05), name


def test_layer_decay_makes_early_blocks_slow_and_the_head_fast():
    model = nano()
    recipe = get("finetune.pale_t")
    adam = make_optimizer(model, recipe)
    make_schedule(adam, recipe, 100, 256 * 10).step_update(50)
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
    adam = make_optimizer(nano(), recipe)
    plan = make_schedule(adam, recipe, steps=100, samples=1024 * 10)
    rates = []
    for step in range(100):
        plan.step_update(step)
        rates.append(adam.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(1e-6)
    assert rates[10] == pytest.approx(1e-6 + (1e-3 - 1e-6) / 2)
    for step in (20, 50, 99):
        cosine = 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * step / 100))
        assert rates[step] == pytest.approx(cosine)


def test_a_resumed_log_drops_later_events(tmp_path):
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


def gradients(model, seed):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def in_float32(*args, dtype=None, **kwargs):
    return zeropower_via_newtonschulz(*args, dtype=torch.float32, **kwargs)


@pytest.mark.parametrize("name", ["pale_nano", "resnet10t", "swin_tiny_patch4_window7_224"])
def test_muon_equals_timms_on_matrices_and_adamw_elsewhere(name):
    options = {"img_size": 64, "depths": (2, 1, 1, 1)} if name.startswith("swin") else {}
    models = [timm.create_model(name, num_classes=10, **options) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    recipe = get("imagenet.pale_t").override({"optim.name": "muon", "optim.eps": 1e-7})
    ours = make_optimizer(models[0], recipe)
    tables = getattr(models[0], "no_weight_decay", set)()
    groups = param_groups_weight_decay(models[1], 0.05, no_weight_decay_list=tables)
    timms = timm.optim.Muon(
        groups, recipe.peak_lr, nesterov=True, ns_coefficients="original", eps=1e-7
    )
    adamw = make_optimizer(models[2], recipe.override({"optim.name": "adamw"}))
    with mock.patch("timm.optim.muon.zeropower_via_newtonschulz", in_float32):
        for seed in range(3):
            for model, each in zip(models, (ours, timms, adamw), strict=True):
                gradients(model, seed)
                each.step()
    parameters = [dict(model.named_parameters()) for model in models]
    turned = {label for label, p in parameters[0].items() if "momentum" in ours.state[p]}
    assert {label for label, p in parameters[0].items() if p.ndim == 4 and p.shape[1] > 1} <= turned
    assert not turned & set(tables)
    for label, parameter in parameters[0].items():
        expected = parameters[1 if label in turned else 2][label]
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=2e-6, msg=label)


def test_muon_skips_a_step_and_resumes_from_its_state():
    recipe = get("small_data.pale_t").override({"optim.name": "muon"})
    model, twin = nano(), nano()
    ours = make_optimizer(model, recipe)
    gradients(model, 0)
    ours.step()
    before = copy.deepcopy([model.state_dict(), ours.state_dict()])
    ours.found_inf = torch.ones(())
    gradients(model, 1)
    for parameter in model.parameters():
        parameter.grad[0] = math.nan
    ours.step()
    torch.testing.assert_close(
        [model.state_dict(), ours.state_dict()["state"]],
        [before[0], before[1]["state"]],
        rtol=0,
        atol=0,
    )
    twin.load_state_dict(before[0])
    other = make_optimizer(twin, recipe)
    other.load_state_dict(before[1])
    ours.found_inf = torch.zeros(())
    for each, adam in ((model, ours), (twin, other)):
        gradients(each, 2)
        adam.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def test_muon_refuses_shards():
    with pytest.raises(ValueError, match="needs whole matrices, got parallel=fsdp"):
        get("small_data.pale_t").override({"optim.name": "muon", "parallel": "fsdp"})
