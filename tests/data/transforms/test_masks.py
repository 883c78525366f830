"""Image and mask stay together, nothing leaks into the labels, and the draws are mmsegmentation's."""

import colorsys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pale.data.sources.class_list import IGNORED
from pale.data.sources.masks import SceneMasks
from pale.data.sources.scenes import Scenes
from pale.data.transforms.masks import (
    CROP_TRIES,
    PADDING_COLOUR,
    JointTransform,
    MaskAugment,
    MaskDataset,
    collate,
    distort,
    draw_distortion,
    largest_class_share,
    rotate_hue,
    saturate,
)
from pale.data.transforms.resizing import fit_size, scaled_crop, scaled_mask


def painted(h: int, w: int) -> tuple[Image.Image, np.ndarray]:
    """Cells of 8 pixels; image and mask both hold the number of the cell's row and column."""
    rows, columns = np.arange(h) // 8, np.arange(w) // 8
    image = np.zeros((h, w, 3), np.uint8)
    image[..., 0], image[..., 1] = 10 + 12 * rows[:, None], 10 + 12 * columns[None]
    return Image.fromarray(image), (rows[:, None] * 14 + columns[None]).astype(np.uint8)


@settings(deadline=None, max_examples=60)
@given(
    h=st.integers(40, 120),
    w=st.integers(40, 110),
    crop=st.tuples(st.integers(16, 90), st.integers(16, 90)),
    scale=st.floats(0.6, 2.0),
    flip=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_coordinates_painted_into_both_agree_at_every_pixel(h, w, crop, scale, flip, seed):
    """At cell borders the image is blended; a pixel of the mask may only be one of the cells it is blended from."""
    augment = MaskAugment(
        short=None, long=None, scale=(scale, scale), crop=crop, flip=float(flip), distort=0
    )
    image, mask = painted(h, w)
    pixels, labels = JointTransform(augment)(image, mask, np.random.default_rng(seed))
    assert pixels.shape == (*crop, 3)
    assert labels.shape == crop
    size = fit_size(h, w, None, None, scale)
    inside = labels != IGNORED
    assert inside.sum() == min(crop[0], size[0]) * min(crop[1], size[1])
    assert (pixels[~inside] == PADDING_COLOUR).all()
    row, column = labels // 14, labels % 14
    for found, expected in ((pixels[..., 0], row), (pixels[..., 1], column)):
        # Half a step of 12 is where the nearest cell changes; 1 for rounding.
        off = np.abs(found.astype(int) - (10 + 12 * expected.astype(int)))[inside]
        assert off.max() <= 7


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), st.integers(1, 80))
def test_scaled_masks_hold_the_label_at_each_pixels_centre(h, w, to_h, to_w):
    mask = (np.arange(h * w) % 251).reshape(h, w).astype(np.uint8)
    expected = np.asarray(Image.fromarray(mask).resize((to_w, to_h), Image.Resampling.NEAREST))
    # Pillow rounds; where a centre lies between two pixels either will do.
    y = (2 * np.arange(to_h) + 1) * h % (2 * to_h) != 0
    x = (2 * np.arange(to_w) + 1) * w % (2 * to_w) != 0
    ours = scaled_mask(mask, (to_h, to_w))
    assert np.array_equal(ours[y][:, x], expected[y][:, x])


@given(st.integers(0, 10**6))
def test_the_ignore_label_never_leaks_and_no_label_is_invented(seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(20, 60, 2)
    mask = rng.choice([0, 7, 254, IGNORED], (h, w)).astype(np.uint8)
    image = np.where((mask == IGNORED)[..., None], 200, 100).astype(np.uint8).repeat(3, 2)
    pixels, labels = JointTransform(MaskAugment(short=None, long=None, crop=48, distort=0))(
        Image.fromarray(image), mask, rng
    )
    assert set(np.unique(labels)) <= {0, 7, 254, IGNORED}
    padded = (pixels == PADDING_COLOUR).all(-1)
    assert (labels[padded] == IGNORED).all()


@given(
    st.integers(20, 90),
    st.integers(20, 90),
    st.integers(10, 150),
    st.integers(10, 150),
    st.integers(0, 999),
)
def test_a_scaled_crop_is_the_crop_of_the_scaled_image(h, w, to_h, to_w, seed):
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (h, w, 3), np.uint8))
    left, top = int(rng.integers(to_w)), int(rng.integers(to_h))
    box = (left, top, int(rng.integers(left, to_w)) + 1, int(rng.integers(top, to_h)) + 1)
    exact = np.einsum(
        "ih,jw,hwc->ijc", weights(h, to_h), weights(w, to_w), np.asarray(image), optimize=True
    )
    exact = exact[box[1] : box[3], box[0] : box[2]]
    ours = np.asarray(scaled_crop(image, (to_h, to_w), box))
    # Rows and columns are rounded apart, by half a step each; the same holds of Pillow's resize, cropped after.
    assert np.abs(ours - exact).max() <= 1 + 1e-6
    whole = image.resize((to_w, to_h), Image.Resampling.BILINEAR).crop(box)
    assert np.abs(np.asarray(whole) - exact).max() <= 1 + 1e-6


def weights(size: int, to: int) -> np.ndarray:
    """What each pixel of an axis counts for each of the resized one: triangles, widened when it shrinks."""
    scale = size / to
    centres = (np.arange(to) + 0.5) * scale
    apart = np.abs(np.arange(size) + 0.5 - centres[:, None]) / max(1, scale)
    found = np.clip(1 - apart, 0, None)
    return found / found.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [
        ((512, 683), 1.0, (512, 683)),
        ((300, 400), 1.0, (512, 683)),
        ((300, 400), 0.5, (256, 341)),
        ((100, 1000), 1.0, (205, 2048)),  # the long side decides
        ((1000, 100), 2.0, (4096, 410)),
    ],
)
def test_sizes_follow_mmsegmentations_rule(size, factor, expected):
    assert fit_size(*size, 512, 2048, factor) == expected
    assert fit_size(*size, None, None) == size


def test_crops_full_of_one_class_are_drawn_again():
    mask = np.zeros((64, 200), np.uint8)
    mask[:, 180:] = 1
    mask[:32, :10] = IGNORED
    image = Image.new("RGB", (200, 64))
    settings = {"short": None, "long": None, "scale": (1, 1), "crop": 32, "flip": 0}

    def share(most: float) -> float:
        transform = JointTransform(MaskAugment(**settings, most_of_one_class=most))
        drawn = [transform(image, mask, np.random.default_rng(i))[1] for i in range(200)]
        return float(np.mean([largest_class_share(labels) < 0.75 for labels in drawn]))

    chance = share(1.0)
    expected = 1 - (1 - chance) ** (CROP_TRIES + 1)
    assert 0.02 < chance < 0.2
    assert share(0.75) == pytest.approx(expected, abs=0.12)


def test_ignored_pixels_do_not_count_for_the_crop():
    assert largest_class_share(np.array([[0, 1, IGNORED, IGNORED]], np.uint8)) == 0.5
    assert largest_class_share(np.array([[0, IGNORED]], np.uint8)) == 1
    assert largest_class_share(np.array([[IGNORED]], np.uint8)) == 1


def slow_hsv(pixel, change):
    h, s, v = colorsys.rgb_to_hsv(*(c / 255 for c in pixel))
    return [255 * c for c in colorsys.hsv_to_rgb(*change(h, s, v))]


@given(
    st.lists(st.integers(0, 255), min_size=3, max_size=3),
    st.floats(0.5, 1.5),
    st.integers(-18, 17),
)
def test_saturation_and_hue_are_those_of_hsv(pixel, factor, hue):
    x = torch.tensor(pixel).float().view(1, 3, 1, 1)
    saturated = slow_hsv(pixel, lambda h, s, v: (h, min(1, s * factor), v))
    ours = saturate(x, torch.tensor(factor).view(1, 1, 1, 1)).flatten().tolist()
    assert ours == pytest.approx(saturated, abs=0.51)
    turned = slow_hsv(pixel, lambda h, s, v: ((h + hue / 180) % 1, s, v))
    ours = rotate_hue(x, torch.tensor(2.0 * hue).view(1, 1, 1, 1)).flatten().tolist()
    assert ours == pytest.approx(turned, abs=0.51)


def slow_distortion(pixel: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """mmsegmentation's PhotoMetricDistortion, line by line, on one pixel; HSV in floats in place of bytes."""

    def convert(x, alpha=1.0, beta=0.0):
        return np.clip(x * alpha + beta, 0, 255).astype(np.uint8).astype(float)

    def contrast(x):
        return convert(x, alpha=rng.uniform(0.5, 1.5)) if rng.integers(2) else x

    x = pixel.astype(float)
    if rng.integers(2):
        x = convert(x, beta=rng.uniform(-32, 32))
    mode = rng.integers(2)
    if mode == 1:
        x = contrast(x)
    if rng.integers(2):
        factor = rng.uniform(0.5, 1.5)
        x = np.round(slow_hsv(x, lambda h, s, v: (h, min(1, s * factor), v)))
    if rng.integers(2):
        hue = rng.integers(-18, 18)
        x = np.round(slow_hsv(x, lambda h, s, v: ((h + hue / 180) % 1, s, v)))
    return contrast(x) if mode == 0 else x


def test_distortion_has_mmsegmentations_distribution():
    """Both draw 6000 times; the distribution functions of each channel differ by less than chance would allow."""
    count, rng = 6000, np.random.default_rng(0)
    for pixel in ([200, 90, 40], [20, 30, 120], [240, 240, 235]):
        image = torch.tensor(pixel, dtype=torch.uint8).view(1, 3, 1, 1).expand(count, 3, 1, 1)
        draws = torch.from_numpy(np.stack([draw_distortion(rng, 1.0) for _ in range(count)]))
        ours = distort(image, draws)[:, :, 0, 0].numpy()
        theirs = np.stack([slow_distortion(np.array(pixel), rng) for _ in range(count)])
        for c in range(3):
            edges = np.arange(257)
            a = np.searchsorted(np.sort(ours[:, c]), edges) / count
            b = np.searchsorted(np.sort(theirs[:, c]), edges) / count
            # Kolmogorov-Smirnov at one in ten thousand, with a half for rounding at the steps.
            assert np.abs(a - b).max() < 2.2 * np.sqrt(2 / count), (pixel, c)


def test_no_distortion_changes_nothing():
    image = torch.randint(0, 256, (4, 3, 5, 7), dtype=torch.uint8)
    draws = torch.tensor([[0.0, 1, 1, 1, 0], [0, 0, 1, 1, 0]] * 2)
    assert torch.equal(distort(image, draws), image.float())
    rng = np.random.default_rng(0)
    off = np.stack([draw_distortion(rng, 0.0) for _ in range(20)])
    assert torch.equal(distort(image, torch.from_numpy(off[:4])), image.float())


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    source = SceneMasks(Scenes(4, 32))
    augment = MaskAugment(short=None, long=None, crop=24)
    data = MaskDataset(source, augment, seed=3)
    one, two = data[(1, 2)], data[(1, 2)]
    for a, b in zip(one[:3], two[:3], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one[0], data[(2, 2)][0])
    assert not torch.equal(one[0], MaskDataset(source, augment, seed=4)[(1, 2)][0])
    batch = collate([one, data[(0, 1)]])
    assert batch["images"].shape == (2, 3, 24, 24)
    assert batch["masks"].dtype == torch.uint8
    assert batch["keys"].tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("values", "message"),
    [({"scale": [2, 1]}, "the smaller first"), ({"crop": [8, 64]}, "crop must be at least 16")],
)
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MaskAugment.parse(values)
