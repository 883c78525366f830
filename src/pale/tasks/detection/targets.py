"""What a detector learns from: anchors and regions matched with objects, and drawn, all images of a batch at once.

torchvision goes image by image, some two hundred small operations for each, which a GPU does not notice and its CPU
does. Here objects are padded to the same number; matches are torchvision's. What is drawn depends on the image's own
seed and on the place of a candidate, never on the process, the device or the neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...data.draws import hashed, shifted

LEAST_MATCH = 0.3  # IoU under which an object's best anchor is not its own
MOST = 2**25  # numbers of a table of overlaps: as many images at a time


@dataclass
class Objects:
    """The objects of a batch, each image's padded to the same number, one place at least.

    Attributes:
        boxes: (b, n, 4), float32.
        labels: (b, n), from 1 on.
        known: (b, n), whether there is an object.
        seeds: (b,), of what is drawn for an image; without, PyTorch's generator draws.
        masks: of each image, (n, h, w); empty without masks.
    """

    boxes: Tensor
    labels: Tensor
    known: Tensor
    seeds: Tensor | None = None
    masks: Sequence[Tensor] = ()

    @classmethod
    def of(cls, targets: Sequence[dict[str, Any]], device: torch.device) -> Objects:
        """Of each image's "boxes" and "labels", and where there are such, "seed" and "masks"."""

        def there(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers).to(device, non_blocking=True)

        boxes = pad_sequence([t["boxes"].float() for t in targets], batch_first=True)
        labels = pad_sequence([t["labels"] for t in targets], batch_first=True)
        if not boxes.shape[1]:
            boxes, labels = boxes.new_zeros(len(boxes), 1, 4), labels.new_zeros(len(boxes), 1)
        places = torch.arange(boxes.shape[1], device=device)
        counts = there([len(t["boxes"]) for t in targets])
        seeded = all("seed" in t for t in targets)
        seeds = there([int(t["seed"]) for t in targets]) if seeded else None
        masks = [t["masks"] for t in targets if "masks" in t]
        return cls(boxes, labels, places < counts[:, None], seeds, masks)


def overlaps(objects: Objects, boxes: Tensor) -> Tensor:
    """IoU of each object with each of the boxes, (1 or b, m, 4), of its image: (b, n, m); -1 where there is none."""
    a, b = objects.boxes[:, :, None], boxes[:, None]
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_(0)
    both = size[..., 0] * size[..., 1]
    areas = [(x[..., 2] - x[..., 0]) * (x[..., 3] - x[..., 1]) for x in (a, b)]
    found = both / (areas[0] + areas[1] - both)
    return torch.where(objects.known[..., None], found, -1.0)


def match_anchors(objects: Objects, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Of each anchor, (m, 4), in each image: 1 with an object, 0 without, -1 in between; and its object's box, or one.

    From an IoU of 0.7 on an anchor has the object, below 0.3 none. An object's best anchors have it from
    `LEAST_MATCH` on.
    """
    labels, boxes = [], []
    for part in _parts(objects, len(anchors)):
        quality = overlaps(part, anchors[None])
        best, which = quality.max(1)
        of_object = quality.amax(2, keepdim=True)
        own = ((quality == of_object) & (of_object >= LEAST_MATCH)).any(1)
        label = torch.where(own | (best >= 0.7), 1.0, torch.where(best < 0.3, 0.0, -1.0))
        labels.append(label)
        boxes.append(part.boxes.gather(1, which[..., None].expand(-1, -1, 4)))
    return torch.cat(labels), torch.cat(boxes)


def match_regions(objects: Objects, regions: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Of each region, (b, m, 4), its class, 0 below an IoU of 0.5, -1 where it is not `known`; and its object."""
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
    """The objects of so many images that their overlaps with `boxes` each are at most `MOST`."""
    b, n = objects.known.shape
    size = max(1, MOST // max(n * boxes, 1))
    for start in range(0, b, size):
        some = slice(start, start + size)
        yield Objects(objects.boxes[some], objects.labels[some], objects.known[some])


def keys(seeds: Tensor | None, places: Tensor) -> Tensor:
    """A random number, 63 bits, for each place (b, m), of the image's seed; without seeds from PyTorch's generator."""
    if seeds is None:
        return torch.randint(2**63 - 1, places.shape, device=places.device)
    return shifted(hashed(seeds[:, None], places), 1)


def draw(labels: Tensor, keys: Tensor, samples: int, share: float) -> tuple[Tensor, Tensor]:
    """Which of the candidates are drawn, (b, m) each: those with an object (labels from 1 on), and those without (0).

    An image has `samples` of both together, `share` of them with an object at most.
    """
    most = torch.full_like(labels[:, 0], int(samples * share), dtype=torch.int64)
    positive = _first(labels >= 1, keys, most)
    negative = _first(labels == 0, keys, samples - positive.sum(1))
    return positive, negative


def _first(candidates: Tensor, keys: Tensor, count: Tensor) -> Tensor:
    """The `count` (b,) candidates with the least keys."""
    order = torch.where(candidates, keys, 2**63 - 1).sort(1).values
    last = order.gather(1, (count - 1).clamp(0, order.shape[1] - 1)[:, None])
    return candidates & (keys <= last) & (count > 0)[:, None]
