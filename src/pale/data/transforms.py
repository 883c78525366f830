"""From a picture to a tensor: the paper's augmentation, made of timm's parts, and the evaluation crop.

Images leave as uint8 and are normalised on the device: a quarter of the bytes to move.
"""

from __future__ import annotations

import random
from collections.abc import Callable
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

from ..settings import Settings
from .slide import FASTER, GEOMETRIC, place

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
    interpolation: Literal[
        "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random"
    ] = "bicubic"

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
        except Exception:  # timm's own are assertions, among others
            raise ValueError(
                "a policy in timm's notation, such as rand-m9-mstd0.5-inc1 or original, or null for none, "
                f"got {value!r}"
            ) from None
        return value


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


class Noted:
    """An operation that moves pixels, and a note of where it took them from."""

    def __init__(self, function: Any, notes: list[NDArray[np.float64]]) -> None:
        self.timms, self.ours = function, REPLACED.get(function, function)
        self.notes = notes

    def __call__(self, image: Image.Image, amount: float, **how: Any) -> Image.Image:
        """What the operation gives."""
        self.notes.append(place(self.timms, amount, image.width))
        moved: Image.Image = self.ours(image, amount, **how)
        return moved


class TrainTransform:
    """Picture -> (3, size, size), uint8; draws from the global generators, to be seeded outside.

    The draws are those of timm's transform, in its order. The resize is torch's, which has vector
    instructions where Pillow has none: a pixel may differ by a grey level.
    """

    def __init__(self, size: int, augment: Augment) -> None:
        self.size, self.augment = size, augment
        self.notes: list[NDArray[np.float64]] = []
        _, self.colour, _ = transforms_imagenet_train(
            size,
            use_prefetcher=True,  # which is: stay uint8
            scale=augment.scale,
            ratio=augment.ratio,
            color_jitter=augment.colour_jitter or None,
            force_color_jitter=augment.force_colour_jitter,
            auto_augment=augment.auto,
            interpolation=augment.interpolation,
            separate=True,
        )
        for step in self.colour.transforms:
            for op in self.operations(step):
                if op.aug_fn in GEOMETRIC:
                    op.aug_fn = Noted(op.aug_fn, self.notes)
                else:
                    op.aug_fn = REPLACED.get(op.aug_fn, op.aug_fn)
        self.erase = Erase(augment.erase) if augment.erase else None

    @staticmethod
    def operations(step: Any) -> list[Any]:
        """What RandAugment or AutoAugment chooses from."""
        return list(chain(getattr(step, "ops", ()), *getattr(step, "policy", ())))

    def __call__(self, image: Image.Image) -> Tensor:
        """The image alone."""
        return self.see(image)[0]

    def see(self, image: Image.Image) -> tuple[Tensor, NDArray[np.float32]]:
        """The image, and what it shows.

        The second is (2, 3): it takes a place (x, y, 1) in the image to its place (x, y) in the picture,
        both counted from 0 to 1 across the whole.
        """
        augment, whole = self.augment, image.size
        crop = RandomResizedCropAndInterpolation.get_params(image, augment.scale, augment.ratio)
        y, x, height, width = crop
        image = resize(image.crop((x, y, x + width, y + height)), self.size, augment.interpolation)
        if mirrored := chance(augment.flip):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if upside_down := chance(augment.vertical_flip):
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        self.notes.clear()
        pixels = to_tensor(self.colour(image))
        if self.erase:
            pixels = self.erase(pixels)
        return pixels, self.places(whole, crop, mirrored, upside_down)

    def places(
        self,
        whole: tuple[int, int],
        crop: tuple[int, int, int, int],
        mirrored: bool,
        upside_down: bool,
    ) -> NDArray[np.float32]:
        """What an image shows: crop and flips of a picture of `whole` width and height, then what `notes` says."""
        (w, h), (y, x, height, width) = whole, crop
        matrix = np.array([[width / w, 0, x / w], [0, height / h, y / h], [0, 0, 1]])
        if mirrored:
            matrix = matrix @ np.array([[-1, 0, 1], [0, 1, 0], [0, 0, 1]])
        if upside_down:
            matrix = matrix @ np.array([[1, 0, 0], [0, -1, 1], [0, 0, 1]])
        for note in self.notes:
            matrix = matrix @ note
        return matrix[:2].astype(np.float32)


def chance(p: float) -> bool:
    """Whether something of probability `p` happens; draws only where it is open."""
    return p > 0 and bool(torch.rand(1) < p)


def resize(image: Image.Image, size: int, interpolation: str) -> Image.Image:
    """RGB picture -> one of size x size; "random" draws bilinear or bicubic, as timm does."""
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
    """RGB picture -> (3, h, w), uint8, channels last in memory."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def train_transform(size: int, augment: Augment) -> TrainTransform:
    """What training does to a picture."""
    return TrainTransform(size, augment)


def posterize(image: Image.Image, bits: int, **others: Any) -> Image.Image:
    """timm's, but at least one bit stays: at full strength timm asks for none, which Pillow 13 refuses."""
    return auto_augment.posterize(image, max(bits, 1), **others)


REPLACED = FASTER | {auto_augment.posterize: posterize}  # timm's function: ours


def eval_transform(size: int, crop: float, interpolation: str = "bicubic") -> Transform:
    """Picture -> (3, size, size), uint8: short side to size / crop, then the centre.

    Where training draws the interpolation ("random"), it is bicubic here.
    """
    interpolation = "bicubic" if interpolation == "random" else interpolation
    timm = create_transform(
        size, is_training=False, use_prefetcher=True, crop_pct=crop, interpolation=interpolation
    )
    timm.transforms[-1] = to_tensor  # the same, but for the order in memory
    return timm


def normalise(images: Tensor) -> Tensor:
    """Uint8 (b, 3, h, w) -> float32, with the mean and deviation of ImageNet."""
    mean, std = statistics(images.device)
    return (images.float() / 255 - mean) / std


@cache  # making them anew would have the CPU wait for a GPU
def statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """ImageNet's mean and deviation, (3, 1, 1)."""
    mean = torch.tensor(IMAGENET_DEFAULT_MEAN, device=device).view(3, 1, 1)
    return mean, torch.tensor(IMAGENET_DEFAULT_STD, device=device).view(3, 1, 1)
