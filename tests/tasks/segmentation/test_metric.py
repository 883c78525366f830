import base64

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from pale.data.sources.class_list import IGNORED, palette
from pale.tasks.gallery import SHOWN
from pale.tasks.segmentation.draw import indexed, overlay
from pale.tasks.segmentation.metric import (
    MeanIoU,
    confusion,
    pack,
    scores,
    summary,
    unpack,
)
from pale.tasks.segmentation.segmenter import Inference

OWN = Inference(short=None, long=None)


@pytest.mark.parametrize("seed", range(6))
def test_miou_equals_torchmetrics_with_ignored_pixels_and_absent_classes(seed):
    torchmetrics = pytest.importorskip(
        "torchmetrics.classification", reason="torchmetrics is not installed"
    )
    generator = torch.Generator().manual_seed(seed)
    classes = 9
    # Classes 7 and 8 are in no label, 8 in no guess either.
    labels = torch.randint(0, 7, (3, 40, 50), generator=generator)
    guesses = torch.randint(0, 8, (3, 40, 50), generator=generator)
    guesses = torch.where(torch.rand(labels.shape, generator=generator) < 0.6, labels, guesses)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED
    theirs = {
        average: torchmetrics.MulticlassJaccardIndex(classes, average=average, ignore_index=IGNORED)
        for average in ("macro", "none")
    }
    accuracy = torchmetrics.MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED)
    matrix = torch.zeros(classes, classes, dtype=torch.int64)
    for label, guess in zip(labels, guesses, strict=True):
        matrix += confusion(label.to(torch.uint8), guess.to(torch.uint8), classes)
        for metric in (*theirs.values(), accuracy):
            metric.update(guess[None], label[None])
    ours = summary(matrix)
    assert ours["miou"] == pytest.approx(100 * float(theirs["macro"].compute()), rel=1e-5)
    assert ours["aacc"] == pytest.approx(100 * float(accuracy.compute()), rel=1e-5)
    each = scores(matrix)["iou"]
    assert each[8].isnan()
    expected = 100 * theirs["none"].compute().double()
    torch.testing.assert_close(each[:8], expected[:8], rtol=1e-5, atol=1e-5)


def test_figures_of_a_matrix_small_enough_to_check_by_hand():
    matrix = torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    assert scores(matrix)["iou"][:2].tolist() == pytest.approx([50, 100 * 4 / 7])
    assert summary(matrix) == pytest.approx(
        {"miou": (50 + 400 / 7) / 2, "macc": (75 + 100 * 4 / 6) / 2, "aacc": 70}
    )


def test_a_validation_set_without_labels_is_an_error():
    with pytest.raises(ValueError, match="no labelled pixel"):
        summary(torch.zeros(3, 3, dtype=torch.int64))


class Reads(nn.Module):
    """Predicts the value of the red channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.classes = classes

    def forward(self, x):
        red = (x[:, :1] * 0.229 + 0.485) * 255
        return -(red - torch.arange(self.classes)[:, None, None]).abs()


def batch(count: int, classes: int = 3, wrong=lambda i: i):
    """Return images that hold their labels; image i is wrong in its first `wrong(i)` columns."""
    generator = torch.Generator().manual_seed(0)
    images, masks = [], []
    for i in range(count):
        mask = torch.randint(0, classes, (12 + i, 40), generator=generator).to(torch.uint8)
        image = mask.clone()
        image[:, : wrong(i)] = (image[:, : wrong(i)] + 1) % classes
        images.append(image[None].repeat(3, 1, 1))
        masks.append(mask)
    keys = torch.tensor([(0, i) for i in range(count)])
    return {"images": images, "masks": masks, "keys": keys}


def test_merged_halves_equal_the_whole():
    model, data = Reads(3), batch(15)
    whole, halves = MeanIoU(list("abc"), OWN), [MeanIoU(list("abc"), OWN) for _ in range(2)]
    whole.update(model, data)
    for i, half in enumerate(halves):
        half.update(model, {name: value[i::2] for name, value in data.items()})
    figures = whole.merge([whole.state()])
    assert halves[0].merge([half.state() for half in halves]) == figures
    assert figures["images"] == 15
    assert halves[0].details() == whole.details()


def test_the_best_and_the_worst_images_are_kept_in_order():
    metric = MeanIoU(list("abc"), OWN)
    metric.update(Reads(3), batch(20))
    found = metric.details()["gallery"]
    assert [entry["index"] for entry in found] == [*range(SHOWN), *range(20 - SHOWN, 20)]
    assert found[0]["miou"] == found[0]["aacc"] == 100
    image = batch(20)["images"][19]
    assert np.array_equal(unpack(found[-1]["prediction"]), image[0].numpy())


def test_the_table_has_a_row_for_each_class():
    metric = MeanIoU(list("abcd"), OWN)
    metric.update(Reads(4), batch(4, classes=3, wrong=lambda i: 0))
    rows = metric.table()
    assert [row["class"] for row in rows] == list("abcd")
    assert rows[0]["iou"] == 100
    assert rows[3] == {"class": "d", "share": 0, "iou": None, "accuracy": None, "precision": None}
    assert sum(row["share"] for row in rows) == pytest.approx(100)


def test_masks_survive_packing():
    labels = np.random.default_rng(0).integers(0, 200, (30, 50)).astype(np.uint8)
    assert np.array_equal(unpack(pack(labels)), labels)
    large = unpack(pack(np.zeros((1000, 2000), np.uint8)))
    assert large.shape == (160, 320)
    assert base64.b64decode(pack(labels))[:4] == b"\x89PNG"


def test_indexed_images_keep_numbers_and_show_colours(tmp_path):
    labels = np.array([[0, 1, 2, IGNORED]], np.uint8)
    indexed(labels, palette(3)).save(tmp_path / "m.png")
    image = Image.open(tmp_path / "m.png")
    assert image.mode == "P"
    assert np.array_equal(image, labels)
    colours = np.asarray(image.convert("RGB"))[0].tolist()
    assert colours == [[128, 0, 0], [0, 128, 0], [128, 128, 0], [255, 255, 255]]


def test_an_overlay_mixes_colours_except_for_ignored_pixels():
    image = Image.new("RGB", (4, 2), (100, 100, 100))
    labels = np.array([[0, IGNORED]], np.uint8)
    pixels = np.asarray(overlay(image, labels, [(200, 0, 100)], strength=0.5))
    assert pixels[0, 0].tolist() == [150, 50, 100]
    assert pixels[1, 3].tolist() == [100, 100, 100]
