"""The detector's parts against torchvision's and against plain versions, and the pyramid under other detectors."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign, roi_align

from pale import cost
from pale.pale_transformer import PALE_T
from pale.recipes import RECIPES, get
from pale.tasks.detection import DetectionModel, Heads, MaskRCNN, feature_pyramid
from pale.tasks.detection.mask_rcnn import (
    Anchors,
    LowQualityMatcher,
    PyramidRoIAlign,
    Sampler,
    batch_images,
    box_losses,
    mask_targets,
)

from .detected import detected

SMALL = Heads(
    width=16, box_width=16, mask_width=8, mask_layers=1, proposals=20, rpn_samples=16, box_samples=8
)
TINY = {"depths": (1, 1, 1, 1), "channels": (8, 16, 16, 16), "heads": (2, 2, 2, 2)}


def small(classes: int = 3, **changes) -> MaskRCNN:
    heads = SMALL.model_copy(update=changes)
    return MaskRCNN(feature_pyramid("pale_nano", width=16, **TINY), classes, heads)


def target(n: int, size: tuple[int, int], seed: int = 0, classes: int = 3) -> dict:
    generator = torch.Generator().manual_seed(seed)
    h, w = size
    corner = torch.rand(n, 2, generator=generator) * torch.tensor([w / 2, h / 2])
    boxes = torch.cat([corner, corner + torch.tensor([w / 3, h / 3])], 1)
    masks = torch.zeros(n, h, w, dtype=torch.uint8)
    for mask, (a, b, c, d) in zip(masks, boxes.int().tolist(), strict=True):
        mask[b:d, a:c] = 1
    labels = torch.randint(1, classes + 1, (n,), generator=generator)
    return {"boxes": boxes, "labels": labels, "masks": masks, "seed": seed}


@pytest.mark.parametrize("name", [n for n in RECIPES if n.startswith("coco.")])
def test_the_model_of_a_recipe_has_the_size_that_the_paper_reports(name):
    recipe = get(name)
    if recipe.reported is None:
        return
    with torch.device("meta"):
        model = recipe.model.build(80, recipe.augment.short)
    params = sum(p.numel() for p in model.parameters()) / 1e6
    assert round(params) == recipe.reported.params_m
    config = model.body.backbone.model.config
    size = (800, 1280)
    total = cost.backbone(config, size, counting="paper") + cost.mask_rcnn(config, size)
    assert total.params == sum(p.numel() for p in model.parameters())
    assert total.macs / 1e9 == pytest.approx(recipe.reported.macs_g, rel=0.02)


def test_the_heads_cost_is_what_pytorchs_counter_counts():
    model = small().eval()
    size = (128, 160)
    maps = model.body(torch.randn(1, 3, *size))
    boxes = [torch.tensor([[4.0, 4, 60, 90]]).repeat(7, 1)]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.rpn.head(list(maps.values()))
        model.roi_heads._boxes(list(maps.values()), boxes)
        model.roi_heads._masks(list(maps.values()), [boxes[0][:5]])
    config = model.body.backbone.model.config
    bill = cost.mask_rcnn(
        config, size, num_classes=3, width=16, box_width=16, mask_layers=1, boxes=7, masks=5
    )
    # Here the mask head is narrower than the pyramid, which the paper's is not.
    wide = bill.macs - bill.under("body.").macs - bill.under("mask.").macs
    mask = 5 * (196 * 16 * 8 * 9 + 196 * 4 * 8 * 8 + 784 * 8 * 4)
    assert counter.get_total_flops() == 2 * (wide + mask)


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("pale_nano", (64, 96), TINY),
        ("pale_nano", (75, 133), TINY),
        ("swin_tiny_patch4_window7_224", (75, 133), {"depths": (1, 1, 1, 1), "embed_dim": 24}),
        ("resnet18", (75, 133), {}),
    ],
    ids=["pale", "pale odd", "swin odd", "resnet odd"],
)
def test_a_pyramid_on_any_backbone_has_five_levels_for_any_size(name, size, options):
    body = feature_pyramid(name, size=64, width=16, **options).eval()
    with torch.no_grad():
        maps = body(torch.randn(2, 3, *size))
    assert list(maps) == ["0", "1", "2", "3", "pool"]
    expected = [(-(-size[0] // s), -(-size[1] // s)) for s in (4, 8, 16, 32)]
    assert [tuple(m.shape[2:]) for m in maps.values()][:4] == expected
    assert all(m.shape[:2] == (2, 16) for m in maps.values())
    assert body.strides == (4, 8, 16, 32, 64)


@pytest.mark.parametrize("kind", ["faster_rcnn", "retinanet", "fcos"])
def test_the_pyramid_serves_torchvisions_other_detectors(kind):
    if kind == "faster_rcnn":
        anchors = AnchorGenerator(((16,), (32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 5)
        body = feature_pyramid("pale_nano", width=16, **TINY)
        model = FasterRCNN(body, 4, rpn_anchor_generator=anchors, min_size=64, max_size=96)
    else:
        body = feature_pyramid("pale_nano", width=32, first=1, extra="p6p7", **TINY)
        made = {"retinanet": RetinaNet, "fcos": FCOS}[kind]
        model = made(body, 4, min_size=64, max_size=96)
    images = [torch.rand(3, 64, 80), torch.rand(3, 70, 64)]
    targets = [target(2, (64, 80)), target(1, (70, 64), 1)]
    losses = model(images, targets)
    sum(losses.values()).backward()
    assert all(torch.isfinite(v) for v in losses.values())
    assert all(p.grad is not None for p in body.parameters())
    with torch.no_grad():
        found = model.eval()(images)
    assert [set(f) >= {"boxes", "labels", "scores"} for f in found] == [True, True]


def test_a_pyramid_needs_a_hierarchical_backbone():
    with pytest.raises(ValueError, match="a feature pyramid needs maps at strides 4, 8, 16 and 32"):
        feature_pyramid("vit_tiny_patch16_224")


def test_anchors_are_mmdetections():
    """Centres on multiples of the stride, sizes 8 strides, not rounded; torchvision's are, and off on P6."""
    anchors = Anchors((4, 8), 8.0)(
        ImageList(torch.zeros(2, 3, 8, 16), [(8, 16)] * 2),
        [torch.zeros(2, 1, 2, 4), torch.zeros(2, 1, 1, 2)],
    )
    assert len(anchors) == 2
    assert anchors[0].shape == (3 * (8 + 2), 4)
    h = 32 * 2**0.5
    first = torch.tensor(
        [[-h / 2, -h / 4, h / 2, h / 4], [-16, -16, 16, 16], [-h / 4, -h / 2, h / 4, h / 2]]
    )
    torch.testing.assert_close(anchors[0][:3], first)
    torch.testing.assert_close(anchors[0][3:6], first + torch.tensor([4.0, 0, 4, 0]))
    torch.testing.assert_close(anchors[0][24:27], 2 * first)


def test_low_quality_matches_begin_at_an_overlap_of_three_tenths():
    overlap = torch.tensor([[0.75, 0.2, 0.1, 0.5], [0.1, 0.25, 0.35, 0.0], [0.0, 0.29, 0.0, 0.1]])
    matches = LowQualityMatcher(0.7, 0.3, allow_low_quality_matches=True)(overlap)
    # Anchor 1 is the best of object 2, but below 0.3; anchor 2 the best of object 1; anchor 3 lies between.
    assert matches.tolist() == [0, -1, 1, -2]


def test_samples_are_drawn_from_each_images_own_seed():
    sampler = Sampler(8, 0.5)
    labels = [torch.randint(-1, 3, (200,)) for _ in range(3)]
    labels[2] = labels[2].clamp(max=0)
    sampler.seeds = [5, 6, 7]
    positive, negative = sampler(labels)
    for p, n, label in zip(positive, negative, labels, strict=True):
        assert int(p.sum()) == min(4, int((label > 0).sum()))
        assert int(p.sum() + n.sum()) == 8
        assert (label[p.bool()] > 0).all()
        assert (label[n.bool()] == 0).all()
    sampler.seeds = [7, 5]
    again = sampler([labels[2], labels[0]])
    assert torch.equal(again[1][0], negative[2])
    assert torch.equal(again[0][1], positive[0])


def test_regions_come_from_the_level_of_their_size_as_in_torchvision():
    maps = [torch.randn(2, 4, 200 // s, 240 // s) for s in (4, 8, 16, 32)]
    boxes = [
        torch.tensor([[3.0, 5, 40, 60], [0, 0, 200, 180]]),
        torch.tensor([[10.0, 20, 160, 110]]),
    ]
    found = PyramidRoIAlign((4, 8, 16, 32), 7)(maps, boxes)
    expected = []
    for i, level, box in ((0, 0, boxes[0][0]), (0, 1, boxes[0][1]), (1, 1, boxes[1][0])):
        region = torch.cat([torch.tensor([float(i)]), box])[None]
        expected.append(
            roi_align(maps[level], region, 7, 1 / (4, 8, 16, 32)[level], 0, aligned=True)
        )
    torch.testing.assert_close(found, torch.cat(expected))
    # torchvision's own pooler, told to sample as densely, differs by its half-pixel offset alone.
    pooler = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 0)
    theirs = pooler({str(i): m for i, m in enumerate(maps)}, boxes, [(200, 240)] * 2)
    shifted = [b + torch.tensor([[2.0], [4.0]])[: len(b)] for b in (boxes[0],)]
    ours = PyramidRoIAlign((4, 8, 16, 32), 7)(maps, [shifted[0], boxes[1] + 4])
    torch.testing.assert_close(ours, theirs)


def test_mask_targets_are_the_part_of_the_mask_in_the_box():
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[1, 10:30, 8:36] = 1
    found = mask_targets(
        masks, torch.tensor([[8.0, 10, 36, 30], [8, 0, 36, 20]]), torch.tensor([1, 1])
    )
    assert found[0].min() == 1
    assert torch.equal(found[1][:13], torch.zeros(13, 28))
    assert torch.equal(found[1][15:], torch.ones(13, 28))


def test_box_losses_are_cross_entropy_and_l1_over_all_samples():
    scores, guesses = torch.randn(5, 3), torch.randn(5, 12)
    labels, codes = torch.tensor([0, 2, 0, 1, 0]), torch.randn(5, 4)
    found = box_losses(scores, guesses, labels, codes)
    assert found["class"].item() == pytest.approx(
        float(torch.nn.functional.cross_entropy(scores, labels))
    )
    box = (guesses[1, 8:] - codes[1]).abs().sum() + (guesses[3, 4:8] - codes[3]).abs().sum()
    assert float(found["box"]) == pytest.approx(float(box) / 5)


@pytest.mark.parametrize("masks", [True, False])
def test_every_parameter_gets_a_gradient_and_every_loss_counts(masks):
    model = small(masks=masks)
    sizes = [(60, 90), (64, 64)]
    images = batch_images([torch.randint(0, 256, (3, *s), dtype=torch.uint8) for s in sizes])
    targets = [target(2, (64, 96)), target(1, (64, 96), 1)]
    losses = model(images, targets)
    names = {"objectness", "proposal", "class", "box"} | ({"mask"} if masks else set())
    assert set(losses) == names
    sum(losses.values()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_images_without_objects_are_learned_from():
    model = small()
    images = batch_images([torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)] * 2)
    empty = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "masks": torch.zeros(0, 64, 64, dtype=torch.uint8),
    }
    losses = model(images, [empty, empty])
    sum(losses.values()).backward()
    assert all(losses[name].item() == 0 for name in ("mask", "box", "proposal"))
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.isfinite(v) for v in losses.values())


def test_padding_and_neighbours_do_not_change_what_is_found():
    """Maps of a backbone see the padding, so an image alone and one beside a larger one differ but little."""
    model = small().eval()
    model.limits(0.0, 0.5, 5)
    image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        alone = model([image])[0]
        twice = model([image, image.flip(2)])[0]
    torch.testing.assert_close(alone["boxes"], twice["boxes"], atol=1e-3, rtol=1e-4)
    assert alone["masks"].shape == (5, 28, 28)
    assert alone["boxes"].min() >= 0
    assert alone["boxes"].max() <= 64


def test_boxes_stay_exact_in_bf16():
    """Decoded in 16 bits, coordinates from 256 on would jump by two pixels and more."""
    model = small()
    images = batch_images([torch.randint(0, 256, (3, 256, 1024), dtype=torch.uint8)])
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, [target(2, (256, 1024))])
        assert all(v.dtype == torch.float32 for v in losses.values())
        sum(losses.values()).backward()
        model.eval().limits(0.0, 0.9, 100)
        with torch.no_grad():
            found = model(images)[0]
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    beyond = found["boxes"][found["boxes"] > 256]
    inner = beyond[beyond < 1020]  # those at the border are whole numbers
    assert len(inner) > 5
    assert (inner.bfloat16().float() != inner).float().mean() > 0.5


def test_weights_of_another_class_count_are_refused_or_lose_their_classifiers(tmp_path):
    from pale import weights as files

    path = tmp_path / "a.safetensors"
    files.save(path, small(5).state_dict(), {})
    with pytest.raises(
        ValueError, match=r"holds weights for 5 classes, the data has 3; set model\.new_head=true"
    ):
        files.put(small(3), files.load(path), path, new_head=False)
    model = small(3)
    files.put(model, files.load(path), path, new_head=True)
    kept = files.load(path).tensors["roi_heads.box_head.fc6.weight"]
    assert torch.equal(model.state_dict()["roi_heads.box_head.fc6.weight"], kept)


def test_the_backbone_starts_from_a_classifier_and_nothing_else_does(tmp_path):
    import timm

    from pale import weights as files

    classifier = timm.create_model("pale_nano", num_classes=7, **TINY)
    files.save(tmp_path / "c.safetensors", classifier.state_dict(), {})
    options = {k: list(v) for k, v in TINY.items()}
    settings = DetectionModel(
        name="pale_nano", options=options, heads=SMALL, init=tmp_path / "c.safetensors"
    )
    model, notes = settings.assemble(3, 64)
    own = model.body.backbone.model.state_dict()
    assert all(torch.equal(own[n], t) for n, t in classifier.state_dict().items() if n in own)
    assert "tensors of the backbone loaded; new: the heads" in notes[0]
    with pytest.raises(ValueError, match="exclude each other"):
        DetectionModel(init=tmp_path / "a", weights=tmp_path / "b")


def test_layer_decay_and_spared_parameters_reach_the_backbone():
    from timm.optim import param_groups_layer_decay

    model = small()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scales = {g["lr_scale"] for g in groups}
    assert max(scales) == 1
    assert min(scales) < 0.2


@pytest.mark.slow
def test_compiled_parts_serve_varying_sizes_without_new_graphs():
    model = small().eval()
    images = [torch.randn(1, 3, *size) for size in ((64, 96), (96, 64), (128, 160), (160, 96))]
    with torch.no_grad():
        expected = [model.body(x)["0"] for x in images]
        torch._dynamo.reset()
        seen = []

        def backend(graph, inputs):
            seen.append(graph)
            return graph.forward

        model.body.compile(dynamic=True, backend=backend)
        graphs = []
        for x, y in zip(images, expected, strict=True):
            torch.testing.assert_close(model.body(x)["0"], y, atol=1e-4, rtol=1e-4)
            graphs.append(len(seen))
    torch._dynamo.reset()
    assert graphs[-1] == graphs[1], graphs  # nothing new after the second size


def test_recipes_model_is_the_papers():
    model = get("coco.mask_rcnn_pale_t").model
    with torch.device("meta"):
        built = model.build(80, 800)
    assert built.roi_heads.detections_per_img == 100
    assert built.rpn.post_nms_top_n() == 1000
    assert PALE_T.channels[-1] == built.body.fpn.inner_blocks[3][0].in_channels
    assert detected().model.heads.masks
