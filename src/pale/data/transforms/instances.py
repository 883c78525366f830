"""Joint transforms of an image and its objects: scale, crop, flips; and batches of images of several sizes.

Boxes are in continuous coordinates: pixel i covers i to i + 1. Shapes are drawn at the scaled size of the
image, so that polygons keep their precision, and are cropped and flipped with its pixels.
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

from ...core.settings import MAX_LONG, MAX_SIZE, Settings
from ..loader import Batch
from ..seeding import derive_seed
from ..sources.instances import Instances, InstanceSource, read_instances
from ..stream import Key
from .masks import draw_distortion
from .resizing import draw_crop, fit_size, require_valid_crop, require_valid_scale, scaled_crop

PADDED_TO = 32  # height and width of a batch are multiples of this
MIN_SIDE = 1.0  # minimum width and height in pixels of a cropped box


class InstanceAugment(Settings):
    """Augmentation of image and objects; the defaults are the paper's, mmdetection's 1x schedule.

    Attributes:
        short: length of the short side before `scale`; None keeps it.
        long: maximum length of the long side before `scale`.
        scale: range of the factor that is drawn for each image; with `crop`, scale jittering.
        crop: maximum height and width of the crop; None for no crop.
        flip: probability of a horizontal flip.
        vertical_flip: probability of a vertical flip.
        distort: strength of brightness, contrast, saturation and hue, as in segmentation; 0 off.
    """

    short: int | None = Field(default=800, ge=16, le=MAX_SIZE)
    long: int | None = Field(default=1333, ge=16, le=MAX_LONG)
    scale: tuple[float, float] = (1.0, 1.0)
    crop: int | tuple[int, int] | None = None
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    distort: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _valid(self) -> InstanceAugment:
        require_valid_scale(self.scale)
        if self.crop_size is not None:
            require_valid_crop(self.crop_size)
        if self.short is not None and self.long is not None and self.short > self.long:
            raise ValueError(f"short must be at most long, got {self.short} and {self.long}")
        return self

    @property
    def crop_size(self) -> tuple[int, int] | None:
        """Height and width of the crop."""
        return (self.crop, self.crop) if isinstance(self.crop, int) else self.crop


@dataclass(frozen=True)
class InstanceSample:
    """A transformed training sample.

    Attributes:
        pixels: (h, w, 3).
        boxes: (n, 4), in these pixels.
        labels: (n,), starting at 0.
        masks: (n, h, w) of 0 and 1, or None.
    """

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    masks: NDArray[np.uint8] | None


class InstanceTransform:
    """Scale, crop and flip an image and its objects for training.

    Args:
        augment: settings.
        masks: also draw the shapes.
    """

    def __init__(self, augment: InstanceAugment, masks: bool = True) -> None:
        self.augment, self.with_masks = augment, masks

    def __call__(
        self, image: Image.Image, found: Instances, rng: np.random.Generator
    ) -> InstanceSample:
        """Transform a sample; crowds and objects outside the crop are left out."""
        a, found = self.augment, found.subset(~found.crowd)
        size = fit_size(image.height, image.width, a.short, a.long, rng.uniform(*a.scale))
        whole = (0, 0, size[1], size[0])
        crop = whole if a.crop_size is None else draw_crop(size, a.crop_size, rng)
        flips = rng.random() < a.flip, rng.random() < a.vertical_flip
        pixels = np.asarray(scaled_crop(image, size, crop))
        boxes = transform_boxes(found.boxes, found.size, size, crop, *flips)
        sides = boxes[:, 2:] - boxes[:, :2]
        keep: NDArray[np.bool_] = sides.min(1, initial=np.inf) >= MIN_SIDE
        masks = None
        if self.with_masks:
            left, top, right, bottom = crop
            masks = found.subset(keep).masks(size)[:, top:bottom, left:right]
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
        return InstanceSample(pixels.copy(), boxes[keep], found.labels[keep], masks)


def transform_boxes(
    boxes: NDArray[np.float64],
    size: tuple[int, int],
    to: tuple[int, int],
    crop: tuple[int, int, int, int],
    flip: bool,
    vertical_flip: bool,
) -> NDArray[np.float64]:
    """Scale boxes from an image of `size` to `to`, crop and flip them."""
    left, top, right, bottom = crop
    w, h = right - left, bottom - top
    x = boxes[:, 0::2] * (to[1] / size[1]) - left
    y = boxes[:, 1::2] * (to[0] / size[0]) - top
    x, y = x.clip(0, w), y.clip(0, h)
    if flip:
        x = w - x[:, ::-1]
    if vertical_flip:
        y = h - y[:, ::-1]
    return np.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], 1)


class InstanceDataset(Dataset[Any]):
    """Training samples: transformed sample, distortion, key.

    The random draws of item (epoch, index) depend on (seed, epoch, index) only.
    """

    def __init__(
        self, source: InstanceSource, augment: InstanceAugment, seed: int, masks: bool = True
    ) -> None:
        self.source, self.augment, self.seed = source, augment, seed
        self.transform = InstanceTransform(augment, masks)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[InstanceSample, NDArray[np.float32], Key]:
        epoch, index = key
        image, found = read_instances(self.source, index)
        rng = np.random.default_rng(derive_seed(self.seed, epoch, index))
        sample = self.transform(image, found, rng)
        return sample, draw_distortion(rng, self.augment.distort), key


class InstanceEvalDataset(Dataset[Any]):
    """Validation samples: the image resized for testing, its objects in source pixels, key."""

    def __init__(self, source: InstanceSource, short: int | None, long: int | None) -> None:
        self.source, self.short, self.long = source, short, long

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[NDArray[np.uint8], Instances, Key]:
        image, found = read_instances(self.source, key[1])
        return resize_to_fit(image, self.short, self.long), found, key


def resize_to_fit(image: Image.Image, short: int | None, long: int | None) -> NDArray[np.uint8]:
    """Resize an image such that its sides keep these bounds; returns pixels (h, w, 3)."""
    size = fit_size(image.height, image.width, short, long)
    return np.array(scaled_crop(image, size, (0, 0, size[1], size[0])))


def stack_padded(images: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Pad images (h, w, 3) on the right and below to one size, a multiple of 32.

    Returns uint8 (b, 3, h, w), and height and width of each image before padding.
    """
    sizes = [(x.shape[0], x.shape[1]) for x in images]
    h, w = (max(s[i] for s in sizes) for i in (0, 1))
    out = torch.zeros(len(images), h + -h % PADDED_TO, w + -w % PADDED_TO, 3, dtype=torch.uint8)
    for place, image in zip(out, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = torch.from_numpy(image)
    return out.permute(0, 3, 1, 2), sizes


def collate(samples: Sequence[Any]) -> Batch:
    """Build a batch: images padded to one size, with their "sizes", and the objects of all images concatenated.

    For training "boxes", "labels", "masks" (n, h, w of the padded images) and "counts" per image; for
    validation "instances", a list.
    """
    if len(samples[0]) == 3 and isinstance(samples[0][1], Instances):
        pixels, found, keys = zip(*samples, strict=True)
        images, sizes = stack_padded(pixels)
        return {
            "images": images,
            "sizes": sizes,
            "instances": list(found),
            "keys": torch.tensor(keys),
        }
    shown, draws, keys = zip(*samples, strict=True)
    images, sizes = stack_padded([s.pixels for s in shown])
    batch: Batch = {
        "images": images,
        "sizes": sizes,
        "keys": torch.tensor(keys),
        "draws": torch.from_numpy(np.stack(draws)),
        "boxes": torch.from_numpy(np.concatenate([s.boxes for s in shown])).float(),
        "labels": torch.from_numpy(np.concatenate([s.labels for s in shown])),
        "counts": [len(s.labels) for s in shown],
    }
    if shown[0].masks is not None:
        masks = torch.zeros(len(batch["labels"]), *images.shape[-2:], dtype=torch.uint8)
        start = 0
        for s in shown:
            assert s.masks is not None
            n, h, w = s.masks.shape
            masks[start : start + n, :h, :w] = torch.from_numpy(s.masks)
            start += n
        batch["masks"] = masks
    return batch
