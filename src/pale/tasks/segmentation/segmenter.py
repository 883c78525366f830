"""Segment images in bounded memory: whole or by windows, at several scales, flipped.

For each scale, and again for the image flipped, the logits of the scaled image are brought to the size
of the image (bilinear) and turned into probabilities; the class with the largest mean is the
result. Logits of overlapping windows are averaged. All this is as in mmsegmentation.

A view is the image at one scale, flipped or not. With windows, no tensor of the size image x classes and no scaled or
flipped copy of the image is allocated: each window is scaled from the image itself. A `LogitMap` computes a block of
logits on request. With a single view, blocks are requested from top to bottom, one band of columns after the other,
and the map keeps the rows of windows that the next block needs. With several views, each computes a block in turn and
keeps nothing: windows at the edge of a block run again for the next one, which costs time, but ten views need no more
memory than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ...core.settings import MAX_LONG, MAX_SIZE, Settings
from ...data.transforms.images import normalise
from ...data.transforms.resizing import fit_size
from .scaling import scaled_part

MAX_OVERLAP = 32  # windows that contain a pixel, in each direction
MAX_SCALE = 4.0


class Inference(Settings):
    """Settings of inference; the defaults are those for a single scale on ADE20K.

    Attributes:
        mode: segment the image in one piece, or by windows.
        window: height and width of a window.
        stride: distance from one window to the next.
        short: length of the short side after resizing, before `scales`; None: images keep their size.
        long: maximum length of the long side after resizing.
        scales: factors of the size.
        flip: add a horizontally flipped view at each scale.
        windows: number of windows per batch.
        memory_mb: maximum for logits, in MiB; a smaller value makes more and smaller blocks.
    """

    mode: Literal["whole", "slide"] = "whole"
    window: int = Field(default=512, ge=16, le=MAX_SIZE)
    stride: int = Field(default=341, ge=1)
    short: int | None = Field(default=512, ge=16, le=MAX_SIZE)
    long: int | None = Field(default=2048, ge=16, le=MAX_LONG)
    scales: tuple[float, ...] = Field(default=(1.0,), min_length=1, max_length=16)
    flip: bool = False
    windows: int = Field(default=4, ge=1, le=64)
    memory_mb: int = Field(default=1024, ge=1, le=4096)

    @model_validator(mode="after")
    def _sensible(self) -> Inference:
        if self.stride > self.window:
            raise ValueError(
                f"stride must not exceed window, or pixels are left out, got {self.stride} and {self.window}"
            )
        if self.stride * MAX_OVERLAP < self.window:
            raise ValueError(
                f"stride must be at least 1/{MAX_OVERLAP} of window, or each pixel is computed too often, got "
                f"{self.stride} and {self.window}"
            )
        if min(self.scales) <= 0 or max(self.scales) > MAX_SCALE:
            raise ValueError(f"scales must be above 0 and at most {MAX_SCALE}, got {self.scales}")
        return self

    def describe(self) -> str:
        """Return the settings as one line of text."""
        how = "whole image"
        if self.mode == "slide":
            how = f"windows of {self.window} every {self.stride}"
        bounds = [f"short side {self.short}"] if self.short else []
        bounds += [f"long side at most {self.long}"] if self.long else []
        size = ", ".join(bounds) or "own size"
        scales = ", ".join(f"{s:g}" for s in self.scales)
        return f"{how}, {size}, scale {scales}, {'with' if self.flip else 'no'} flip"


MULTI_SCALES = (0.75, 1.0, 1.25, 1.5, 1.75)


class LogitMap(Protocol):
    """Logits, (classes, h, w), that are read in blocks."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""

    def block(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Return logits, (classes, bottom - top, right - left)."""


@dataclass
class StoredMap:
    """A map in memory."""

    logits: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.logits.shape[1], self.logits.shape[2]

    def block(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Return a slice."""
        return self.logits[:, top:bottom, left:right]


@dataclass
class ResizedMap:
    """Another map at another size: bilinear, corners not aligned, equal to `F.interpolate` of the whole map."""

    source: LogitMap
    size: tuple[int, int]

    def block(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Interpolate from the part of the source that the block needs."""
        if self.source.size == self.size:
            return self.source.block(top, bottom, left, right)
        y0, y1, y = _neighbours(top, bottom, self.source.size[0], self.size[0])
        first, last = int(y0[0]), int(y1[-1]) + 1
        whole = (left, right) == (0, self.size[1])
        x0, x1, x = _neighbours(left, right, self.source.size[1], self.size[1])
        start, end = (0, self.source.size[1]) if whole else (int(x0[0]), int(x1[-1]) + 1)
        part = self.source.block(first, last, start, end)
        y0, y1, x0, x1 = (
            i.to(part.device) for i in (y0 - first, y1 - first, x0 - start, x1 - start)
        )
        rows = part.index_select(1, y0).lerp_(part.index_select(1, y1), y.to(part)[:, None])
        del part  # the largest tensor here
        if whole:  # the usual case, and much faster on a CPU
            size = (bottom - top, right)
            return F.interpolate(rows[None], size, mode="bilinear", align_corners=False)[0]
        return rows.index_select(2, x0).lerp_(rows.index_select(2, x1), x.to(rows))


def _neighbours(start: int, end: int, of: int, to: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each pixel of the resized axis the pixel before, the pixel after, and the weight of the latter."""
    at = ((torch.arange(start, end, dtype=torch.float64) + 0.5) * (of / to) - 0.5).clamp(min=0)
    before = at.floor().long().clamp(max=of - 1)
    return before, (before + 1).clamp(max=of - 1), at - before


@dataclass
class FlippedMap:
    """Another map, flipped horizontally."""

    source: LogitMap

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.source.size

    def block(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Return the flipped block of the source."""
        w = self.size[1]
        return self.source.block(top, bottom, w - right, w - left).flip(-1)


def window_starts(size: int, window: int, stride: int) -> list[int]:
    """Return the start positions of windows: every `stride`; the last window ends at the border."""
    if size <= window:
        return [0]
    count = -(-(size - window) // stride) + 1
    return [min(i * stride, size - window) for i in range(count)]


class SlidingMap:
    """Mean logits of overlapping windows over the scaled image, row of windows after row of windows.

    Args:
        model: returns the logits of a window.
        image: not yet scaled.
        size: height and width to scale it to.
        flip: whether it is flipped horizontally.
        settings: settings of the windows.
        keep: keep the rows of windows that the next block below needs; each band of columns starts at the top.
    """

    def __init__(
        self,
        model: nn.Module,
        image: Tensor,
        size: tuple[int, int],
        flip: bool,
        settings: Inference,
        keep: bool,
    ) -> None:
        self.model, self.image, self.size, self.flip = model, image, size, flip
        self.settings, self.keep = settings, keep
        self.device = next(model.parameters()).device
        self.h, self.w = (min(settings.window, n) for n in self.size)
        self.tops = window_starts(self.size[0], settings.window, settings.stride)
        self.lefts = window_starts(self.size[1], settings.window, settings.stride)
        self.band = (-1, -1)
        self._begin((0, 0))

    def _begin(self, band: tuple[int, int]) -> None:
        self.band, self.next, self.top = band, 0, 0
        # Sums of logits and the number of windows, (classes + 1, rows, columns of the band), from row `top` on.
        self.sums: Tensor | None = None

    def block(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Run the windows that the block still needs, and free the rows above it."""
        if not self.keep or (left, right) != self.band or top < self.top:
            self._begin((left, right))
        if self.sums is not None and top > self.top:
            self.sums = self.sums[:, top - self.top :].clone()
        self.top = top
        while self.next < len(self.tops) and self.tops[self.next] < bottom:
            if self.tops[self.next] + self.h > top:
                self._add_row(self.tops[self.next], bottom)
            self.next += 1
        assert self.sums is not None
        sums = self.sums[:, : bottom - top]
        if self.keep:
            return sums[:-1] / sums[-1:]
        self.sums = None
        return sums[:-1].div_(sums[-1:])

    def _add_row(self, top: int, bottom: int) -> None:
        """Run the row of windows that starts at `top`, and add their logits; without `keep`, above `bottom` only."""
        left, right = self.band
        end = top + self.h if self.keep else min(top + self.h, bottom)
        for lefts, logits in self._windows(top):
            for x, coarse in zip(lefts, logits, strict=True):
                self._extend_sums(len(coarse), (end if self.keep else bottom) - self.top)
                assert self.sums is not None
                a, b = max(x, left), min(x + self.w, right)
                skip = max(0, self.top - top)  # rows above the block
                part = self.sums[:, top + skip - self.top : end - self.top, a - left : b - left]
                part[:-1] += self._resize_part(coarse, skip, end - top, a - x, b - x)
                part[-1] += 1

    def _resize_part(self, coarse: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
        """Return a part of a window at full size; a small part is resized alone, as a window may be large."""
        if 2 * (bottom - top) * (right - left) < self.h * self.w:
            return ResizedMap(StoredMap(coarse), (self.h, self.w)).block(top, bottom, left, right)
        size = (self.h, self.w)
        window = F.interpolate(coarse[None], size, mode="bilinear", align_corners=False)[0]
        return window[:, top:bottom, left:right]

    def _extend_sums(self, classes: int, rows: int) -> None:
        """Append rows of zeros until there are `rows`."""
        held = 0 if self.sums is None else self.sums.shape[1]
        if rows > held:
            more = torch.zeros(
                classes + 1, rows - held, self.band[1] - self.band[0], device=self.device
            )
            self.sums = more if self.sums is None else torch.cat([self.sums, more], 1)

    def _windows(self, top: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the windows of the row that overlap the band: their start, and the logits of the model."""
        left, right = self.band
        lefts = [x for x in self.lefts if x < right and x + self.w > left]
        for i in range(0, len(lefts), self.settings.windows):
            some = lefts[i : i + self.settings.windows]
            pixels = torch.stack([self._window_pixels(top, x) for x in some])
            yield some, self.model(normalise(pixels)).float()

    def _window_pixels(self, top: int, left: int) -> Tensor:
        """Return the pixels of a window of the scaled image, (3, h, w)."""
        if self.flip:
            left = self.size[1] - left - self.w
        rows, columns = (top, top + self.h), (left, left + self.w)
        window = scaled_part(self.image, self.size, rows, columns, self.device)
        return window.flip(-1) if self.flip else window


class Segmenter:
    """A model with its settings of inference.

    Args:
        model: returns logits of normalised images, at about a quarter of their size.
        settings: settings of inference.
        classes: number of classes.
    """

    def __init__(self, model: nn.Module, settings: Inference, classes: int) -> None:
        self.model, self.settings, self.classes = model, settings, classes
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def __call__(self, image: Tensor) -> Tensor:
        """Return the class of every pixel, uint8 (h, w) on the CPU, for a uint8 image (3, h, w)."""
        h, w = image.shape[1:]
        return self._predict_in_blocks(
            [ResizedMap(map_, (h, w)) for map_ in self.maps(image)], h, w
        )

    @torch.no_grad()
    def segment_all(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Segment several images; with a single view, images of one size form batches."""
        settings = self.settings
        if settings.mode == "slide" or settings.flip or len(settings.scales) > 1:
            return [self(image) for image in images]
        own = [(image.shape[1], image.shape[2]) for image in images]
        seen = [
            resize_image(x, fit_size(*s, settings.short, settings.long, settings.scales[0]))
            for x, s in zip(images, own, strict=True)
        ]
        out: list[Tensor] = [torch.empty(0)] * len(images)
        for size in dict.fromkeys(x.shape[1:] for x in seen):
            same = [i for i, x in enumerate(seen) if x.shape[1:] == size]
            logits = self.model(
                normalise(torch.stack([seen[i] for i in same]).to(self.device))
            ).float()
            for i, held in zip(same, logits, strict=True):
                map_ = ResizedMap(StoredMap(held), (size[0], size[1]))
                out[i] = self._predict_in_blocks([ResizedMap(map_, own[i])], *own[i])
        return out

    def _predict_in_blocks(self, maps: list[ResizedMap], h: int, w: int) -> Tensor:
        """Return the class with the highest score of each pixel, uint8 (h, w)."""
        out = torch.empty(h, w, dtype=torch.uint8)
        rows, columns = self.blocks(h, w, len(maps))
        for left in range(0, w, columns):
            right = min(left + columns, w)
            for top in range(0, h, rows):
                bottom = min(top + rows, h)
                block = self.scores(maps, top, bottom, left, right)
                out[top:bottom, left:right] = block.argmax(0).to(torch.uint8).cpu()
        return out

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """Return mean probabilities, (classes, h, w), for an image small enough to hold them."""
        h, w = image.shape[1:]
        maps = [ResizedMap(map_, (h, w)) for map_ in self.maps(image)]
        mean: Tensor = sum(m.block(0, h, 0, w).softmax(0) for m in maps) / len(maps)  # type: ignore[assignment]
        return mean

    def scores(
        self, maps: list[ResizedMap], top: int, bottom: int, left: int, right: int
    ) -> Tensor:
        """Return the scores of the classes: logits of one view, or the sum of probabilities of several."""
        if len(maps) == 1:
            return maps[0].block(top, bottom, left, right)
        total = maps[0].block(top, bottom, left, right).softmax(0)
        for map_ in maps[1:]:
            total += map_.block(top, bottom, left, right).softmax(0)
        return total

    def blocks(self, h: int, w: int, maps: int) -> tuple[int, int]:
        """Return rows and columns of a block, so that memory stays below the bound.

        With windows they are at least half a window for any bound; otherwise each window would run too often.
        """
        numbers = self.settings.memory_mb * 2**20 // 4 // (self.classes + 1)
        if self.settings.mode != "slide":
            return max(1, min(h, numbers // (4 * w))), w
        least = self.settings.window // 2
        ratio = max(1.0, *(self._scaled(h, w, scale)[0] / h for scale in self.settings.scales))
        if maps == 1:
            # The map holds up to two windows' height of the band, twice while it grows; the block has a few copies.
            columns = max(least, numbers // (6 * self.settings.window)) / ratio
            return max(1, int(least / ratio)), min(w, max(1, int(columns)))
        # A window, the sum of the views, and of one view its block as scaled and resized by half in two copies.
        area = max(0, numbers - self.settings.window**2) / (1 + ratio**2 + 2 * ratio)
        columns = min(w, max(least, int(area / min(h, max(least, area**0.5)))))
        return min(h, max(least, int(area / columns))), columns

    def _scaled(self, h: int, w: int, scale: float) -> tuple[int, int]:
        return fit_size(h, w, self.settings.short, self.settings.long, scale)

    def maps(self, image: Tensor) -> Iterator[LogitMap]:
        """Yield a map for each view, at the size of its scaled image."""
        h, w = image.shape[1:]
        for scale in self.settings.scales:
            size = self._scaled(h, w, scale)
            for flip in (False, True) if self.settings.flip else (False,):
                view = self.slide if self.settings.mode == "slide" else self.whole
                yield FlippedMap(view(image, size, True)) if flip else view(image, size, False)

    def slide(self, image: Tensor, size: tuple[int, int], flip: bool) -> LogitMap:
        """Return the logits of the scaled image, computed by windows on request."""
        only = len(self.settings.scales) == 1 and not self.settings.flip
        return SlidingMap(self.model, image, size, flip, self.settings, keep=only)

    def whole(self, image: Tensor, size: tuple[int, int], flip: bool) -> LogitMap:
        """Return the logits of the scaled image, computed in one piece."""
        scaled = resize_image(image, size)
        scaled = scaled.flip(-1) if flip else scaled
        logits = self.model(normalise(scaled[None].to(self.device))).float()[0]
        return ResizedMap(StoredMap(logits), size)


def resize_image(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 (3, h, w), bilinear with anti-aliasing, as Pillow does, which training uses."""
    if tuple(image.shape[1:]) == size:
        return image
    return F.interpolate(image[None], size, mode="bilinear", antialias=True)[0]
