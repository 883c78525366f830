"""Transforms from a Pillow image to a tensor: the paper's augmentation, built from timm's parts, and evaluation.

The tensors are uint8 and are normalised on the device, so that a quarter of the bytes is transferred.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, ValidationInfo, field_validator
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, auto_augment, create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
from timm.data.transforms_factory import transforms_imagenet_train
from torch import Tensor

from ...compat import erase
from ...core.settings import Settings
from .slide import FASTER, GEOMETRIC, Operation, source_matrix

Transform = Callable[[Image.Image], Tensor]
STRIP_RATIO = 16  # ratio of the sides above which only the visible part of an image is resized


class Augment(Settings):
    """Augmentation of training images; the defaults are those of the ImageNet recipe.

    The paper names flip, colour jitter and AutoAugment. The values, and random erasing, are those of
    DeiT, Swin and CSWin, which it follows: RandAugment replaces AutoAugment, and timm then omits colour
    jitter unless `force_colour_jitter` is set (docs/recipes.md lists all deviations).
    """

    scale: tuple[float, float] = (0.08, 1.0)  # area of the random crop
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    # None: 0.4, but off if `auto` is on and jitter is not forced.
    colour_jitter: float | None = Field(default=None, ge=0)
    force_colour_jitter: bool = False
    auto: str | None = "rand-m9-mstd0.5-inc1"  # timm's notation for RandAugment and AutoAugment
    erase: float = Field(default=0.25, ge=0, le=1)
    interpolation: Literal[
        "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"
    ] = "bicubic"

    @property
    def jitter(self) -> float:
        """Strength of the colour jitter; timm omits jitter if `auto` is on and it is not forced."""
        return 0.4 if self.colour_jitter is None else self.colour_jitter

    @field_validator("scale", "ratio")
    @classmethod
    def _range(cls, value: tuple[float, float], info: ValidationInfo) -> tuple[float, float]:
        low, high = value
        if not 0 < low <= high or (info.field_name == "scale" and high > 1):
            rule = "0 and at most 1, shares of the area" if info.field_name == "scale" else "0"
            raise ValueError(f"two numbers above {rule}, the smaller one first, got {list(value)}")
        return value

    @field_validator("auto")
    @classmethod
    def _policy(cls, value: str | None) -> str | None:
        try:
            transforms_imagenet_train(32, auto_augment=value, separate=True)
        except Exception:  # timm raises AssertionError, among others
            raise ValueError(
                "a policy in timm's notation, such as rand-m9-mstd0.5-inc1 or original, or null for none, "
                f"got {value!r}"
            ) from None
        return value


NO_AUGMENT = Augment(
    scale=(1, 1), ratio=(1, 1), flip=0, colour_jitter=0, auto=None, erase=0, interpolation="bicubic"
)


class Erase:
    """timm's random erasing with normal noise, on uint8: the noise is converted to pixel values of 0 to 255."""

    def __init__(self, probability: float) -> None:
        self.timm = RandomErasing(probability, mode="pixel", device="cpu")
        self.mean = 255 * torch.tensor(IMAGENET_DEFAULT_MEAN).view(3, 1, 1)
        self.std = 255 * torch.tensor(IMAGENET_DEFAULT_STD).view(3, 1, 1)

    def __call__(self, image: Tensor) -> Tensor:
        """Erase boxes of an image (3, h, w), uint8, in place."""
        boxes = BoxRecorder()
        erase(self.timm, boxes, *image.shape, torch.float32)
        for where, noise in boxes:
            pixels = (noise * self.std + self.mean).clamp_(0, 255).round_()
            image[where] = pixels.to(torch.uint8)
        return image


class BoxRecorder(list[tuple[Any, Tensor]]):
    """Stand-in for an image that records the boxes and pixels which are assigned to it."""

    def __setitem__(self, where: Any, pixels: Any) -> None:
        self.append((where, pixels))


class RecordedOperation:
    """A geometric operation that records its source matrix."""

    def __init__(self, function: Operation, matrices: list[NDArray[np.float64]]) -> None:
        self.function, self.fast = function, REPLACEMENTS.get(function, function)
        self.matrices = matrices

    def __call__(self, image: Image.Image, amount: float, **options: object) -> Image.Image:
        """Apply the operation."""
        self.matrices.append(source_matrix(self.function, amount, image.width))
        return self.fast(image, amount, **options)


class TrainTransform:
    """Augment an image to (3, size, size), uint8; draws from the global generators, which the caller seeds.

    Draws are made as in timm's transform, in the same order. Resizing is done by torch, which uses vector
    instructions that Pillow lacks: a pixel may differ by a grey level.
    """

    def __init__(self, size: int, augment: Augment) -> None:
        self.size, self.augment = size, augment
        self.matrices: list[NDArray[np.float64]] = []  # of the geometric operations on one image
        _, self.colour, _ = transforms_imagenet_train(
            size,
            use_prefetcher=True,  # keeps uint8
            scale=augment.scale,
            ratio=augment.ratio,
            color_jitter=augment.jitter or None,
            force_color_jitter=augment.force_colour_jitter,
            auto_augment=augment.auto,
            interpolation=augment.interpolation,
            separate=True,
        )
        for step in self.colour.transforms:
            for op in self.operations(step):
                if op.aug_fn in GEOMETRIC:
                    op.aug_fn = RecordedOperation(op.aug_fn, self.matrices)
                else:
                    op.aug_fn = REPLACEMENTS.get(op.aug_fn, op.aug_fn)
        self.erase = Erase(augment.erase) if augment.erase else None

    @staticmethod
    def operations(step: object) -> list[Any]:
        """Return the operations from which RandAugment or AutoAugment chooses."""
        return list(chain(getattr(step, "ops", ()), *getattr(step, "policy", ())))

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the augmented image."""
        return self.with_places(image)[0]

    def with_places(self, image: Image.Image) -> tuple[Tensor, NDArray[np.float32]]:
        """Return the augmented image and its places in the source image.

        The places are a matrix (2, 3) that maps (x, y, 1) in the augmented image to (x, y) in the source image, both
        in coordinates from 0 to 1.
        """
        augment, source_size = self.augment, image.size
        crop = RandomResizedCropAndInterpolation.get_params(image, augment.scale, augment.ratio)
        y, x, height, width = crop
        image = resize(image.crop((x, y, x + width, y + height)), self.size, augment.interpolation)
        if mirrored := draw_chance(augment.flip):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if upside_down := draw_chance(augment.vertical_flip):
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        self.matrices.clear()
        pixels = to_tensor(self.colour(image))
        if self.erase:
            pixels = self.erase(pixels)
        return pixels, self.places(source_size, crop, mirrored, upside_down)

    def places(
        self,
        source_size: tuple[int, int],
        crop: tuple[int, int, int, int],
        mirrored: bool,
        upside_down: bool,
    ) -> NDArray[np.float32]:
        """Return the matrix of `with_places` for crop, flips and `self.matrices`; `source_size` is width and height."""
        (w, h), (y, x, height, width) = source_size, crop
        matrix = np.array([[width / w, 0, x / w], [0, height / h, y / h], [0, 0, 1]])
        if mirrored:
            matrix = matrix @ np.array([[-1, 0, 1], [0, 1, 0], [0, 0, 1]])
        if upside_down:
            matrix = matrix @ np.array([[1, 0, 0], [0, -1, 1], [0, 0, 1]])
        for operation in self.matrices:
            matrix = matrix @ operation
        return matrix[:2].astype(np.float32)


def draw_chance(p: float) -> bool:
    """Return True with probability `p`; draws a random number only if `p` is above 0."""
    return p > 0 and bool(torch.rand(1) < p)


def resize(image: Image.Image, size: int, interpolation: str) -> Image.Image:
    """Resize an RGB image to size x size; "random" draws bilinear or bicubic, as in timm."""
    if interpolation == "random":
        interpolation = random.choice(("bilinear", "bicubic"))
    if image.size == (size, size):
        return image
    if interpolation not in ("bilinear", "bicubic"):
        return image.resize((size, size), str_to_pil_interp(interpolation))
    pixels = torch.from_numpy(np.array(image))[None].permute(0, 3, 1, 2)  # channels last
    pixels = F.interpolate(pixels, (size, size), mode=interpolation, antialias=True)
    return Image.fromarray(pixels[0].permute(1, 2, 0).numpy())


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to (3, h, w), uint8, channels last in memory."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def train_transform(size: int, augment: Augment) -> TrainTransform:
    """Return the training transform of an image."""
    return TrainTransform(size, augment)


def posterize(image: Image.Image, bits: int, **options: object) -> Image.Image:
    """Keep at least one bit; timm requests 0 at full strength, which Pillow 13 rejects."""
    return auto_augment.posterize(image, max(bits, 1), **options)


# From a function of timm to the one that is used instead.
REPLACEMENTS: dict[Operation, Operation] = FASTER | {auto_augment.posterize: posterize}


def eval_transform(size: int, crop: float, interpolation: str = "bicubic") -> Transform:
    """Return the evaluation transform: short side to size / crop, then the centre, (3, size, size), uint8.

    If training draws the interpolation ("random"), evaluation uses bicubic.
    """
    return EvalTransform(size, crop, "bicubic" if interpolation == "random" else interpolation)


class EvalTransform:
    """timm's evaluation transform, with bounded memory for very long images."""

    def __init__(self, size: int, crop: float, interpolation: str) -> None:
        self.size, self.short = size, math.floor(size / crop)
        self.filter = str_to_pil_interp(interpolation)
        self.timm = create_transform(
            size, is_training=False, use_prefetcher=True, crop_pct=crop, interpolation=interpolation
        )
        self.timm.transforms[-1] = to_tensor  # equal values, channels last in memory

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the transformed image, (3, size, size), uint8."""
        if max(image.size) > STRIP_RATIO * min(image.size):
            return to_tensor(self._resized_centre(image))
        pixels: Tensor = self.timm(image)
        return pixels

    def _resized_centre(self, image: Image.Image) -> Image.Image:
        """Resize only the centre of a long image; the whole of 12000x1 pixels would take 2 GB."""
        w, h = (int(self.short * side / min(image.size)) for side in image.size)
        left, top = round((w - self.size) / 2), round((h - self.size) / 2)
        x, y = image.width / w, image.height / h
        box = (left * x, top * y, (left + self.size) * x, (top + self.size) * y)
        return image.resize((self.size, self.size), self.filter, box)


def normalise(images: Tensor, statistics: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Normalise uint8 images (b, 3, h, w) to float32.

    Args:
        images: on any device.
        statistics: mean and standard deviation by channel, (3, 1, 1) each; None: those of ImageNet.
    """
    mean, std = imagenet_statistics(images.device) if statistics is None else statistics
    return (images.float() / 255 - mean) / std


def channel_statistics(
    mean: Sequence[float], std: Sequence[float], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation by channel, (c, 1, 1) each."""
    return (
        torch.tensor(mean, device=device).view(-1, 1, 1),
        torch.tensor(std, device=device).view(-1, 1, 1),
    )


@cache  # creating them for each batch would make the CPU wait for the GPU
def imagenet_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of ImageNet, (3, 1, 1) each."""
    return channel_statistics(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, device)
