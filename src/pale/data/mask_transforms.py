"""Joint transforms of image and mask: scale, crop, flip, photometric distortion, as mmsegmentation draws them.

Both are sampled at the same points: pixel centres, bilinear for the image, nearest for the mask. So a
mask never gets a value that was not in it, and what is padded is ignored. The distortion is drawn here
and computed on the device, for the whole batch at once.
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

from ..settings import Settings
from .draws import number
from .images import UnreadableImageError
from .masks import IGNORED, Labels, MaskSource, SceneMasks
from .stream import Key

# What a padded pixel holds: near zero once normalised.
GROUND = tuple(round(255 * mean) for mean in IMAGENET_DEFAULT_MEAN)
CROP_TRIES = 10


class MaskAugment(Settings):
    """What training does to image and mask; the defaults are the paper's, drawn as in mmsegmentation.

    Attributes:
        short: the short side is brought to this, before `scale`; none: it stays.
        long: unless the long side would exceed this.
        scale: factor drawn for each image.
        crop: height and width of what is seen; smaller images are padded.
        most_of_one_class: a crop in which one class fills more is drawn again, ten times at most.
        flip: chance of left for right.
        vertical_flip: chance of top for bottom.
        distort: strength of brightness, contrast, saturation and hue; 1 is mmsegmentation's, 0 none.
    """

    short: int | None = Field(default=512, ge=16)
    long: int | None = Field(default=2048, ge=16)
    scale: tuple[float, float] = (0.5, 2.0)
    crop: int | tuple[int, int] = 512
    most_of_one_class: float = Field(default=0.75, gt=0, le=1)
    flip: float = Field(default=0.5, ge=0, le=1)
    vertical_flip: float = Field(default=0.0, ge=0, le=1)
    distort: float = Field(default=1.0, ge=0, le=1)

    @model_validator(mode="after")
    def _in_order(self) -> MaskAugment:
        if not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(
                f"scale needs two factors above 0, the smaller first, got {self.scale}"
            )
        if min(self.crop_size) < 16:
            raise ValueError(f"crop must be at least 16, got {self.crop}")
        return self

    @property
    def crop_size(self) -> tuple[int, int]:
        """Height and width."""
        return self.crop if isinstance(self.crop, tuple) else (self.crop, self.crop)


def fit(
    h: int, w: int, short: int | None, long: int | None, factor: float = 1.0
) -> tuple[int, int]:
    """Height and width after scaling: the sides keep their ratio, neither exceeds its bound times `factor`."""
    ratio = factor
    if short is not None:
        ratio = factor * short / min(h, w)
    if long is not None and ratio * max(h, w) > factor * long:
        ratio = factor * long / max(h, w)
    return max(1, int(h * ratio + 0.5)), max(1, int(w * ratio + 0.5))


def scaled_crop(
    image: Image.Image, size: tuple[int, int], box: tuple[int, int, int, int]
) -> Image.Image:
    """The part `box` (left, top, right, bottom) of the image scaled to `size` (h, w); no more than it is computed."""
    left, top, right, bottom = box
    if (image.height, image.width) == size:
        return image.crop(box)
    fx, fy = image.width / size[1], image.height / size[0]
    return image.resize(
        (right - left, bottom - top),
        Image.Resampling.BILINEAR,
        box=(left * fx, top * fy, right * fx, bottom * fy),
    )


def scaled_mask(mask: Labels, size: tuple[int, int]) -> Labels:
    """The mask scaled to `size` (h, w): each pixel takes the label at its centre."""
    h, w = mask.shape
    rows = (2 * np.arange(size[0]) + 1) * h // (2 * size[0])
    columns = (2 * np.arange(size[1]) + 1) * w // (2 * size[1])
    return mask[rows[:, None], columns[None, :]]


def most_of_one(mask: Labels) -> float:
    """Share of the commonest class among labelled pixels; 1 where there are fewer than two classes."""
    counts = np.bincount(mask.ravel(), minlength=256)[:IGNORED]
    present = counts[counts > 0]
    return 1.0 if len(present) < 2 else float(present.max() / present.sum())


class JointTransform:
    """Training's scale, crop and flips."""

    def __init__(self, augment: MaskAugment) -> None:
        self.augment = augment

    def __call__(
        self, image: Image.Image, mask: Labels, rng: np.random.Generator
    ) -> tuple[NDArray[np.uint8], Labels]:
        """Image (h, w, 3) and mask (h, w) of the crop's size."""
        a = self.augment
        size = fit(image.height, image.width, a.short, a.long, rng.uniform(*a.scale))
        mask = scaled_mask(mask, size)
        box = self._box(mask, rng)
        left, top, right, bottom = box
        pixels = np.asarray(scaled_crop(image, size, box))
        mask = mask[top:bottom, left:right]
        if rng.random() < a.flip:
            pixels, mask = pixels[:, ::-1], mask[:, ::-1]
        if rng.random() < a.vertical_flip:
            pixels, mask = pixels[::-1], mask[::-1]
        return pad(pixels, a.crop_size, GROUND), pad(mask, a.crop_size, IGNORED)

    def _box(self, mask: Labels, rng: np.random.Generator) -> tuple[int, int, int, int]:
        (h, w), (crop_h, crop_w) = mask.shape, self.augment.crop_size
        box = (0, 0, w, h)
        for _ in range(CROP_TRIES + 1):
            top = int(rng.integers(max(h - crop_h, 0), endpoint=True))
            left = int(rng.integers(max(w - crop_w, 0), endpoint=True))
            box = left, top, min(left + crop_w, w), min(top + crop_h, h)
            part = mask[box[1] : box[3], box[0] : box[2]]
            if self.augment.most_of_one_class >= 1:
                break
            if most_of_one(part) < self.augment.most_of_one_class:
                break
        return box


def pad(pixels: NDArray[np.uint8], size: tuple[int, int], value: Any) -> NDArray[np.uint8]:
    """Fill up to `size`, right and below; the result is a copy that owns its memory."""
    out = np.empty((*size, *pixels.shape[2:]), np.uint8)
    out[:] = value
    out[: pixels.shape[0], : pixels.shape[1]] = pixels
    return out


# Brightness is added; contrast and saturation are factors; hue is in degrees.
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, 0.5, 0.5, 18


def draw_distortion(rng: np.random.Generator, strength: float) -> NDArray[np.float32]:
    """Brightness, contrast first or last (1 or 0), contrast, saturation, hue; each but the order is on at even odds.

    mmsegmentation adds a whole number from -18 to 17 to OpenCV's hue, which counts by two degrees.
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
    """Apply `draw_distortion`'s draws, (b, 5), to images (b, 3, h, w) of 0 to 255; float32, whole numbers."""
    x = images.float()
    brightness, first, contrast, saturation, hue = (d.view(-1, 1, 1, 1) for d in draws.T)
    one = torch.ones_like(contrast)
    x = whole(x + brightness)
    x = whole(x * torch.where(first > 0, contrast, one))
    x = saturate(x, saturation)
    x = turn_hue(x, hue)
    return whole(x * torch.where(first > 0, one, contrast))


def whole(x: Tensor) -> Tensor:
    """As bytes: cut off at both ends, rounded down."""
    return x.clamp(0, 255).floor()


def saturate(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the saturation of HSV, up to 1: colours move away from, or towards, their greatest channel."""
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    # No further than where the least channel is 0.
    limit = torch.where(spread > 0, value / spread.clamp(min=1e-6), torch.ones_like(spread))
    out = (value - (value - x) * torch.minimum(factor.expand_as(limit), limit)).round()
    return torch.where(factor == 1, x, out)


def turn_hue(x: Tensor, degrees: Tensor) -> Tensor:
    """Turn the hue of HSV."""
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


class Masked(Dataset[Any]):
    """Training samples: image uint8 (3, h, w), mask uint8 (h, w), distortion (5,), key.

    The item (epoch, index) is drawn from (seed, epoch, index) alone.
    """

    def __init__(self, source: MaskSource, augment: MaskAugment, seed: int) -> None:
        self.source, self.seed, self.augment = source, seed, augment
        self.transform = JointTransform(augment)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, Tensor, Key]:
        epoch, index = key
        image, mask = read_pair(self.source, index)
        rng = np.random.default_rng(number(self.seed, epoch, index))
        pixels, labels = self.transform(image, mask, rng)
        draws = torch.from_numpy(draw_distortion(rng, self.augment.distort))
        return torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(labels), draws, key


class WholeImages(Dataset[Any]):
    """Validation samples as they are: image uint8 (3, h, w), mask uint8 (h, w), None, key."""

    def __init__(self, source: MaskSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor, None, Key]:
        image, mask = read_pair(self.source, key[1])
        return to_tensor(image), torch.from_numpy(np.ascontiguousarray(mask)), None, key


def read_pair(source: MaskSource, index: int) -> tuple[Image.Image, Labels]:
    """Picture and mask, of one size."""
    if isinstance(source, SceneMasks):
        return source.pair(index)
    image, mask = source.image(index), source.mask(index)
    if image.size != (mask.shape[1], mask.shape[0]):
        raise UnreadableImageError(
            f"{source.name(index)} is {image.width}x{image.height}, its mask "
            f"{mask.shape[1]}x{mask.shape[0]}; both must have one size"
        )
    return image, mask


def to_tensor(image: Image.Image) -> Tensor:
    """RGB picture -> uint8 (3, h, w)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def collate(samples: Sequence[Any]) -> dict[str, Any]:
    """Training: tensors stacked. Validation: lists, as sizes differ."""
    images, masks, draws, keys = zip(*samples, strict=True)
    batch: dict[str, Any] = {"keys": torch.tensor(keys)}
    if draws[0] is None:
        return batch | {"images": list(images), "masks": list(masks)}
    return batch | {
        "images": torch.stack(images),
        "masks": torch.stack(masks),
        "draws": torch.stack(draws),
    }
