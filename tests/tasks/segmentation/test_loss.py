import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pale.data.sources.class_list import IGNORED
from pale.tasks.segmentation.loss import (
    Loss,
    balanced,
    dice_loss,
    keep_masks,
    ohem_weights,
    pixel_loss,
)


@pytest.fixture
def case():
    logits = torch.randn(2, 5, 6, 7)
    masks = torch.randint(0, 5, (2, 24, 28)).to(torch.uint8)
    masks[0, :6] = IGNORED
    return logits, masks


def resized(logits, masks):
    return F.interpolate(logits, masks.shape[-2:], mode="bilinear", align_corners=False)


def test_the_loss_is_cross_entropy_over_all_pixels_as_mmsegmentation_divides(case):
    logits, masks = case
    total = F.cross_entropy(resized(logits, masks), masks.long(), ignore_index=255, reduction="sum")
    torch.testing.assert_close(pixel_loss(logits, masks, Loss(), None), total / masks.numel())


def test_halves_of_a_batch_average_to_the_whole(case):
    logits, masks = case
    for loss in (Loss(), Loss(dice=0.5), Loss(ohem=0.3, ohem_keep=50)):
        whole = pixel_loss(logits, masks, loss, None)
        halves = [pixel_loss(logits[i : i + 1], masks[i : i + 1], loss, None) for i in range(2)]
        torch.testing.assert_close(whole, sum(halves) / 2)


def test_a_batch_without_labels_costs_nothing_and_has_a_gradient():
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    masks = torch.full((1, 16, 16), IGNORED, dtype=torch.uint8)
    loss = pixel_loss(logits, masks, Loss(dice=1, ohem=0.7), None)
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_class_weights_scale_each_pixels_loss(case):
    logits, masks = case
    weights = torch.tensor([1.0, 2, 3, 4, 5])
    each = F.cross_entropy(resized(logits, masks), masks.long(), ignore_index=255, reduction="none")
    factor = torch.cat([weights, torch.zeros(251)])[masks.long()]
    torch.testing.assert_close(pixel_loss(logits, masks, Loss(), weights), (each * factor).mean())


def test_hard_pixels_are_the_uncertain_ones_and_at_least_so_many():
    sure = torch.tensor([0.9, 0.2, 0.6, 0.99, 0.5, 0.8]).view(1, 1, 6)
    logits = torch.stack([sure.log(), (1 - sure).log()], 1)
    labels = torch.zeros(1, 1, 6, dtype=torch.int64)
    labels[..., 1] = IGNORED
    assert (ohem_weights(logits, labels, 0.7, keep=1) > 0).flatten().tolist() == [0, 0, 1, 0, 1, 0]
    assert (ohem_weights(logits, labels, 0.7, keep=4) > 0).flatten().tolist() == [1, 0, 1, 0, 1, 1]
    assert (ohem_weights(logits, labels, 0.1, keep=100) > 0).sum() == 5
    # As much weight as all labelled pixels together.
    assert ohem_weights(logits, labels, 0.7, keep=1).sum() == 5


def test_dice_is_zero_for_perfect_masks_and_near_one_for_wrong_ones():
    labels = torch.tensor([[[0, 0, 1, IGNORED]]])
    right = torch.tensor([[[[9.0, 9, -9, -9]], [[-9, -9, 9, 9]], [[-99, -99, -99, -99]]]])
    assert dice_loss(right, labels) < 1e-4
    assert dice_loss(-right[:, [0, 1, 2]], labels) > 0.99


def test_balanced_weights_favour_rare_classes_and_keep_the_mean():
    pixels = np.array([9000, 1000, 0, 90])
    weights = balanced(pixels)
    assert weights[3] > weights[1] > weights[0]
    assert weights[1] / weights[0] == pytest.approx(3)
    assert weights[2] == 1
    assert sum(w * p for w, p in zip(weights, pixels, strict=True)) == pytest.approx(pixels.sum())


def test_dropout_is_drawn_for_each_sample_wherever_it_is():
    keys = torch.tensor([(0, 3), (1, 3), (0, 4)])
    masks = keep_masks(keys, 4000, 0.1, 7, torch.device("cpu"))
    assert masks.unique().tolist() == pytest.approx([0, 1 / 0.9])
    assert masks.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(keep_masks(keys[2:], 4000, 0.1, 7, torch.device("cpu")), masks[2:])
    assert not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("values", [{"class_weights": [1, 0]}, {"ohem": 0}, {"dice": -1}], ids=str)
def test_wrong_settings_are_refused(values):
    with pytest.raises(ValueError, match=r"above 0|greater than"):
        Loss.parse(values)


def test_the_loss_of_uniform_logits_is_the_log_of_the_number_of_classes(case):
    _, masks = case
    loss = pixel_loss(torch.zeros(2, 5, 6, 7), masks, Loss(), None)
    labelled = (masks != IGNORED).float().mean()
    assert loss == pytest.approx(math.log(5) * labelled.item(), rel=1e-5)
