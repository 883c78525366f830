"""Sliding windows and several scales against a slow version that keeps everything in memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from pale.data.transforms.images import normalise
from pale.data.transforms.resizing import fit_size
from pale.tasks.segmentation.scaling import scaled_part
from pale.tasks.segmentation.segmenter import (
    Inference,
    ResizedMap,
    Segmenter,
    StoredMap,
    resize_image,
    window_starts,
)

CLASSES = 4


class Toy(nn.Module):
    """Logits at a quarter of the size that depend on position and context, so that windows differ."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 9, stride=4, padding=4)
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x):
        self.calls.append(tuple(x.shape))
        y = self.conv(x)
        ramp = torch.linspace(-1, 1, y.shape[-1])
        return y + ramp * torch.arange(CLASSES)[:, None, None] * 0.1


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return Toy().eval()


def image(h: int, w: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(h * 1000 + w)
    coarse = torch.rand(1, 3, 5, 6, generator=generator) * 255
    return F.interpolate(coarse, (h, w), mode="bicubic").clamp(0, 255)[0].to(torch.uint8)


def scaled(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    return scaled_part(pixels, size, (0, size[0]), (0, size[1]), torch.device("cpu"))


@settings(deadline=None)
@given(*[st.integers(1, 60)] * 4, st.data())
def test_a_resized_part_equals_the_part_of_the_resized_image_and_pillow(h, w, to_h, to_w, data):
    generator = torch.Generator().manual_seed(h * w)
    pixels = torch.randint(0, 256, (3, h, w), generator=generator, dtype=torch.uint8)
    whole = scaled(pixels, (to_h, to_w))
    pillow = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize(
        (to_w, to_h), Image.Resampling.BILINEAR
    )
    off = whole.permute(1, 2, 0).numpy().astype(int) - np.asarray(pillow)
    assert np.abs(off).max() <= 1
    if to_h >= h:  # every version takes the rows first
        assert not off.any()
    top, left = data.draw(st.integers(0, to_h - 1)), data.draw(st.integers(0, to_w - 1))
    bottom, right = data.draw(st.integers(top + 1, to_h)), data.draw(st.integers(left + 1, to_w))
    part = scaled_part(pixels, (to_h, to_w), (top, bottom), (left, right), torch.device("cpu"))
    assert torch.equal(part, whole[:, top:bottom, left:right])


@torch.no_grad()
def slow(model, pixels, how: Inference) -> torch.Tensor:
    """Return mean probabilities, window after window, all in memory, as mmsegmentation does."""
    h, w = pixels.shape[1:]
    total = torch.zeros(CLASSES, h, w)
    for scale in how.scales:
        for flip in (False, True) if how.flip else (False,):
            size = fit_size(h, w, how.short, how.long, scale)
            x = resize_image(pixels, size) if how.mode == "whole" else scaled(pixels, size)
            x = normalise((x.flip(-1) if flip else x)[None])
            if how.mode == "whole":
                logits = F.interpolate(model(x), size, mode="bilinear", align_corners=False)
            else:
                logits, count = torch.zeros(1, CLASSES, *size), torch.zeros(1, 1, *size)
                rows = max(size[0] - how.window + how.stride - 1, 0) // how.stride + 1
                columns = max(size[1] - how.window + how.stride - 1, 0) // how.stride + 1
                for i in range(rows):
                    for j in range(columns):
                        y2 = min(i * how.stride + how.window, size[0])
                        x2 = min(j * how.stride + how.window, size[1])
                        y1, x1 = max(y2 - how.window, 0), max(x2 - how.window, 0)
                        part = model(x[..., y1:y2, x1:x2])
                        part = F.interpolate(
                            part, (y2 - y1, x2 - x1), mode="bilinear", align_corners=False
                        )
                        logits[..., y1:y2, x1:x2] += part
                        count[..., y1:y2, x1:x2] += 1
                assert (count > 0).all()
                logits = logits / count
            if logits.shape[-2:] != (h, w):
                logits = F.interpolate(logits, (h, w), mode="bilinear", align_corners=False)
            chance = logits.softmax(1)[0]
            total += chance.flip(-1) if flip else chance
    return total / (len(how.scales) * (1 + how.flip))


def agrees(labels: torch.Tensor, chances: torch.Tensor) -> bool:
    """Return whether each pixel has the class of the largest probability, up to float rounding."""
    chosen = chances.gather(0, labels.long()[None])[0]
    return bool((chances.amax(0) - chosen).max() < 1e-5)


HOW = st.builds(
    Inference,
    mode=st.sampled_from(["whole", "slide"]),
    window=st.integers(16, 60),
    stride=st.integers(5, 16),
    short=st.sampled_from([None, 32, 50]),
    long=st.sampled_from([None, 60]),
    scales=st.sampled_from([(1.0,), (0.75, 1.0, 1.3)]),
    flip=st.booleans(),
    windows=st.integers(1, 5),
)


@settings(deadline=None, max_examples=40)
@given(
    how=HOW,
    h=st.integers(17, 80),
    w=st.integers(17, 80),
    rows=st.integers(3, 40),
    columns=st.integers(7, 50),
)
def test_blocks_of_any_size_equal_the_slow_version(how, h, w, rows, columns):
    torch.manual_seed(1)
    model = Toy().eval()
    pixels = image(h, w)
    expected = slow(model, pixels, how)
    segment = Segmenter(model, how, CLASSES)
    torch.testing.assert_close(segment.probabilities(pixels), expected, atol=1e-5, rtol=1e-4)
    segment.blocks = lambda *size: (rows, columns)
    assert agrees(segment(pixels), expected)


def test_blocks_follow_from_the_bound_on_memory(model):
    how = Inference(mode="slide", window=32, stride=20, short=None, long=None, memory_mb=1)
    pixels = image(70, 1500)
    few = Segmenter(model, how, CLASSES)
    assert few.blocks(70, 10**6, 1)[1] < 10**6
    assert agrees(few(pixels), slow(model, pixels, how))


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_flipping_the_input_flips_the_output(model, mode):
    how = Inference(
        mode=mode, window=32, stride=21, short=40, long=None, flip=True, scales=(1.0, 1.5)
    )
    segment, pixels = Segmenter(model, how, CLASSES), image(51, 77)
    ours = segment.probabilities(pixels)
    flipped = segment.probabilities(pixels.flip(-1)).flip(-1)
    torch.testing.assert_close(ours, flipped, atol=1e-5, rtol=1e-4)


@given(st.integers(1, 200), st.integers(1, 60), st.data())
def test_windows_cover_everything_and_stay_inside(size, window, data):
    stride = data.draw(st.integers(1, window))
    found = window_starts(size, window, stride)
    seen = np.zeros(size, int)
    for start in found:
        assert start >= 0
        assert start + min(window, size) <= size
        seen[start : start + window] += 1
    assert (seen > 0).all()


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_block_of_a_resized_map_is_a_part_of_interpolate(h, w, to_h, to_w, data):
    source = torch.randn(2, h, w)
    top, left = data.draw(st.integers(0, to_h - 1)), data.draw(st.integers(0, to_w - 1))
    bottom, right = data.draw(st.integers(top + 1, to_h)), data.draw(st.integers(left + 1, to_w))
    whole = F.interpolate(source[None], (to_h, to_w), mode="bilinear", align_corners=False)[0]
    if data.draw(st.booleans()):  # whole rows go another way
        left, right = 0, to_w
    block = ResizedMap(StoredMap(source), (to_h, to_w)).block(top, bottom, left, right)
    torch.testing.assert_close(block, whole[:, top:bottom, left:right], atol=1e-5, rtol=1e-4)


def test_windows_run_several_at_a_time(model):
    how = Inference(mode="slide", window=32, stride=16, short=None, long=None, windows=3)
    model.calls.clear()
    Segmenter(model, how, CLASSES)(image(32, 100))
    assert [shape[0] for shape in model.calls] == [3, 3]


@pytest.mark.parametrize("classes", [3, 20, 150])
def test_blocks_of_several_views_shrink_with_the_classes_not_with_the_views(model, classes):
    how = Inference(mode="slide", short=None, long=None, scales=(0.5, 1.0, 2.0), flip=True)
    rows, columns = Segmenter(model, how, classes).blocks(8000, 8000, 6)
    assert rows * columns * (classes + 1) * 4 * 9 <= how.memory_mb * 2**20
    more = Inference(mode="slide", short=None, long=None, scales=(0.5, 1.0, 1.5, 2.0), flip=True)
    assert Segmenter(model, more, classes).blocks(8000, 8000, 8) == (rows, columns)


LARGE = """
import resource, torch
from torch import nn
from pale.tasks.segmentation.segmenter import Inference, Segmenter

class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, {classes}, 16, stride=16)
    def forward(self, x):
        return self.conv(x)

how = Inference(mode="slide", short=None, long=None, windows=1, **{how})
segment = Segmenter(Flat().eval(), how, {classes})
segment(torch.zeros(3, *{small}, dtype=torch.uint8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
labels = segment(torch.zeros(3, *{large}, dtype=torch.uint8))
assert labels.shape == {large}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def growth(**values) -> int:
    """Return the memory in MB that a large image takes beyond a small one."""
    command = [sys.executable, "-c", LARGE.format(**values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout)


@pytest.mark.slow
def test_a_large_image_needs_little_more_memory_than_a_small_one():
    """60 classes of 6 million pixels would be 1440 MB; the image and its labels are 24."""
    how = {"window": 512, "stride": 512, "memory_mb": 64}
    assert growth(classes=60, how=how, small=(600, 700), large=(2000, 3000)) < 300


@pytest.mark.slow
def test_ten_views_of_a_large_image_stay_within_the_bound_on_memory():
    """The image and its labels are 5 MB; resized and flipped copies would be 50, rows of windows of ten views 100."""
    how = {"window": 256, "stride": 256, "memory_mb": 32, "flip": True}
    how["scales"] = (0.75, 1.0, 1.25, 1.5, 1.75)
    assert growth(classes=20, how=how, small=(64, 64), large=(900, 1300)) < 80


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 32, "stride": 40}, "stride must not exceed window"),
        ({"scales": [0]}, "scales must be above 0"),
        ({"scales": []}, "scales"),
    ],
)
def test_wrong_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Inference.parse(values)


def test_settings_are_described_in_one_line():
    assert (
        Inference().describe()
        == "whole image, short side 512, long side at most 2048, scale 1, no flip"
    )
    assert "image, short side 512, scale" in Inference(long=None).describe()
    how = Inference(mode="slide", short=None, long=None, scales=(0.5, 1.0), flip=True)
    assert how.describe() == "windows of 512 every 341, own size, scale 0.5, 1, with flip"
