"""UperNet against the heads of transformers, its cost, and on any backbone and size."""

import copy
from dataclasses import replace

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pale
from pale.errors import WeightsError
from pale.model import cost
from pale.model.optimize import fold_norms
from pale.model.pale_transformer import VARIANTS
from pale.recipes import RECIPES, get
from pale.tasks.backbones import init_backbone
from pale.tasks.segmentation.model import FCNHead, SegmentationModel, UperNetHead
from pale.weights.write import save_weights

SMALL = {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]}
CHANNELS = (12, 20, 24, 40)


def small(**settings) -> SegmentationModel:
    return SegmentationModel(name="pale_nano", options=SMALL, width=12, auxiliary=6, **settings)


@pytest.fixture
def maps():
    return [torch.randn(2, c, 33 // 2**i + 1, 26 // 2**i + 1) for i, c in enumerate(CHANNELS)]


def theirs(kind: str):
    upernet = pytest.importorskip(
        "transformers.models.upernet.modeling_upernet", reason="transformers is not installed"
    )
    config = upernet.UperNetConfig(
        hidden_size=16, num_labels=7, auxiliary_channels=10, auxiliary_in_channels=None
    )
    head = getattr(upernet, kind)(config, in_channels=list(CHANNELS))
    generator = torch.Generator().manual_seed(1)
    for tensor in head.state_dict().values():
        if tensor.is_floating_point():  # running variances too: above 0
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.2 * (tensor.ndim > 1))
    return head.eval()


def renamed(state: dict, pairs: list[tuple[str, str]]) -> dict:
    out = {}
    for name, tensor in state.items():
        name = name.replace(".conv.", ".0.").replace(".batch_norm.", ".1.")
        for old, new in pairs:
            name = name.replace(old, new)
        out[name] = tensor
    return out


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_decode_head_equals_transformers(maps, training):
    head = theirs("UperNetHead").train(training)
    ours = UperNetHead(CHANNELS, 16, 7).train(training)
    pairs = [(f"psp_modules.{i}.1.", f"pyramid.cells.{i}.") for i in range(4)]
    pairs += [("fpn_bottleneck", "fuse"), ("lateral_convs", "laterals"), ("fpn_convs", "smooth")]
    state = renamed(head.state_dict(), [*pairs, ("bottleneck", "pyramid.merge")])
    ours.load_state_dict(state)
    expected = head(maps).detach()
    assert expected.std() > 0.01
    torch.testing.assert_close(ours(maps), expected, rtol=1e-5, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_auxiliary_head_equals_transformers(maps, training):
    head = theirs("UperNetFCNHead").train(training)
    ours = FCNHead(CHANNELS[2], 10, 7).train(training)
    ours.load_state_dict(renamed(head.state_dict(), [("convs.0.", "conv.")]))
    torch.testing.assert_close(ours(maps[2]), head(maps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith("ade20k.")])
def test_the_model_of_a_recipe_has_the_size_that_the_paper_reports(name):
    recipe = get(name)
    with torch.device("meta"):
        model = recipe.model.build(150, recipe.augment.crop)
    params = sum(p.numel() for p in model.parameters())
    config = model.backbone.model.config
    width, auxiliary = recipe.model.width, recipe.model.auxiliary
    heads = cost.upernet(config, (512, 2048), width=width, auxiliary=auxiliary)
    assert params == (cost.backbone(config, (512, 2048)) + heads).params
    if recipe.reported is not None:
        assert round(params / 1e6) == recipe.reported.params_m
        macs = (cost.backbone(config, (512, 2048), counting="paper") + heads).macs / 1e9
        assert macs == pytest.approx(recipe.reported.macs_g, rel=0.01)


@pytest.mark.parametrize("size", [(64, 64), (75, 106)], ids=str)
def test_counted_multiply_adds_equal_pytorchs_counter_to_the_digit(size):
    settings = SegmentationModel(name="pale_nano", width=24, auxiliary=8)
    model = settings.build(7, size).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, *size))
    config = replace(VARIANTS["pale_nano"])
    total = cost.backbone(config, size, counting="executed")
    total += cost.upernet(config, size, num_classes=7, width=24, auxiliary=8)
    assert counter.get_total_flops() == 2 * total.macs


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (97, 21), (5, 3)], ids=str)
def test_any_size_gives_logits_at_a_quarter(size):
    model = small().build(5, 64).eval()
    with torch.no_grad():
        logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5, -(-size[0] // 4), -(-size[1] // 4))
    assert logits.isfinite().all()


def test_training_gives_both_heads_and_every_parameter_a_gradient():
    model = small(drop_path=0.1).build(5, 64).train()
    logits, auxiliary = model(torch.randn(2, 3, 40, 52))
    assert logits.shape == (2, 5, 10, 13)
    assert auxiliary.shape == (2, 5, 3, 4)
    (logits.square().mean() + auxiliary.square().mean()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_dropped_channels_do_not_reach_the_classifiers():
    model = small().build(5, 64).train()
    logits, auxiliary = model(torch.randn(2, 3, 40, 52), torch.zeros(2, 18))
    for head, out in ((model.decode, logits), (model.auxiliary, auxiliary)):
        assert torch.equal(out, head.classifier.bias[:, None, None].expand_as(out))


@torch.no_grad()
def test_an_optimized_segmenter_gives_the_same_without_batch_norms():
    model = SegmentationModel(name="pale_nano", width=16, auxiliary=0).build(5, 64).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for value in (module.running_mean, module.running_var, module.weight, module.bias):
                value.uniform_(0.5, 1.5)
    x = torch.randn(1, 3, 45, 70)
    quick = pale.optimize(model, torch.float32)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in quick.modules())
    torch.testing.assert_close(quick(x), model(x), rtol=1e-4, atol=1e-4)


class NormFirst(torch.nn.Sequential):
    """Its forward pass does not follow the order of its layers."""

    def forward(self, x):
        return self[0](self[1](x))


@torch.no_grad()
def test_only_norms_that_follow_a_convolution_are_folded():
    conv, norm = torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3)
    norm.running_mean.fill_(2.0)
    model = torch.nn.ModuleDict(
        {
            "own": NormFirst(conv, norm),
            "untracked": torch.nn.Sequential(
                torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3, track_running_stats=False)
            ),
            "later": torch.nn.Sequential(
                torch.nn.ReLU(), torch.nn.Conv2d(3, 3, 1), copy.copy(norm)
            ),
        }
    ).eval()
    x = torch.randn(2, 3, 4, 4)
    before = {name: module(x) for name, module in model.items()}
    fold_norms(model)
    for name, module in model.items():
        torch.testing.assert_close(module(x), before[name])
    kinds = {name: torch.nn.BatchNorm2d in map(type, m.children()) for name, m in model.items()}
    assert kinds == {"own": True, "untracked": True, "later": False}


def test_checkpointing_changes_nothing():
    torch.manual_seed(0)
    plain = small().build(5, 64)
    again = small(checkpointing=True).build(5, 64)
    again.load_state_dict(plain.state_dict())
    assert again.backbone.model.grad_checkpointing
    x, found = torch.randn(2, 3, 48, 48), []
    for model in (plain, again):
        calls = []
        block = model.backbone.model.stages[0].blocks[0]
        block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        logits, auxiliary = model.train()(x)
        loss = logits.square().mean() + auxiliary.square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((loss.detach(), *gradients))
        assert len(calls) == (1 if model is plain else 2)  # once more in the backward pass
    torch.testing.assert_close(found[0], found[1])


PEERS = {
    "swin_tiny_patch4_window7_224": {
        "depths": [1, 1, 1, 1],
        "embed_dim": 12,
        "num_heads": [1, 1, 2, 2],
    },
    "convnext_atto": {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]},
    "resnet18": {"layers": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("name", PEERS)
def test_timm_backbones_accept_any_size_and_start_from_their_classifiers(name, tmp_path):
    options = PEERS[name]
    sized = {"img_size": 64} if name.startswith("swin") else {}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    classifier = timm.create_model(name, num_classes=3, **given, **sized)
    save_weights(tmp_path / "c.safetensors", classifier.state_dict(), {})
    settings = SegmentationModel(
        name=name, options=options, width=8, auxiliary=4, init=tmp_path / "c.safetensors"
    )
    model, notes = settings.assemble(4, (96, 128))
    own = model.backbone.model.state_dict()
    assert f"{len(own)} of {len(own)} tensors of the backbone loaded" in notes[0]
    first = next(n for n in own if n.endswith("weight") and own[n].ndim == 4)
    assert torch.equal(own[first], classifier.state_dict()[first])
    model.eval()
    for h, w in ((96, 128), (65, 33), (30, 201)):
        with torch.no_grad():
            assert model(torch.randn(1, 3, h, w)).shape == (1, 4, -(-h // 4), -(-w // 4))


def test_a_flat_backbone_is_refused():
    with pytest.raises(ValueError, match="UperNet needs maps at strides 4, 8, 16 and 32"):
        SegmentationModel(name="pale_nano", stem_stride=2).build(3, 64)
    with pytest.raises(ValueError, match=r"got 'pale_tinny'; did you mean pale_tiny"):
        SegmentationModel(name="pale_tinny").build(3, 64)


def test_init_reports_what_was_loaded_what_is_new_and_what_did_not_fit(tmp_path):
    classifier = pale.create_model(
        "pale_nano", num_classes=9, **{k: tuple(v) for k, v in SMALL.items()}
    )
    state = classifier.state_dict()
    state["stages.0.merge.conv.weight"] = torch.zeros(9, 3, 7, 7)
    del state["stages.1.blocks.0.cpe.weight"]
    path = tmp_path / "c.safetensors"
    save_weights(path, state, {})
    model = small().build(4, 64)
    before = model.backbone.model.stages[0].merge.conv.weight.clone()
    note = init_backbone(model, path)
    count = len(model.backbone.model.state_dict())
    assert f"{count - 2} of {count} tensors of the backbone loaded" in note
    assert "new: the heads" in note
    assert "stages.1.blocks.0.cpe.weight" in note
    assert "did not fit: stages.0.merge.conv.weight" in note
    assert "not used: head.fc.bias, head.fc.weight, norm.bias and 1 more" in note
    assert torch.equal(model.backbone.model.stages[0].merge.conv.weight, before)
    key = "stages.2.blocks.0.mlp.fc1.weight"
    assert torch.equal(model.backbone.model.state_dict()[key], state[key])


def test_init_with_nan_is_an_error(tmp_path):
    state = pale.create_model(
        "pale_nano", num_classes=9, **{k: tuple(v) for k, v in SMALL.items()}
    ).state_dict()
    state["stages.1.blocks.0.norm1.weight"][2] = torch.nan
    path = tmp_path / "c.safetensors"
    save_weights(path, state, {})
    model = small().build(4, 64)
    with pytest.raises(WeightsError, match=r"NaN or Inf in stages\.1\.blocks\.0\.norm1\.weight"):
        init_backbone(model, path)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_init_from_something_else_is_an_error(tmp_path):
    path = tmp_path / "r.safetensors"
    save_weights(path, timm.create_model("resnet18", num_classes=2).state_dict(), {})
    with pytest.raises(ValueError, match="does not fit this backbone: 0 of its"):
        small(init=path).build(4, 64)
    with pytest.raises(ValueError, match="exclude each other"):
        small(init=path, weights=path)


def test_a_segmenter_for_other_classes_keeps_all_but_its_classifiers(tmp_path):
    old = small().build(4, 64)
    path = tmp_path / "s.safetensors"
    save_weights(path, old.state_dict(), {})
    with pytest.raises(ValueError, match="weights for 4 classes, the data has 6"):
        small(weights=path).build(6, 64)
    new = small(weights=path, new_head=True).build(6, 64)
    assert torch.equal(new.decode.fuse[0].weight, old.decode.fuse[0].weight)
    assert new.decode.classifier.weight.shape[0] == new.auxiliary.classifier.weight.shape[0] == 6


def test_ape_maps_are_resized_while_the_backbone_starts_from_a_classifier(tmp_path):
    options = {k: tuple(v) for k, v in SMALL.items()}
    classifier = pale.create_model("pale_nano", position="ape", img_size=32, **options)
    path = tmp_path / "c.safetensors"
    save_weights(path, classifier.state_dict(), {})
    model = small(position="ape", init=path).build(3, (64, 96))
    assert model.backbone.model.stages[0].ape.map.shape[1:3] == (16, 24)


def test_layer_decay_reaches_the_backbone_and_spares_the_heads():
    from timm.optim import param_groups_layer_decay

    model = small().build(3, 64)
    groups = param_groups_layer_decay(model, 0.05, layer_decay=0.5)
    scale = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    stem = scale[id(model.backbone.model.stages[0].merge.conv.weight)]
    last = scale[id(model.backbone.model.stages[3].blocks[0].mlp.fc1.weight)]
    head = scale[id(model.decode.classifier.weight)]
    assert stem < last < head == 1
