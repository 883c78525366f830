"""Image, boxes and masks are transformed together, exact to the pixel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from pale.data.sources.instances import Instances, SceneInstances, from_masks
from pale.data.sources.scenes import Scenes
from pale.data.transforms.instances import (
    InstanceAugment,
    InstanceDataset,
    InstanceEvalDataset,
    InstanceTransform,
    collate,
    transform_boxes,
)

KEEP = {"short": None, "long": None, "flip": 0.0}


def painted(h: int, w: int, boxes) -> tuple[Image.Image, Instances]:
    """Return an image whose pixels are their coordinates: red column, green row; blue is 255 inside objects."""
    pixels = np.zeros((h, w, 3), np.uint8)
    pixels[..., 0] = np.arange(w)
    pixels[..., 1] = np.arange(h)[:, None]
    masks = np.zeros((len(boxes), h, w), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = 1
        pixels[top:bottom, left:right, 2] = 255
    return Image.fromarray(pixels), from_masks((h, w), masks, list(range(len(boxes))))


def apply(image, found, seed=0, **changes):
    augment = InstanceAugment(**(KEEP | changes))
    return InstanceTransform(augment)(image, found, np.random.default_rng(seed))


def tight(mask) -> list[int]:
    rows, columns = np.nonzero(mask)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


@settings(max_examples=40, deadline=None)
@given(
    h=st.integers(24, 90),
    w=st.integers(24, 90),
    flip=st.booleans(),
    vertical=st.booleans(),
    seed=st.integers(0, 100),
)
def test_flips_and_crops_transform_pixels_boxes_and_masks_equally(h, w, flip, vertical, seed):
    image, found = painted(h, w, [(3, 4, 12, 15), (w - 10, h - 8, w, h)])
    seen = apply(image, found, seed, flip=float(flip), vertical_flip=float(vertical), crop=(20, 22))
    assert seen.pixels.shape == (min(20, h), min(22, w), 3)
    assert len(seen.boxes) == len(seen.masks) == len(seen.labels)
    inside = np.zeros(seen.pixels.shape[:2], bool)
    for box, mask in zip(seen.boxes, seen.masks, strict=True):
        assert tight(mask) == box.tolist()
        inside |= mask > 0
    assert np.array_equal(inside, seen.pixels[..., 2] == 255)
    for label, mask in zip(seen.labels, seen.masks, strict=True):
        rows, columns = np.nonzero(mask)
        own = found.boxes[label]
        assert (seen.pixels[rows, columns, 0] >= own[0]).all()
        assert (seen.pixels[rows, columns, 0] < own[2]).all()
        assert (seen.pixels[rows, columns, 1] >= own[1]).all()


@settings(max_examples=30, deadline=None)
@given(h=st.integers(30, 90), w=st.integers(30, 90), short=st.integers(20, 160))
def test_a_resized_image_gives_the_resized_objects(h, w, short):
    polygon = [[5.0, 6.0, 25.0, 6.0, 25.0, 20.0, 5.0, 20.0]]
    image, plain = painted(h, w, [(5, 6, 25, 20)])
    found = Instances(plain.size, plain.boxes, plain.labels, plain.crowd, plain.areas, (polygon,))
    seen = apply(image, found, short=short, long=400)
    scale_x, scale_y = seen.pixels.shape[1] / w, seen.pixels.shape[0] / h
    expected = np.array([5 * scale_x, 6 * scale_y, 25 * scale_x, 20 * scale_y])
    np.testing.assert_allclose(seen.boxes[0], expected)
    np.testing.assert_allclose(tight(seen.masks[0]), expected, atol=1.01)
    blue = seen.pixels[..., 2].astype(int)
    assert (blue[seen.masks[0] > 0] > 40).mean() > 0.98
    reached = min(short, 400 * min(h, w) / max(h, w))  # the long side may stop it
    assert min(seen.pixels.shape[:2]) == pytest.approx(reached, abs=1)


def test_flipping_twice_is_what_it_was_and_once_its_mirror():
    image, found = painted(40, 60, [(3, 4, 12, 15), (30, 20, 50, 39)])
    once = apply(image, found, flip=1.0)
    np.testing.assert_array_equal(once.pixels[:, ::-1], np.asarray(image))
    np.testing.assert_array_equal(once.masks[:, :, ::-1], found.masks())
    boxes = transform_boxes(once.boxes, (40, 60), (40, 60), (0, 0, 60, 40), True, False)
    np.testing.assert_array_equal(boxes, found.boxes)


def test_the_long_side_bounds_the_short_one():
    image, found = painted(40, 100, [(3, 4, 12, 15)])
    assert apply(image, found, short=800, long=1333).pixels.shape == (533, 1333, 3)
    image, found = painted(60, 80, [(3, 4, 12, 15)])
    assert apply(image, found, short=800, long=1333).pixels.shape == (800, 1067, 3)


def test_what_a_crop_leaves_nothing_of_is_dropped():
    image, found = painted(100, 100, [(0, 0, 10, 10), (60, 60, 99, 99)])
    counts = set()
    for seed in range(60):
        seen = apply(image, found, seed, crop=24)
        sides = seen.boxes[:, 2:] - seen.boxes[:, :2]
        assert (sides >= 1).all()
        assert seen.masks.any((1, 2)).all()
        counts.add(tuple(seen.labels.tolist()))
    assert () in counts
    assert {(0,), (1,)} & counts


def test_an_object_whose_box_is_seen_but_not_its_pixels_is_dropped():
    ring = np.zeros((60, 60), np.uint8)
    ring[:4], ring[-4:], ring[:, :4], ring[:, -4:] = 1, 1, 1, 1
    found = from_masks((60, 60), [ring], [0])
    dropped = 0
    for seed in range(30):
        seen = InstanceTransform(InstanceAugment(**(KEEP | {"crop": 20})))(
            Image.new("RGB", (60, 60)), found, np.random.default_rng(seed)
        )
        assert len(seen.boxes) == len(seen.masks)
        dropped += not len(seen.boxes)
    assert dropped


def test_crowds_are_never_learned():
    image, found = painted(40, 40, [(3, 4, 12, 15), (20, 20, 30, 30)])
    crowd = np.array([True, False])
    found = Instances(found.size, found.boxes, found.labels, crowd, found.areas, found.shapes)
    seen = apply(image, found)
    assert seen.labels.tolist() == [1]


def test_samples_depend_on_seed_epoch_and_index_alone():
    source = SceneInstances(Scenes(4, 64, 0, (1, 3)))
    augment = InstanceAugment(short=48, long=90, scale=(0.5, 1.5), crop=32, distort=1.0)
    one, two = InstanceDataset(source, augment, 5), InstanceDataset(source, augment, 5)
    two[(0, 3)]
    a, b = one[(1, 2)], two[(1, 2)]
    assert np.array_equal(a[0].pixels, b[0].pixels)
    assert np.array_equal(a[0].boxes, b[0].boxes)
    assert np.array_equal(a[1], b[1])
    assert not np.array_equal(a[0].pixels, one[(2, 2)][0].pixels)


def test_batches_hold_images_of_several_sizes_and_empty_ones():
    transform = InstanceTransform(InstanceAugment(**KEEP))
    rng = np.random.default_rng(0)
    pairs = [
        painted(40, 70, [(3, 4, 12, 15)]),
        painted(50, 33, []),
        painted(64, 64, [(0, 0, 9, 9)] * 2),
    ]
    seen = [transform(image, found, rng) for image, found in pairs]
    batch = collate([(s, np.zeros(5, np.float32), (0, i)) for i, s in enumerate(seen)])
    assert batch["images"].shape == (3, 3, 64, 96)
    assert batch["sizes"] == [(40, 70), (50, 33), (64, 64)]
    assert batch["counts"] == [1, 0, 2]
    assert batch["masks"].shape == (3, 64, 96)
    assert batch["boxes"].dtype.is_floating_point
    assert batch["masks"][0, 4:15, 3:12].all()
    assert batch["masks"][0].sum() == 11 * 9
    assert np.array_equal(batch["images"][0, :, :40, :70].permute(1, 2, 0), pairs[0][0])
    assert not batch["images"][0, :, 40:].any()


def test_validation_keeps_objects_as_they_are():
    source = SceneInstances(Scenes(3, 64, 0, (1, 2)))
    data = InstanceEvalDataset(source, 96, 200)
    batch = collate([data[(0, i)] for i in range(3)])
    assert batch["images"].shape == (3, 3, 96, 96)
    assert batch["instances"][1].size == (64, 64)
    assert np.array_equal(batch["instances"][1].boxes, source.instances(1).boxes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": (2.0, 1.0)}, "the smaller first"),
        ({"crop": 8}, "crop must be at least 16"),
        ({"short": 900, "long": 800}, "short must be at most long"),
    ],
    ids=["scale", "crop", "sides"],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        InstanceAugment(**changes)
