"""Joint transforms of an image and its objects: scale, crop, flips; and batches of images of several sizes.

Boxes are in continuous coordinates: pixel i covers i to i + 1. Shapes are drawn at the size that the
image gets, so that polygons lose nothing, and cut and flipped with its pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from ..settings import Settings
from .draws import number
from .instances import Instances, InstanceSource, both
from .mask_transforms import draw_distortion, fit, scaled_crop
from .stream import Key

PADDED_TO = 32
LEAST_SIDE = 1.0  # pixels that must be left of a box that was cut


class InstanceAugment(Settings):
    """What training does to image and objects; the defaults are the paper's, mmdetection's 1x.

    Attributes:
        short: the short side is brought to this, before `scale`; none: it stays.
        long: unless the long side would exceed this.
        scale: factor drawn for each image; with `crop`, scale jittering.
        crop: height and width of what is seen at most; none: all of it.
        flip: chance of left for right.
        vertical_flip: chance of top for bottom.
        distort: strength of brightness, contrast, saturation and hue, as in segmentation; 0 none.
    """

    short: int | None = Field(default=800, ge=16)
    long: int | None = Field(default=1333, ge=16)
    scale: tuple[float, float] = (1.0, 1.0)
    crop: int | tuple[int, int] | None = None
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    distort: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _in_order(self) -> InstanceAugment:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(
                f"scale needs two factors above 0, the smaller first, got {self.scale}"
            )
        if self.crop is not None and min(self.crop_size or (16,)) < 16:
            raise ValueError(f"crop must be at least 16, got {self.crop}")
        if self.short is not None and self.long is not None and self.short > self.long:
            raise ValueError(f"short must be at most long, got {self.short} and {self.long}")
        return self

    @property
    def crop_size(self) -> tuple[int, int] | None:
        """Height and width."""
        return (self.crop, self.crop) if isinstance(self.crop, int) else self.crop


@dataclass(frozen=True)
class Seen:
    """What the model is shown.

    Attributes:
        pixels: (h, w, 3).
        boxes: (n, 4) in these pixels.
        labels: (n,), from 0 on.
        masks: (n, h, w) of 0 and 1, or None.
    """

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    masks: NDArray[np.uint8] | None


class InstanceTransform:
    """Training's scale, crop and flips.

    Args:
        augment: what to do.
        masks: draw the shapes too.
    """

    def __init__(self, augment: InstanceAugment, masks: bool = True) -> None:
        self.augment, self.with_masks = augment, masks

    def __call__(self, image: Image.Image, found: Instances, rng: np.random.Generator) -> Seen:
        """Crowds are left out, and objects of which nothing is left."""
        a, found = self.augment, found.only(~found.crowd)
        size = fit(image.height, image.width, a.short, a.long, rng.uniform(*a.scale))
        frame = self._frame(size, rng)
        flips = rng.random() < a.flip, rng.random() < a.vertical_flip
        pixels = np.asarray(scaled_crop(image, size, frame))
        boxes = moved(found.boxes, found.size, size, frame, *flips)
        sides = boxes[:, 2:] - boxes[:, :2]
        keep: NDArray[np.bool_] = sides.min(1, initial=np.inf) >= LEAST_SIDE
        masks = None
        if self.with_masks:
            left, top, right, bottom = frame
            masks = found.only(keep).masks(size)[:, top:bottom, left:right]
            if flips[0]:
                masks = masks[:, :, ::-1]
            if flips[1]:
                masks = masks[:, ::-1]
            visible = masks.any((1, 2))
            keep[np.flatnonzero(keep)[~visible]] = False
            masks = np.ascontiguousarray(masks[visible])
        if flips[0]:
            pixels = pixels[:, ::-1]
        if flips[1]:
            pixels = pixels[::-1]
        return Seen(pixels.copy(), boxes[keep], found.labels[keep], masks)

    def _frame(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[int, int, int, int]:
        (h, w), crop = size, self.augment.crop_size
        if crop is None:
            return 0, 0, w, h
        top = int(rng.integers(max(h - crop[0], 0), endpoint=True))
        left = int(rng.integers(max(w - crop[1], 0), endpoint=True))
        return left, top, min(left + crop[1], w), min(top + crop[0], h)


def moved(
    boxes: NDArray[np.float64],
    size: tuple[int, int],
    to: tuple[int, int],
    frame: tuple[int, int, int, int],
    flip: bool,
    vertical_flip: bool,
) -> NDArray[np.float64]:
    """Boxes of an image of `size` after it was scaled to `to`, cut to `frame` and flipped."""
    left, top, right, bottom = frame
    w, h = right - left, bottom - top
    x = boxes[:, 0::2] * (to[1] / size[1]) - left
    y = boxes[:, 1::2] * (to[0] / size[0]) - top
    x, y = x.clip(0, w), y.clip(0, h)
    if flip:
        x = w - x[:, ::-1]
    if vertical_flip:
        y = h - y[:, ::-1]
    return np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1)


class Objects(Dataset[Any]):
    """Training samples: what is seen, distortion, key. The item (epoch, index) is drawn from these and the seed."""

    def __init__(
        self, source: InstanceSource, augment: InstanceAugment, seed: int, masks: bool = True
    ) -> None:
        self.source, self.augment, self.seed = source, augment, seed
        self.transform = InstanceTransform(augment, masks)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Seen, NDArray[np.float32], Key]:
        epoch, index = key
        image, found = both(self.source, index)
        rng = np.random.default_rng(number(self.seed, epoch, index))
        seen = self.transform(image, found, rng)
        return seen, draw_distortion(rng, self.augment.distort), key


class WholeImages(Dataset[Any]):
    """Validation samples: the image brought to its size in testing, its objects as they are, key."""

    def __init__(self, source: InstanceSource, short: int | None, long: int | None) -> None:
        self.source, self.short, self.long = source, short, long

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[NDArray[np.uint8], Instances, Key]:
        image, found = both(self.source, key[1])
        return resized(image, self.short, self.long), found, key


def resized(image: Image.Image, short: int | None, long: int | None) -> NDArray[np.uint8]:
    """Pixels (h, w, 3) of the image with its sides brought inside these bounds."""
    size = fit(image.height, image.width, short, long)
    return np.array(scaled_crop(image, size, (0, 0, size[1], size[0])))


def stack(images: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Images (h, w, 3) padded right and below to one size, a multiple of 32: uint8 (b, 3, h, w), and their sizes."""
    sizes = [(x.shape[0], x.shape[1]) for x in images]
    h, w = (max(s[i] for s in sizes) for i in (0, 1))
    out = torch.zeros(len(images), h + -h % PADDED_TO, w + -w % PADDED_TO, 3, dtype=torch.uint8)
    for place, image in zip(out, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = torch.from_numpy(image)
    return out.permute(0, 3, 1, 2), sizes


def collate(samples: Sequence[Any]) -> dict[str, Any]:
    """A batch: images padded to one size, with "sizes" as lists; objects of all images one after the other.

    In training "boxes", "labels", "masks" (n, h, w of the padded images) and "counts" of each image; in
    validation "instances", a list.
    """
    if len(samples[0]) == 3 and isinstance(samples[0][1], Instances):
        pixels, found, keys = zip(*samples, strict=True)
        images, sizes = stack(pixels)
        return {
            "images": images,
            "sizes": sizes,
            "instances": list(found),
            "keys": torch.tensor(keys),
        }
    seen, draws, keys = zip(*samples, strict=True)
    images, sizes = stack([s.pixels for s in seen])
    batch: dict[str, Any] = {
        "images": images,
        "sizes": sizes,
        "keys": torch.tensor(keys),
        "draws": torch.from_numpy(np.stack(draws)),
        "boxes": torch.from_numpy(np.concatenate([s.boxes for s in seen])).float(),
        "labels": torch.from_numpy(np.concatenate([s.labels for s in seen])),
        "counts": [len(s.labels) for s in seen],
    }
    if seen[0].masks is not None:
        masks = torch.zeros(len(batch["labels"]), *images.shape[-2:], dtype=torch.uint8)
        at = 0
        for s in seen:
            assert s.masks is not None
            n, h, w = s.masks.shape
            masks[at : at + n, :h, :w] = torch.from_numpy(s.masks)
            at += n
        batch["masks"] = masks
    return batch
