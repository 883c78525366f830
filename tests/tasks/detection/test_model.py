"""The parts of the detector against torchvision and plain implementations, and the pyramid in other detectors."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.recipes import detection_recipe
from torch import Tensor
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, box_iou, roi_align
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import pale
from pale.model.pale_transformer import PALE_T
from pale.predict.bundle import load
from pale.recipes import get
from pale.tasks.detection.loss import box_losses, mask_targets
from pale.tasks.detection.model import (
    Anchors,
    DetectionModel,
    Heads,
    MaskRCNN,
    PyramidRoIAlign,
    batch_images,
    numbered,
)
from pale.tasks.detection.pyramid import LastLevelSlice, feature_pyramid
from pale.tasks.detection.targets import (
    Objects,
    match_anchors,
    match_regions,
    random_keys,
    sample_candidates,
)

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
def test_the_pyramid_works_in_other_torchvision_detectors(kind):
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


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_an_optimized_detector_finds_the_same(device):
    model = small().to(device)
    images = [torch.randint(0, 256, (3, 64, 80), dtype=torch.uint8, device=device)]
    quick = pale.optimize(model, torch.float32, cuda_graph=device == "cuda")
    assert model.training
    with torch.no_grad():
        wanted = model.eval()(images)[0]
        for _ in range(2):
            found = quick(images)[0]
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)
    half = pale.optimize(model)
    maps = half.body(torch.randn(1, 3, 64, 96, device=device))
    assert {m.dtype for m in maps.values()} == {torch.float32}
    assert {p.dtype for p in half.body.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_an_optimized_pyramid_works_in_torchvision_detectors_on_any_backbone():
    images = [torch.rand(3, 64, 80)]
    body = feature_pyramid("pale_nano", width=16, **TINY)
    anchors = AnchorGenerator(((16,), (32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 5)
    model = FasterRCNN(body, 4, rpn_anchor_generator=anchors, min_size=64, max_size=96).eval()
    found, wanted = pale.optimize(model, torch.float32)(images)[0], model(images)[0]
    torch.testing.assert_close(found["boxes"], wanted["boxes"], rtol=1e-3, atol=1e-3)
    assert pale.optimize(model)(images)[0].keys() == wanted.keys()
    net = torch.nn.Sequential()
    net.add_module("body", pale.create_model("pale_nano", num_classes=6, **TINY))
    net.add_module("head", torch.nn.Linear(6, 2))
    assert pale.optimize(net)(torch.randn(1, 3, 32, 32).bfloat16()).dtype == torch.bfloat16


def test_a_pyramid_needs_a_hierarchical_backbone():
    with pytest.raises(ValueError, match="a feature pyramid needs maps at strides 4, 8, 16 and 32"):
        feature_pyramid("vit_tiny_patch16_224")


def test_anchors_equal_mmdetection():
    """Centres are multiples of the stride and sizes 8 strides, unrounded; torchvision rounds, and is off on P6."""
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


def crowd(*counts: int, side: float = 96.0) -> list[dict]:
    """Return targets with so many boxes of all sizes."""
    found = []
    for seed, n in enumerate(counts):
        corners = side * torch.rand(n, 2)
        size = (side - corners) * torch.rand(n, 2).clamp(min=0.1)
        labels = torch.randint(1, 4, (n,))
        found.append(
            {"boxes": torch.cat([corners, corners + size], 1), "labels": labels, "seed": 17 * seed}
        )
    return found


class LowQualityMatcher(Matcher):
    """As in torchvision, but the best anchors of an object are matched only from an IoU of 0.3 on."""

    def set_low_quality_matches_(self, matches, all_matches, match_quality_matrix):
        best = match_quality_matrix.max(1, keepdim=True).values
        taken = ((match_quality_matrix == best) & (best >= 0.3)).any(0)
        matches[taken] = all_matches[taken]


@pytest.mark.parametrize("most", [2**25, 1])
def test_anchors_are_matched_as_in_torchvision(most, monkeypatch):
    monkeypatch.setattr("pale.tasks.detection.targets.MAX_OVERLAPS", most)
    anchors = Anchors((4, 8, 16), 4.0)(
        ImageList(torch.zeros(1, 3, 96, 96), [(96, 96)]),
        [torch.zeros(1, 1, 96 // s, 96 // s) for s in (4, 8, 16)],
    )[0]
    targets = crowd(3, 0, 7, 1)
    rpn = small().rpn
    rpn.proposal_matcher = LowQualityMatcher(0.7, 0.3, allow_low_quality_matches=True)
    labels, boxes = RegionProposalNetwork.assign_targets_to_anchors(rpn, [anchors] * 4, targets)
    found_labels, found_boxes = match_anchors(Objects.of(targets, anchors.device), anchors)
    assert torch.equal(found_labels, torch.stack(labels))
    assert {-1.0, 0.0, 1.0} == set(found_labels.flatten().tolist())
    # An anchor without an object has whatever box.
    with_one = found_labels == 1
    assert torch.equal(found_boxes[with_one], torch.stack(boxes)[with_one])


def test_low_quality_matches_begin_at_an_overlap_of_three_tenths():
    objects = Objects.of(
        [{"boxes": torch.tensor([[0.0, 0, 10, 10]]), "labels": torch.ones(1)}], torch.device("cpu")
    )

    def label(*sides: float) -> list[float]:
        anchors = torch.tensor([[0.0, 0, 10, side] for side in sides])
        return match_anchors(objects, anchors)[0][0].tolist()

    assert label(2.5, 2.9) == [0, 0]  # the best one, but below
    assert label(2.5, 3.1) == [0, 1]
    assert label(3.1, 6.9) == [-1, 1]
    assert label(6.9, 7.1) == [-1, 1]
    assert label(6.9, 6.9) == [1, 1]


def test_regions_are_matched_as_in_torchvision():
    targets = crowd(3, 0, 7, 1)
    # The second part overlaps the objects.
    regions = [
        torch.cat([t["boxes"], target["boxes"] + 0.5])
        for t, target in zip(crowd(50, 20, 31, 1), targets, strict=True)
    ]
    counts = [len(boxes) for boxes in regions]
    heads = small().roi_heads
    which, labels = RoIHeads.assign_targets_to_proposals(
        heads, regions, [t["boxes"] for t in targets], [t["labels"] for t in targets]
    )
    padded = torch.nn.utils.rnn.pad_sequence(regions, batch_first=True)
    known = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    found, numbers = match_regions(Objects.of(targets, padded.device), padded, known)
    assert any((each > 0).any() for each in labels)
    for i, n in enumerate(counts):
        assert torch.equal(found[i, :n], labels[i])
        assert (found[i, n:] == -1).all()
        assert torch.equal(numbers[i, :n][labels[i] > 0], which[i][labels[i] > 0])


def test_samples_depend_on_the_seed_of_their_image():
    labels = torch.randint(-1, 3, (3, 200))
    labels[2] = labels[2].clamp(max=0)
    seeds, places = torch.tensor([5, 6, 2**62 + 7]), torch.arange(200).expand(3, -1)
    positive, negative = sample_candidates(labels, random_keys(seeds, places), 8, 0.5)
    for p, n, label in zip(positive, negative, labels, strict=True):
        assert int(p.sum()) == min(4, int((label > 0).sum()))
        assert int(p.sum() + n.sum()) == 8
        assert (label[p] > 0).all()
        assert (label[n] == 0).all()
    # Other neighbours, and more places that are nobody's.
    other = torch.full((2, 230), -1)
    other[:, :200] = labels[[2, 0]]
    again = sample_candidates(
        other, random_keys(seeds[[2, 0]], torch.arange(230).expand(2, -1)), 8, 0.5
    )
    assert torch.equal(again[1][0, :200], negative[2])
    assert torch.equal(again[0][1, :200], positive[0])
    # Few candidates are all drawn, none where none is asked for.
    few = torch.tensor([[1, 0, 0, -1]])
    positive, negative = sample_candidates(few, random_keys(None, torch.arange(4)[None]), 8, 0.5)
    assert positive.tolist() == [[True, False, False, False]]
    assert negative.tolist() == [[False, True, True, False]]
    assert not sample_candidates(few, random_keys(None, torch.arange(4)[None]), 8, 0.0)[0].any()


def test_every_candidate_is_drawn_equally_often():
    count = torch.zeros(40)
    labels, places = torch.zeros(500, 40), torch.arange(40).expand(500, -1)
    for first in (0, 500):
        count += sample_candidates(
            labels, random_keys(torch.arange(first, first + 500), places), 10, 0.5
        )[1].sum(0)
    # 250 times each; the deviation of a binomial is 13.7.
    assert (count - 250).abs().max() < 55


def test_sampling_of_regions_does_not_depend_on_other_images():
    heads = small(box_samples=6).roi_heads.train()
    targets, regions = crowd(3, 7), [t["boxes"] for t in crowd(40, 90)]
    together = heads.sample(regions, Objects.of(targets, torch.device("cpu")))
    mine = together[0][:, 0] == 0
    alone = heads.sample(regions[:1], Objects.of(targets[:1], torch.device("cpu")))
    assert len(alone[0]) == 6
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a, b[mine])


def test_proposals_equal_torchvision():
    rpn = small(proposals=30).rpn
    boxes = torch.stack([t["boxes"] for t in crowd(120, 120)]) - 10
    boxes[0, 5] = boxes[1, 7] = torch.tensor([120.0, 3, 130, 9])  # outside: nothing is left of it
    scores = torch.randn(2, 120)
    scores[0, 5] = 9.0
    args = [(96, 90), (80, 96)], [80, 30, 10]
    for training in (True, False):
        rpn.train(training)
        found = rpn.filter_proposals(boxes, scores, *args)
        theirs = RegionProposalNetwork.filter_proposals(rpn, boxes, scores, *args)
        for ours, expected in zip(found, theirs, strict=True):
            assert [len(x) for x in ours] == [len(x) for x in expected]
            torch.testing.assert_close(torch.cat(ours), torch.cat(expected))


def test_losses_of_proposals_are_those_of_the_sampled_anchors():
    """Against torchvision's targets, with all anchors sampled, so that nothing is random."""
    rpn = small(rpn_samples=10**6).rpn
    anchors = Anchors((8, 16), 4.0)(
        ImageList(torch.zeros(1, 3, 96, 96), [(96, 96)]),
        [torch.zeros(1, 1, 96 // s, 96 // s) for s in (8, 16)],
    )[0]
    targets = crowd(3, 0, 5)
    scores, codes = torch.randn(3, len(anchors)), torch.randn(3, len(anchors), 4).requires_grad_()
    found = rpn.losses(scores, codes, anchors, Objects.of(targets, anchors.device))
    rpn.proposal_matcher = LowQualityMatcher(0.7, 0.3, allow_low_quality_matches=True)
    labels, boxes = RegionProposalNetwork.assign_targets_to_anchors(rpn, [anchors] * 3, targets)
    wanted = torch.stack(rpn.box_coder.encode(boxes, [anchors] * 3))
    labels = torch.stack(labels)
    count = (labels >= 0).sum()
    every = torch.nn.functional.binary_cross_entropy_with_logits(
        scores[labels >= 0], labels[labels >= 0]
    )
    box = (codes - wanted)[labels == 1].abs().sum() / count
    torch.testing.assert_close(found["objectness"], every)
    torch.testing.assert_close(found["proposal"], box)
    found["proposal"].backward()
    assert codes.grad.isfinite().all()
    assert ((codes.grad != 0).all(2) == (labels == 1)).all()


def test_regions_come_from_the_level_of_their_size_as_in_torchvision():
    maps = [torch.randn(2, 4, 200 // s, 240 // s) for s in (4, 8, 16, 32)]
    boxes = [
        torch.tensor([[3.0, 5, 40, 60], [0, 0, 200, 180]]),
        torch.tensor([[10.0, 20, 160, 110]]),
    ]
    found = PyramidRoIAlign((4, 8, 16, 32), 7)(maps, numbered(boxes))
    expected = []
    for i, level, box in ((0, 0, boxes[0][0]), (0, 1, boxes[0][1]), (1, 1, boxes[1][0])):
        region = torch.cat([torch.tensor([float(i)]), box])[None]
        expected.append(
            roi_align(maps[level], region, 7, 1 / (4, 8, 16, 32)[level], 0, aligned=True)
        )
    torch.testing.assert_close(found, torch.cat(expected))
    # torchvision's pooler with the same sampling differs only by its half-pixel offset.
    pooler = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 0)
    theirs = pooler({str(i): m for i, m in enumerate(maps)}, boxes, [(200, 240)] * 2)
    shifted = [b + torch.tensor([[2.0], [4.0]])[: len(b)] for b in (boxes[0],)]
    ours = PyramidRoIAlign((4, 8, 16, 32), 7)(maps, numbered([shifted[0], boxes[1] + 4]))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("limit", [2**27, 1])
def test_mask_targets_are_the_part_of_the_mask_in_the_box(limit, monkeypatch):
    monkeypatch.setattr("pale.tasks.detection.loss.MAX_PIXELS", limit)
    masks = torch.zeros(2, 40, 40, dtype=torch.uint8)
    masks[1, 10:30, 8:36] = 1
    none, other = torch.zeros(0, 40, 40, dtype=torch.uint8), masks[1:, :32, :38]
    boxes = torch.tensor([[8.0, 10, 36, 30], [8, 0, 36, 20]])
    regions = numbered([boxes[:1], boxes[:0], boxes])
    found = mask_targets([masks, none, other], regions, torch.tensor([1, 0, 0]))
    assert found[0].min() == found[1].min() == 1
    assert torch.equal(found[2][:13], torch.zeros(13, 28))
    assert torch.equal(found[2][15:], torch.ones(13, 28))


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


def test_training_without_targets_is_refused():
    with pytest.raises(ValueError, match=r"needs targets; for detections, call eval\(\)"):
        small()([torch.zeros(3, 64, 64, dtype=torch.uint8)])


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


@pytest.fixture(scope="module")
def pets_and_photo() -> tuple[MaskRCNN, Tensor]:
    """Return the included detector and the photo of a cat, (3, 160, 241), whose width is not a multiple of 32."""
    with Image.open(resources.files("pale") / "view/pages/cat.jpg") as photo:
        small_photo = photo.convert("RGB").resize((241, 160))
    image = torch.from_numpy(np.array(small_photo)).permute(2, 0, 1).contiguous()
    return load(Path("detect_pets")).model.eval(), image


# Shape of the neighbour, and the least overlap of the cat's box then and when the photo is alone: maps of a backbone
# see the padding. It is up to 72 % of the place of the photo.
NEIGHBOURS = {
    "a little larger": ((161, 242), 0.9),
    "wider": ((160, 320), 0.85),
    "higher": ((320, 160), 0.8),
    "larger": ((320, 400), 0.75),
}


@torch.no_grad()
@pytest.mark.parametrize(("shape", "overlap"), NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_padding_changes_boxes_slightly_and_other_images_do_not(pets_and_photo, shape, overlap):
    model, image = pets_and_photo
    _, h, w = image.shape
    noise = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    assert batch_images([image, noise]).tensors.shape[2:] > (h, w)
    alone = model([image])[0]
    beside = model([image, noise])[0]
    for other in (model([image, torch.zeros_like(noise)])[0], model([noise, image])[1]):
        assert torch.equal(other["labels"], beside["labels"])
        for name in ("boxes", "scores", "masks"):
            torch.testing.assert_close(other[name], beside[name], atol=1e-4, rtol=1e-4)
    assert beside["scores"][0] == pytest.approx(alone["scores"][0].item(), abs=0.1)
    assert alone["scores"][0] > 0.9
    assert beside["labels"][0] == alone["labels"][0]
    assert box_iou(alone["boxes"][:1], beside["boxes"][:1]).item() > overlap
    # None reaches into the padding.
    assert beside["boxes"].min() >= 0
    assert (beside["boxes"] <= torch.tensor([w, h, w, h])).all()


@torch.no_grad()
def test_as_many_objects_are_found_as_are_asked_for():
    model = small().eval()
    model.set_thresholds(0.0, 0.5, 5)
    found = model([torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)])[0]
    assert found["masks"].shape == (5, 28, 28)
    assert found["boxes"].shape == (5, 4)


def test_boxes_stay_exact_in_bf16():
    """Decoded in 16 bits, coordinates from 256 on would be rounded to two pixels or more."""
    model = small()
    images = batch_images([torch.randint(0, 256, (3, 256, 1024), dtype=torch.uint8)])
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, [target(2, (256, 1024))])
        assert all(v.dtype == torch.float32 for v in losses.values())
        sum(losses.values()).backward()
        model.eval().set_thresholds(0.0, 0.9, 100)
        with torch.no_grad():
            found = model(images)[0]
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    beyond = found["boxes"][found["boxes"] > 256]
    inner = beyond[beyond < 1020]  # those at the border are whole numbers
    assert len(inner) > 5
    assert (inner.bfloat16().float() != inner).float().mean() > 0.5


def test_weights_of_another_class_count_are_refused_or_lose_their_classifiers(tmp_path):
    from pale.weights.compare import load_into
    from pale.weights.read import load_weights
    from pale.weights.write import save_weights

    path = tmp_path / "a.safetensors"
    save_weights(path, small(5).state_dict(), {})
    with pytest.raises(
        ValueError, match=r"holds weights for 5 classes, the data has 3; set model\.new_head=true"
    ):
        load_into(small(3), load_weights(path), path, new_head=False)
    model = small(3)
    load_into(model, load_weights(path), path, new_head=True)
    kept = load_weights(path).tensors["roi_heads.box_head.fc6.weight"]
    assert torch.equal(model.state_dict()["roi_heads.box_head.fc6.weight"], kept)


def test_only_the_backbone_starts_from_a_classifier(tmp_path):
    import timm

    from pale.weights.write import save_weights

    classifier = timm.create_model("pale_nano", num_classes=7, **TINY)
    save_weights(tmp_path / "c.safetensors", classifier.state_dict(), {})
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


def test_layer_decay_and_weight_decay_exemptions_reach_the_backbone():
    from timm.optim import param_groups_layer_decay

    model = small()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    scales = {g["lr_scale"] for g in groups}
    assert max(scales) == 1
    assert min(scales) < 0.2


@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 4), (5, 2), (6, 7)])
def test_the_last_level_equals_torchvision_also_when_compiled(monkeypatch, h, w):
    maps = [torch.randn(2, 4, 2 * h, 2 * w), torch.randn(2, 4, h, w)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        ours, names = LastLevelSlice()(list(maps), maps, ["0", "1"])
    theirs, expected = LastLevelMaxPool()(list(maps), maps, ["0", "1"])
    assert names == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_compiled_parts_accept_varying_sizes_without_recompiling():
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


def test_the_model_of_the_recipe_is_that_of_the_paper():
    model = get("coco.mask_rcnn_pale_t").model
    with torch.device("meta"):
        built = model.build(80, 800)
    assert built.roi_heads.detections_per_img == 100
    assert built.rpn.post_nms_top_n() == 1000
    assert PALE_T.channels[-1] == built.body.fpn.inner_blocks[3][0].in_channels
    assert detection_recipe().model.heads.masks
