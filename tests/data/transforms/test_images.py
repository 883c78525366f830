import itertools
import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from timm.data import Mixup, auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from torch.utils.data import DataLoader

from pale.data.loader import ImageDataset, collate, iterate_batches, make_loader
from pale.data.seeding import seeded
from pale.data.sources.images import read_folder
from pale.data.sources.scenes import SceneImages, Scenes
from pale.data.stream import Stream, StreamSampler, shard_positions
from pale.data.transforms import slide
from pale.data.transforms.images import (
    NO_AUGMENT,
    Augment,
    Erase,
    RecordedOperation,
    eval_transform,
    normalise,
    resize,
    train_transform,
)
from pale.data.transforms.mixing import Mix, Mixer

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8))


def loader(workers: int, seed: int = 0, start: int = 0) -> DataLoader:
    source = SceneImages(Scenes(11, 32))
    data = ImageDataset(source, train_transform(24, Augment()), seed)
    sampler = StreamSampler(Stream(11, 4, 2, seed), start)
    return DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=collate)


def test_augmentation_depends_on_seed_epoch_and_sample_not_on_workers():
    alone = list(iterate_batches(loader(0)))
    torch.manual_seed(123)
    random.seed(9)
    helped = list(iterate_batches(loader(2)))
    for one, two in zip(alone, helped, strict=True):
        assert torch.equal(one["images"], two["images"])
        assert torch.equal(one["keys"], two["keys"])
    assert torch.equal(next(iterate_batches(loader(0, start=2)))["images"], alone[2]["images"])
    assert not torch.equal(next(iterate_batches(loader(0, seed=1)))["images"], alone[0]["images"])


def test_the_same_sample_looks_different_in_another_epoch():
    data = loader(0).dataset
    assert torch.equal(data[0, 3][0], data[0, 3][0])
    assert not torch.equal(data[0, 3][0], data[1, 3][0])


def test_seeding_restores_the_generators():
    before = random.random(), np.random.random(), torch.rand(1)
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    expected = random.random(), np.random.random(), torch.rand(1)
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    with seeded(1, 2):
        first = random.random(), np.random.random(), torch.rand(1)
    assert (random.random(), np.random.random(), torch.rand(1)) == expected
    with seeded(1, 2):
        assert (random.random(), np.random.random(), torch.rand(1)) == first
    assert before != expected


TIMM = {"is_training": True, "color_jitter": 0.4, "re_prob": 0.0, "use_prefetcher": True}


def smooth(h, w):
    """Return an image with edges but without noise, for which rounding differs most."""
    y, x = np.mgrid[:h, :w]
    waves = np.stack([np.sin(x / 9 + y / 23), np.cos(y / 7), np.sign(np.sin(x * y / 700))], -1)
    return Image.fromarray((127.5 + 120 * waves).astype(np.uint8))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "random"])
def test_crop_and_flip_equal_timms_within_a_grey_level(interpolation):
    wide = {"ratio": (1.3, 1.6), "interpolation": interpolation}  # see the next test
    ours = train_transform(48, Augment(erase=0, auto=None, colour_jitter=0, **wide))
    timm = create_transform(48, **TIMM | {"color_jitter": None}, **wide)
    photo = smooth(140, 190)
    for index in range(30):
        with seeded(0, index):
            one = ours(photo).int()
        with seeded(0, index):
            two = timm(photo).int()
        assert (one - two).abs().max() <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(8, 300), st.integers(8, 300), st.sampled_from([16, 64, 224]))
def test_resizing_equals_pillows_within_a_grey_level(h, w, size):
    photo = smooth(h, w)
    ours = np.asarray(resize(photo, size, "bicubic")).astype(int)
    # Rows, then columns: Pillow itself reverses the order for some tall images.
    rows = photo.resize((size, h), Image.Resampling.BICUBIC)
    pillows = np.asarray(rows.resize((size, size), Image.Resampling.BICUBIC)).astype(int)
    difference = np.abs(ours - pillows)
    assert difference.max() <= 2  # 1 except for enlarging, where torch's weights have fewer bits
    assert (difference > 1).mean() < 1e-3


def test_the_draws_of_the_whole_policy_equal_timms():
    ours = train_transform(32, Augment(erase=0, interpolation="nearest"))
    timm = create_transform(
        32, **TIMM, auto_augment="rand-m9-mstd0.5-inc1", interpolation="nearest"
    )
    for index in range(60):
        with seeded(0, index):
            one, after = ours(PHOTO).int(), (random.random(), np.random.random(), torch.rand(1))
        with seeded(0, index):
            two = timm(PHOTO).int()
            assert (random.random(), np.random.random(), torch.rand(1)) == after
        assert torch.equal(one, two)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(f.__name__ for f in slide.FASTER)),
    st.floats(-1.3, 1.3),
    st.integers(2, 40),
    st.integers(2, 40),
)
def test_shears_and_translations_equal_timms_within_a_grey_level(name, amount, h, w):
    photo = Image.fromarray(np.random.default_rng(h).integers(0, 256, (h, w, 3), np.uint8))
    amount *= 30 if name.endswith("abs") else 1
    how = {"fillcolor": (124, 116, 104), "resample": Image.Resampling.BICUBIC}
    theirs = np.asarray(getattr(auto_augment, name)(photo, amount, **how)).astype(int)
    ours = np.asarray(getattr(slide, name)(photo, amount, **how)).astype(int)
    assert np.abs(ours - theirs).max() <= 1
    how["resample"] = (Image.Resampling.BILINEAR, Image.Resampling.NEAREST)
    with seeded(w):
        theirs = getattr(auto_augment, name)(photo, amount, **how)
    with seeded(w):
        ours = getattr(slide, name)(photo, amount, **how)
    assert ours == theirs


AUTOS = [None, "rand-m9-mstd0.5-inc1", "rand-m9-n4-t1", "v0"]


@pytest.mark.parametrize("auto", AUTOS, ids=str)
def test_places_map_pixels_to_the_source_image(auto):
    # The pixels of the image are their coordinates: each must equal the place that the matrix gives.
    y, x = np.mgrid[:120, :200]
    photo = Image.fromarray(np.stack([x, y, 0 * x + 200], -1).astype(np.uint8))
    augment = Augment(erase=0, auto=auto, colour_jitter=0, vertical_flip=0.5, scale=(0.2, 0.6))
    transform = train_transform(40, augment)
    for step in transform.colour.transforms:  # operations on colours would hide the coordinates
        for op in itertools.chain(getattr(step, "ops", ()), *getattr(step, "policy", ())):
            if not isinstance(op.aug_fn, RecordedOperation):
                op.aug_fn = lambda image, *amount, **how: image
    at = (np.arange(40) + 0.5) / 40
    places = np.stack([*np.meshgrid(at, at), np.ones((40, 40))])
    moved = 0
    for index in range(40):
        with seeded(5, index):
            image, matrix = transform.with_places(photo)
        moved += len(transform.matrices)
        pixels = image.float().numpy()
        across, down = np.einsum("ij,jyx->iyx", matrix, places)
        # Without filled areas and the borders of crop and fill.
        inner = np.zeros((40, 40), bool)
        inner[4:-4, 4:-4] = True
        filled = Image.fromarray((np.abs(pixels[2] - 200) > 8).astype(np.uint8) * 255)
        inner &= np.asarray(filled.filter(ImageFilter.MaxFilter(7))) == 0
        assert inner.mean() > 0.02
        # Pillow truncates fractions in each operation.
        for channel, place in ((0, 200 * across), (1, 120 * down)):
            error = np.abs(pixels[channel] - (place - 0.5))[inner]
            assert error.max() < 3 + len(transform.matrices)
            assert error.mean() < 0.7 + 0.6 * len(transform.matrices)
    assert moved > 5 or auto is None


def test_erasing_equals_timms_clipped_to_pixel_values():
    image = torch.randint(0, 256, (3, 40, 30), dtype=torch.uint8)
    with seeded(3):
        ours = normalise(Erase(1.0)(image.clone())[None])[0]
    with seeded(3):
        theirs = RandomErasing(1.0, mode="pixel", device="cpu")(normalise(image[None])[0])
    black, white = normalise(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    theirs = theirs.clamp(black, white)
    assert not torch.equal(ours, normalise(image[None])[0])
    assert (ours - theirs).abs().max() < 0.5 / 255 / 0.22 + 1e-4


def test_evaluation_resizes_the_short_side_to_256_and_crops_the_centre_224():
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 256, (512, 1024, 3), np.uint8))
    ours = eval_transform(224, 0.875)(wide)
    small = wide.resize((512, 256), Image.Resampling.BICUBIC).crop((144, 16, 368, 240))
    assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(small))


def test_no_augment_changes_nothing():
    square = PHOTO.crop((0, 0, 60, 60))
    image = train_transform(60, NO_AUGMENT)(square)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(square))


@pytest.mark.parametrize("mix", [Mix(), Mix(cutmix=0), Mix(mixup=0)], ids=["both", "mixup", "cut"])
def test_mixing_shards_equals_timms_mixing_of_the_whole_batch(mix):
    images, labels = torch.rand(8, 3, 16, 16), torch.arange(8)
    for step in range(6):
        with seeded(7, step):
            timm = Mixup(mix.mixup, mix.cutmix, label_smoothing=0.1, num_classes=8)
            x, y = timm(images.clone(), labels)
        for shard in range(2):
            at = torch.from_numpy(shard_positions(8, shard, 2))
            x_shard, y_shard = Mixer(mix, 8, seed=7)(images[at], labels[at], step)
            assert torch.equal(x_shard, x[at])
            assert torch.equal(y_shard, y[at])


def test_without_mixing_labels_are_only_smoothed():
    mixer = Mixer(Mix(mixup=0, cutmix=0, smoothing=0.2), 4, seed=0)
    images = torch.rand(3, 3, 8, 8)
    x, y = mixer(images, torch.tensor([0, 1, 2]), 0)
    assert torch.equal(x, images)
    assert torch.allclose(y[0], torch.tensor([0.85, 0.05, 0.05, 0.05]))


def test_odd_shards_cannot_be_mixed():
    with pytest.raises(ValueError, match="even number of images on each process, got 3"):
        Mixer(Mix(), 4, seed=0)(torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2]), 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_file_raises_a_message_of_one_line(tmp_path, workers):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        PHOTO.save(tmp_path / name / "1.png")
    (tmp_path / "a" / "1.png").write_text("broken")
    data = ImageDataset(read_folder(tmp_path), eval_transform(16, 1.0), 0)
    sampler = StreamSampler(Stream(2, 2, 1, 0))
    bad = DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=collate)
    with pytest.raises(ValueError, match=r"a/1\.png: cannot be read as an image") as error:
        list(iterate_batches(bad))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("auto", ["rand-m9-mstd0.5-inc1", "rand-m10-inc1", "original", "v0", "3a"])
def test_no_draw_of_any_policy_fails(auto):
    # Regression: at full strength timm's posterize keeps no bit, which Pillow 13 rejects.
    transform = train_transform(16, Augment(auto=auto))
    for index in range(300):
        with seeded(0, index):
            assert transform(PHOTO).shape == (3, 16, 16)


class KilledDataset(ImageDataset):
    def __getitem__(self, key):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_worker_raises_a_message_of_one_line():
    data = KilledDataset(SceneImages(Scenes(4, 16)), eval_transform(16, 1.0), 0)
    loader = make_loader(data, StreamSampler(Stream(4, 2, 1, 0)), collate, 1, False)
    with pytest.raises(
        ValueError, match=r"process that reads images has died .* lower data\.workers \(now 1\)"
    ):
        list(iterate_batches(loader))
