"""Joint transforms of image and mask: scale, crop, flip, photometric distortion, drawn as in mmsegmentation.

Both are sampled at the same points: pixel centres, bilinear for the image, nearest for the mask. A mask
therefore never gets a new value, and padding is ignored. The distortion is drawn here and computed on the
device for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator
from timm.data import IMAGENET_DEFAULT_MEAN
from torch import Tensor
from torch.utils.data import Dataset

from ...core.settings import MAX_LONG, MAX_SIZE, Settings
from ..loader import Batch
from ..reading import UnreadableImageError
from ..seeding import derive_seed
from ..sources.class_list import IGNORED, Labels
from ..sources.masks import MaskSource, SceneMasks
from ..stream import Key
from .resizing import (
    draw_crop,
    fit_size,
    require_valid_crop,
    require_valid_scale,
    scaled_crop,
    scaled_mask,
)

# Colour of padding: near zero after normalisation.
PADDING_COLOUR = tuple(round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN)
CROP_TRIES = 10


class MaskAugment(Settings):
    """Augmentation of image and mask; the defaults are the paper's, drawn as in mmsegmentation.

    Attributes:
        short: length of the short side before `scale`; None keeps it.
        long: maximum length of the long side before `scale`.
        scale: range of the factor that is drawn for each image.
        crop: height and width of the crop; smaller images are padded.
        most_of_one_class: a crop in which one class has a larger share is drawn again, up to ten times.
        flip: probability of a horizontal flip.
        vertical_flip: probability of a vertical flip.
        distort: strength of brightness, contrast, saturation and hue; 1 as in mmsegmentation, 0 off.
    """

    short: int | None = Field(default=512, ge=16, le=MAX_SIZE)
    long: int | None = Field(default=2048, ge=16, le=MAX_LONG)
    scale: tuple[float, float] = (0.5, 2.0)
    crop: int | tuple[int, int] = 512
    most_of_one_class: float = Field(default=0.75, gt=0, le=1)
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    distort: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _valid(self) -> MaskAugment:
        require_valid_scale(self.scale)
        require_valid_crop(self.crop_size)
        return self

    @property
    def crop_size(self) -> tuple[int, int]:
        """Height and width of the crop."""
        return self.crop if isinstance(self.crop, tuple) else (self.crop, self.crop)


def largest_class_share(mask: Labels) -> float:
    """Return the share of the most frequent class among labelled pixels; 1 if there are fewer than two classes."""
    counts = np.bincount(mask.ravel(), minlength=256)[:IGNORED]
    present = counts[counts > 0]
    return 1.0 if len(present) < 2 else float(present.max() / present.sum())


class JointTransform:
    """Scale, crop and flip an image and its mask for training."""

    def __init__(self, augment: MaskAugment) -> None:
        self.augment = augment

    def __call__(
        self, image: Image.Image, mask: Labels, rng: np.random.Generator
    ) -> tuple[NDArray[np.uint8], Labels]:
        """Return image (h, w, 3) and mask (h, w) of the crop's size."""
        a = self.augment
        size = fit_size(image.height, image.width, a.short, a.long, rng.uniform(*a.scale))
        mask = scaled_mask(mask, size)
        box = self._draw_crop(mask, rng)
        left, top, right, bottom = box
        pixels = np.asarray(scaled_crop(image, size, box))
        mask = mask[top:bottom, left:right]
        if rng.random() < a.flip:
            pixels, mask = pixels[:, ::-1], mask[:, ::-1]
        if rng.random() < a.vertical_flip:
            pixels, mask = pixels[::-1], mask[::-1]
        return pad(pixels, a.crop_size, PADDING_COLOUR), pad(mask, a.crop_size, IGNORED)

    def _draw_crop(self, mask: Labels, rng: np.random.Generator) -> tuple[int, int, int, int]:
        limit = self.augment.most_of_one_class
        for _ in range(CROP_TRIES + 1):
            box = draw_crop(mask.shape, self.augment.crop_size, rng)
            left, top, right, bottom = box
            if limit >= 1 or largest_class_share(mask[top:bottom, left:right]) < limit:
                break
        return box


def pad(
    pixels: NDArray[np.uint8], size: tuple[int, int], value: int | tuple[int, ...]
) -> NDArray[np.uint8]:
    """Pad to `size` on the right and below with `value`; returns a copy."""
    out = np.empty((*size, *pixels.shape[2:]), np.uint8)
    out[:] = value
    out[: pixels.shape[0], : pixels.shape[1]] = pixels
    return out


# Largest changes: brightness is added, contrast and saturation are factors, hue is in OpenCV's units.
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, 0.5, 0.5, 18


def draw_distortion(rng: np.random.Generator, strength: float) -> NDArray[np.float32]:
    """Draw brightness, contrast first or last (1 or 0), contrast, saturation and hue; each is off with probability 1/2.

    mmsegmentation adds an integer from -18 to 17 to OpenCV's hue, whose unit is two degrees.
    """
    on = rng.random(4) < 0.5
    first = rng.random() < 0.5
    brightness = rng.uniform(-BRIGHTNESS, BRIGHTNESS) * strength
    contrast = 1 + rng.uniform(-CONTRAST, CONTRAST) * strength
    saturation = 1 + rng.uniform(-SATURATION, SATURATION) * strength
    hue = 2 * int(rng.integers(-HUE, HUE)) * strength
    values = (
        brightness if on[0] else 0.0,
        float(first),
        contrast if on[1] else 1.0,
        saturation if on[2] else 1.0,
        hue if on[3] else 0.0,
    )
    return np.array(values, np.float32)


def distort(images: Tensor, draws: Tensor) -> Tensor:
    """Apply the draws of `draw_distortion`, (b, 5), to images (b, 3, h, w) of 0 to 255; returns float32 integers."""
    x = images.float()
    brightness, first, contrast, saturation, hue = (d.view(-1, 1, 1, 1) for d in draws.T)
    one = torch.ones_like(contrast)
    x = to_byte_values(x + brightness)
    x = to_byte_values(x * torch.where(first > 0, contrast, one))
    x = saturate(x, saturation)
    x = rotate_hue(x, hue)
    return to_byte_values(x * torch.where(first > 0, one, contrast))


def to_byte_values(x: Tensor) -> Tensor:
    """Clip to 0 to 255 and round down."""
    return x.clamp(0, 255).floor()


def saturate(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the saturation of HSV, up to 1: channels move away from, or towards, the largest one."""
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    # The limit at which the smallest channel becomes 0.
    limit = torch.where(spread > 0, value / spread.clamp(min=1e-6), torch.ones_like(spread))
    out = (value - (value - x) * torch.minimum(factor.expand_as(limit), limit)).round()
    return torch.where(factor == 1, x, out)


def rotate_hue(x: Tensor, degrees: Tensor) -> Tensor:
    """Rotate the hue of HSV."""
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    r, g, b = x[:, :1], x[:, 1:2], x[:, 2:]
    safe = spread.clamp(min=1e-6)
    hue = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )  # in sixths of a turn
    hue = hue + degrees / 60
    k = (torch.tensor([5.0, 3.0, 1.0], device=x.device).view(1, 3, 1, 1) + hue).remainder(6)
    out = value - spread * torch.minimum(k, 4 - k).clamp(0, 1)
    return torch.where(degrees == 0, x, out.round())


class MaskDataset(Dataset[Any]):
    """Training samples: image uint8 (3, h, w), mask uint8 (h, w), distortion (5,), key.

    The random draws of item (epoch, index) depend on (seed, epoch, index) only.
    """

    def __init__(self, source: MaskSource, augment: MaskAugment, seed: int) -> None:
        self.source, self.seed, self.augment = source, seed, augment
        self.transform = JointTransform(augment)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, Tensor, Key]:
        epoch, index = key
        image, mask = read_pair(self.source, index)
        rng = np.random.default_rng(derive_seed(self.seed, epoch, index))
        pixels, labels = self.transform(image, mask, rng)
        draws = torch.from_numpy(draw_distortion(rng, self.augment.distort))
        return torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(labels), draws, key


class MaskEvalDataset(Dataset[Any]):
    """Validation samples without augmentation: image uint8 (3, h, w), mask uint8 (h, w), None, key."""

    def __init__(self, source: MaskSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, None, Key]:
        image, mask = read_pair(self.source, key[1])
        return to_tensor(image), torch.from_numpy(np.ascontiguousarray(mask)), None, key


def read_pair(source: MaskSource, index: int) -> tuple[Image.Image, Labels]:
    """Return image and mask; raises if their sizes differ."""
    if isinstance(source, SceneMasks):
        return source.image_and_mask(index)
    image, mask = source.image(index), source.mask(index)
    if image.size != (mask.shape[1], mask.shape[0]):
        raise UnreadableImageError(
            f"{source.name(index)} is {image.width}x{image.height}, its mask "
            f"{mask.shape[1]}x{mask.shape[0]}; both sizes must be equal"
        )
    return image, mask


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to uint8 (3, h, w), contiguous."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def collate(samples: Sequence[object]) -> Batch:
    """Stack training samples; validation samples become lists, because their sizes differ."""
    images, masks, draws, keys = zip(*samples, strict=True)
    batch: Batch = {"keys": torch.tensor(keys)}
    if draws[0] is None:
        return batch | {"images": list(images), "masks": list(masks)}
    return batch | {
        "images": torch.stack(images),
        "masks": torch.stack(masks),
        "draws": torch.stack(draws),
    }
