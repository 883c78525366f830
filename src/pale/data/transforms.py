"""From a picture to a tensor: the paper's augmentation, made of timm's parts, and the evaluation crop.

Images leave as uint8 and are normalised on the device: a quarter of the bytes to move.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from PIL import Image
from pydantic import Field
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor

from ..settings import Settings

Transform = Callable[[Image.Image], Tensor]


class Augment(Settings):
    """What training does to a picture; the defaults are the ImageNet recipe's.

    The paper names flip, colour jitter and AutoAugment. The values, and random erasing, are those of
    DeiT, Swin and CSWin, which it follows. As there, timm leaves colour jitter out when RandAugment is
    on, unless `force_colour_jitter` is set.
    """

    scale: tuple[float, float] = (0.08, 1.0)  # area of the random crop
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    colour_jitter: float = Field(default=0.4, ge=0)
    force_colour_jitter: bool = False
    auto: str | None = "rand-m9-mstd0.5-inc1"  # timm's notation for RandAugment and AutoAugment
    erase: float = Field(default=0.25, ge=0, le=1)
    interpolation: str = "bicubic"


NO_AUGMENT = Augment(
    scale=(1, 1), ratio=(1, 1), flip=0, colour_jitter=0, auto=None, erase=0, interpolation="bicubic"
)


class Erase:
    """timm's random erasing with normal noise, on uint8: the noise becomes pixel values, cut off at 0 and 255."""

    def __init__(self, probability: float) -> None:
        self.timm = RandomErasing(probability, mode="pixel", device="cpu")
        self.mean = 255 * torch.tensor(IMAGENET_DEFAULT_MEAN).view(3, 1, 1)
        self.std = 255 * torch.tensor(IMAGENET_DEFAULT_STD).view(3, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        """(3, h, w), uint8, to the same, changed in place."""
        boxes = Boxes()
        self.timm._erase(boxes, *image.shape, torch.float32)
        for where, noise in boxes:
            pixels = (noise * self.std + self.mean).clamp_(0, 255).round_()
            image[where] = pixels.to(torch.uint8)
        return image


class Boxes(list[tuple[Any, Tensor]]):
    """Takes the place of an image: remembers what is assigned where."""

    def __setitem__(self, where: Any, pixels: Any) -> None:
        self.append((where, pixels))


class Chain:
    """One step after the other."""

    def __init__(self, *steps: Callable[[Any], Any]) -> None:
        self.steps = steps

    def __call__(self, x: Any) -> Any:
        """The last step's result."""
        for step in self.steps:
            x = step(x)
        return x


def train_transform(size: int, augment: Augment) -> Transform:
    """Picture -> (3, size, size), uint8; draws from the global generators, to be seeded outside."""
    transform = transforms_imagenet_train(
        size,
        use_prefetcher=True,  # which is: stay uint8
        scale=augment.scale,
        ratio=augment.ratio,
        hflip=augment.flip,
        vflip=augment.vertical_flip,
        color_jitter=augment.colour_jitter or None,
        force_color_jitter=augment.force_colour_jitter,
        auto_augment=augment.auto,
        interpolation=augment.interpolation,
    )
    for step in transform.transforms:
        for op in chain(getattr(step, "ops", ()), *getattr(step, "policy", ())):
            if op.aug_fn is auto_augment.posterize:
                op.aug_fn = posterize
    return Chain(transform, Erase(augment.erase)) if augment.erase else transform


def posterize(image: Image.Image, bits: int, **others: Any) -> Image.Image:
    """timm's, but at least one bit stays: at full strength timm asks for none, which Pillow 13 refuses."""
    return auto_augment.posterize(image, max(bits, 1), **others)


def eval_transform(size: int, crop: float, interpolation: str = "bicubic") -> Transform:
    """Picture -> (3, size, size), uint8: short side to size / crop, then the centre."""
    return create_transform(
        size, is_training=False, use_prefetcher=True, crop_pct=crop, interpolation=interpolation
    )


def normalise(images: Tensor) -> Tensor:
    """Uint8 (b, 3, h, w) -> float32, with the mean and deviation of ImageNet."""
    mean = torch.tensor(IMAGENET_DEFAULT_MEAN, device=images.device).view(3, 1, 1)
    std = torch.tensor(IMAGENET_DEFAULT_STD, device=images.device).view(3, 1, 1)
    return (images.float() / 255 - mean) / std
