"""Mask R-CNN with outputs of a fixed size finds the same objects as Mask R-CNN."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recipes import detection_recipe
from torch import nn

from pale.data.transforms.images import normalise
from pale.tasks.detection.fixed import FixedMaskRCNN
from pale.tasks.detection.model import MaskRCNN


def detector(seed: int = 0, **changes) -> MaskRCNN:
    """Weights with distinct outputs for distinct images, and objects of high and low scores."""
    torch.manual_seed(seed)
    model = detection_recipe(**changes).model.build(8, 48).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.data.mul_(2)
    nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.5)
    nn.init.normal_(model.roi_heads.box_predictor.bbox_pred.weight, std=0.3)
    return model


@settings(max_examples=12, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    most=st.sampled_from([1, 7, 100]),
    score=st.sampled_from([0.0, 0.1, 0.3, 0.9]),
    seed=st.integers(0, 99),
)
def test_the_fixed_detector_finds_the_same_objects(height, width, most, score, seed):
    model = detector(seed % 3)
    model.set_thresholds(score, 0.5, most)
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    with torch.no_grad():
        wanted = model([image])[0]
        boxes, scores, labels, masks = FixedMaskRCNN(model)(normalise(image[None]))
    count = len(wanted["scores"])
    assert int((scores > 0).sum()) == count
    assert not scores[count:].any()
    assert not labels[count:].any()
    assert not boxes[count:].any()
    torch.testing.assert_close(scores[:count], wanted["scores"])
    # Equal scores may change places.
    clear = torch.ones(count, dtype=torch.bool)
    clear[1:] &= (wanted["scores"][1:] - wanted["scores"][:-1]).abs() > 1e-6
    clear[:-1] &= clear[1:].clone()
    clear[most - 1 :] = False  # the next one, left out, may be equal
    torch.testing.assert_close(boxes[:count][clear], wanted["boxes"][clear], rtol=1e-4, atol=1e-3)
    assert torch.equal(labels[:count][clear], wanted["labels"][clear])
    torch.testing.assert_close(masks[:count][clear], wanted["masks"][clear], rtol=1e-3, atol=1e-3)


def test_a_detector_without_masks_returns_none():
    model = detector(model__heads__masks=False)
    with torch.no_grad():
        found = FixedMaskRCNN(model)(torch.randn(1, 3, 40, 60))
    assert [tuple(x.shape) for x in found] == [(100, 4), (100,), (100,)]


def test_several_objects_are_found_so_that_the_tests_above_can_fail():
    model = detector()
    model.set_thresholds(0.1, 0.5, 100)
    with torch.no_grad():
        _, scores, labels, _ = FixedMaskRCNN(model)(torch.randn(1, 3, 96, 130))
    assert int((scores > 0).sum()) > 5
    assert len(set(labels[scores > 0].tolist())) > 1
    assert float(scores.max()) != pytest.approx(float(scores[scores > 0].min()), abs=1e-3)
