"""Training targets of a detector: anchors and regions are matched with objects and sampled, for a whole batch at once.

torchvision processes one image after the other, each with about two hundred small operations, limited by the launch
overhead. Here objects are padded to the same number; matches are those of torchvision. Random sampling depends on the
seed of the image and the index of a candidate, not on the process, the device or other images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...data.seeding import hash_bits, shift_right

MIN_MATCH = 0.3  # IoU below which the best anchor of an object is not matched with it
MAX_OVERLAPS = 2**25  # elements of the table of overlaps; limits the images per chunk


@dataclass
class Objects:
    """The objects of a batch, padded to the same number per image, at least one.

    Attributes:
        boxes: (b, n, 4), float32.
        labels: (b, n), from 1 on.
        known: (b, n), whether there is an object.
        seeds: (b,), of random sampling; None: use PyTorch's generator.
        masks: masks of each image, (n, h, w); empty without masks.
    """

    boxes: Tensor
    labels: Tensor
    known: Tensor
    seeds: Tensor | None = None
    masks: Sequence[Tensor] = ()

    @classmethod
    def of(cls, targets: Sequence[dict[str, Any]], device: torch.device) -> Objects:
        """Collect "boxes" and "labels" of each image and, if present, "seed" and "masks"."""

        def on_device(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers).to(device, non_blocking=True)

        boxes = pad_sequence([t["boxes"].float() for t in targets], batch_first=True)
        labels = pad_sequence([t["labels"] for t in targets], batch_first=True)
        if not boxes.shape[1]:
            boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_zeros(len(boxes), 1)
        places = torch.arange(boxes.shape[1], device=device)
        counts = on_device([len(t["boxes"]) for t in targets])
        seeded = all("seed" in t for t in targets)
        seeds = on_device([int(t["seed"]) for t in targets]) if seeded else None
        masks = [t["masks"] for t in targets if "masks" in t]
        return cls(boxes, labels, places < counts[:, None], seeds, masks)


def overlaps(objects: Objects, boxes: Tensor) -> Tensor:
    """Return the IoU of each object with each of the boxes (1 or b, m, 4) of its image: (b, n, m); padding has -1."""
    a, b = objects.boxes[:, :, None], boxes[:, None]
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_(0)
    both = size[..., 0] * size[..., 1]
    areas = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (a, b)]
    found = both / (areas[0] + areas[1] - both)
    return torch.where(objects.known[..., None], found, -1.0)


def match_anchors(objects: Objects, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Match anchors (m, 4) with objects; return labels (1 object, 0 background, -1 ignored) and boxes, per image.

    An anchor is positive from an IoU of 0.7 on and negative below 0.3. The best anchors of an object are positive from
    `MIN_MATCH` on.
    """
    labels, boxes = [], []
    for part in _parts(objects, len(anchors)):
        quality = overlaps(part, anchors[None])
        best, which = quality.max(1)
        of_object = quality.amax(2, keepdim=True)
        own = ((quality == of_object) & (of_object >= MIN_MATCH)).any(1)
        label = torch.where(own | (best >= 0.7), 1.0, torch.where(best < 0.3, 0.0, -1.0))
        labels.append(label)
        boxes.append(part.boxes.gather(1, which[..., None].expand(-1, -1, 4)))
    return torch.cat(labels), torch.cat(boxes)


def match_regions(objects: Objects, regions: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Match regions (b, m, 4) with objects; return classes (0 below an IoU of 0.5, -1 unless `known`) and objects."""
    labels, whiches = [], []
    start = 0
    for part in _parts(objects, regions.shape[1]):
        some = slice(start, start := start + len(part.boxes))
        best, which = overlaps(part, regions[some]).max(1)
        label = torch.where(best >= 0.5, part.labels.gather(1, which), 0)
        labels.append(torch.where(known[some], label, -1))
        whiches.append(which)
    return torch.cat(labels), torch.cat(whiches)


def _parts(objects: Objects, boxes: int) -> Iterator[Objects]:
    """Yield the objects of as many images as `MAX_OVERLAPS` allows, with so many boxes per image."""
    b, n = objects.known.shape
    size = max(1, MAX_OVERLAPS // max(n * boxes, 1))
    for start in range(0, b, size):
        some = slice(start, start + size)
        yield Objects(objects.boxes[some], objects.labels[some], objects.known[some])


def random_keys(seeds: Tensor | None, places: Tensor) -> Tensor:
    """Return a random 63-bit number for each index (b, m) from the seed of its image, or from PyTorch's generator."""
    if seeds is None:
        return torch.randint(2**63 - 1, places.shape, device=places.device)
    return shift_right(hash_bits(seeds[:, None], places), 1)


def sample_candidates(
    labels: Tensor, keys: Tensor, samples: int, share: float
) -> tuple[Tensor, Tensor]:
    """Sample candidates; return masks (b, m) of positive (labels from 1 on) and of negative ones (label 0).

    An image has `samples` in total, of which at most `share` are positive.
    """
    limit = torch.full_like(labels[:, 0], int(samples * share), dtype=torch.int64)
    positive = _first(labels >= 1, keys, limit)
    negative = _first(labels == 0, keys, samples - positive.sum(1))
    return positive, negative


def _first(candidates: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    """Return a mask of the `count` (b,) candidates with the smallest keys."""
    order = torch.where(candidates, keys, 2**63 - 1).sort(1).values
    last = order.gather(1, (count - 1).clamp(0, order.shape[1] - 1)[:, None])
    return candidates & (keys <= last) & (count > 0)[:, None]
