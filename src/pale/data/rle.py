"""Shapes in COCO's format, polygons and run-length encodings (RLE): check, draw and encode them.

The encoding itself is done by faster-coco-eval (the extra `det`), a maintained version of pycocotools' C code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.plain_json import Json
from .transforms.resizing import scaled_mask

# Total length of the outlines of a shape, in sides of the image. Drawing takes about 60 bytes per pixel of outline.
MAX_OUTLINE = 256
MAX_COORDINATE = 1e7
Mask = NDArray[np.uint8]
Shape = Any  # a list of polygons [x, y, x, y, ...], an RLE {"size", "counts"}, or None


def codec() -> Any:
    """Import faster-coco-eval's module of mask functions."""
    try:
        from faster_coco_eval.core import mask
    except ImportError:
        raise RuntimeError(
            "detection needs faster-coco-eval; install it: pip install 'pale-transformer[det]'"
        ) from None
    return mask


def shape_problem(shape: Shape, image: tuple[int, int] | None = None) -> str | None:
    """Return why a shape cannot be drawn, or None; an empty shape is valid.

    Args:
        shape: from a file, unchecked.
        image: height and width of the image, if known.
    """
    if is_empty(shape):
        return None
    if isinstance(shape, dict):
        return _rle_problem(shape.get("size"), shape.get("counts"), image)
    if not isinstance(shape, list):
        return f"{type(shape).__name__} is not a shape"
    for polygon in shape:
        if (reason := _polygon_problem(polygon)) is not None:
            return reason
    if image is not None and _outline_length(shape, image) > MAX_OUTLINE:
        return f"polygons whose outlines are longer than {MAX_OUTLINE} sides of the image"
    return None


def _polygon_problem(polygon: object) -> str | None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return "a polygon needs three points of two numbers or more"
    if not all(is_coordinate(value) for value in polygon):
        return "a polygon with an invalid coordinate"
    return None


def is_coordinate(value: object) -> bool:
    """Return whether a value from a file is a finite number of plausible size."""
    return isinstance(value, int | float) and abs(value) < MAX_COORDINATE


def _outline_length(shape: Sequence[Sequence[float]], size: tuple[int, int]) -> float:
    """Return the length of the outlines after `clip_polygon`, in sides of the image; for few points an upper bound."""
    points = sum(len(polygon) // 2 + 4 for polygon in shape)
    if 3 * points <= MAX_OUTLINE:  # an edge is at most as long as the clipping bounds, 3 sides
        return 3.0 * points
    total = 0.0
    for polygon in shape:
        clipped = clip_polygon(polygon, size) / (size[1], size[0])
        if len(clipped):
            total += float(np.abs(clipped - np.roll(clipped, 1, 0)).max(1).sum())
    return total


def clip_polygon(polygon: Sequence[float], size: tuple[int, int]) -> NDArray[np.float64]:
    """Clip a polygon to the image enlarged by its size on each side (Sutherland and Hodgman); returns points (n, 2).

    Within these bounds it is unchanged, so that a shape which extends a little beyond the image is drawn as by other
    tools. Drawing takes memory in proportion to the outline, and coordinates in a file are not bounded.
    """
    points = np.asarray(polygon, np.float64).reshape(-1, 2)
    for axis, side in ((0, size[1]), (1, size[0])):
        for sign, bound in ((1.0, -side), (-1.0, 2 * side)):
            points = _cut(points, axis, sign, float(bound))
    return points


def _cut(points: NDArray[np.float64], axis: int, sign: float, bound: float) -> NDArray[np.float64]:
    """Clip a polygon at a line; `sign` 1 keeps coordinates of at least `bound`, -1 of at most `bound`."""
    inside = sign * (points[:, axis] - bound) >= 0
    if inside.all():
        return points
    after, after_inside = np.roll(points, -1, 0), np.roll(inside, -1)
    crosses = inside != after_inside
    step = np.where(crosses, after[:, axis] - points[:, axis], 1.0)
    share = np.where(crosses, (bound - points[:, axis]) / step, 0.0)
    crossing = points + share[:, None] * (after - points)
    crossing[:, axis] = bound
    # Each point, followed by the crossing of the edge after it.
    candidates = np.stack([points, crossing], 1)
    clipped: NDArray[np.float64] = candidates[np.stack([inside, crosses], 1)]
    return clipped


def _encode_polygons(
    shape: Sequence[Sequence[float]], size: tuple[int, int], to: tuple[int, int]
) -> Json:
    """Draw polygons of an image of `size` at the size `to` and return their RLE."""
    tool, scale = codec(), np.array([to[1] / size[1], to[0] / size[0]])
    parts = [clip_polygon(polygon, size) for polygon in shape]
    scaled = [(part * scale).ravel().tolist() for part in parts if len(part) >= 3]
    if not scaled:  # completely outside
        return tool.encode(np.zeros(to, np.uint8, order="F"))
    return tool.merge(tool.frPyObjects(scaled, *to))


def _rle_problem(size: object, counts: object, image: tuple[int, int] | None) -> str | None:
    if not isinstance(size, list | tuple) or len(size) != 2:
        return "a run-length code without its size"
    if not all(isinstance(n, int) and n > 0 for n in size):
        return f"a run-length code whose size is {size}"
    h, w = size
    if image is not None and (h, w) != image:
        return f"a run-length code for {w}x{h} in an image of {image[1]}x{image[0]}"
    return _counts_problem(counts, h, w)


def _counts_problem(counts: object, h: int, w: int) -> str | None:
    if not isinstance(counts, list | str | bytes) or not counts:
        return "a run-length code without counts"
    runs = counts if isinstance(counts, list) else run_lengths(counts)
    if runs is None or not all(isinstance(n, int) and n >= 0 for n in runs):
        return f"{str(counts)[:20]!r} are invalid run lengths"
    if sum(runs) != h * w:
        return f"run lengths of {sum(runs)} pixels for {w}x{h}"
    return None


def run_lengths(counts: str | bytes) -> list[int] | None:
    """Decode the counts of a compressed RLE, or return None if they are invalid; the C code does not check them.

    A number is a group of characters of 5 bits each, lowest bits first; 32 is added to all but the last character,
    whose bit 16 is the sign. From the fourth number on, the difference to the number two places before is stored.
    """
    text = counts.encode() if isinstance(counts, str) else counts
    bits = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(bits < 32)
    if bits.min() < 0 or bits.max() > 63 or not len(ends) or ends[-1] != len(bits) - 1:
        return None
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 7:  # more than 32 bits
        return None
    place = np.arange(len(bits)) - np.repeat(starts, lengths)
    runs = np.add.reduceat((bits & 31) << 5 * place, starts)
    runs -= np.where(bits[ends] & 16, 1 << 5 * lengths, 0)
    for first in (1, 2):
        runs[first::2] = runs[first::2].cumsum()
    return runs.tolist()


def area(shape: Shape, size: tuple[int, int]) -> float:
    """Return the number of pixels of a shape in an image of that height and width."""
    code = _encode_polygons(shape, size, size) if isinstance(shape, list) else compress(shape)
    return float(codec().area(code))


def is_empty(shape: Shape) -> bool:
    """Return whether there is no shape: None or an empty list."""
    return shape is None or (isinstance(shape, list) and not shape)


def draw(shape: Shape, size: tuple[int, int], to: tuple[int, int] | None = None) -> Mask:
    """Draw a shape: mask (h, w) of 0 and 1.

    Args:
        shape: polygons or RLE, in pixels of an image of `size`.
        size: height and width of that image.
        to: height and width of the mask, `size` by default; polygons are scaled, RLE masks sampled at pixel centres.
    """
    to = to or size
    tool = codec()
    if isinstance(shape, list):
        return np.ascontiguousarray(tool.decode(_encode_polygons(shape, size, to)))
    mask = np.ascontiguousarray(tool.decode(compress(shape)))
    return mask if mask.shape == to else scaled_mask(mask, to)


def compress(shape: Json) -> Json:
    """Return an RLE with compressed counts (a string), which all tools read."""
    if isinstance(shape["counts"], list):
        return codec().frPyObjects(shape, *shape["size"])
    return shape


def encode(mask: Mask) -> Json:
    """Return the RLE of a mask (h, w), ready for JSON."""
    code = codec().encode(np.asfortranarray(mask, np.uint8))
    counts = code["counts"]
    return {
        "size": [int(n) for n in code["size"]],
        "counts": counts.decode() if isinstance(counts, bytes) else counts,
    }


def box_of(mask: NDArray[np.generic]) -> tuple[int, int, int, int] | None:
    """Return left, top, right, bottom of the nonzero pixels, right and bottom exclusive; None for an empty mask."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def paste_masks(
    masks: NDArray[np.float32],
    boxes: NDArray[np.float64] | NDArray[np.float32],
    size: tuple[int, int],
    threshold: float = 0.5,
) -> Sequence[Mask]:
    """Resize mask probabilities (n, s, s) to their boxes, threshold them and return masks (h, w) of 0 and 1.

    Bilinear between the centres of the s x s cells and zero outside, as in mmdetection and detectron2.
    """
    return [_paste(m, b, size, threshold) for m, b in zip(masks, boxes, strict=True)]


def _paste(
    mask: NDArray[np.float32], box: NDArray[np.floating], size: tuple[int, int], threshold: float
) -> Mask:
    out = np.zeros(size, np.uint8)
    (left, top, right, bottom), (h, w) = box.tolist(), size
    x_0, y_0 = max(0, int(np.floor(left)) - 1), max(0, int(np.floor(top)) - 1)
    x_1, y_1 = min(w, int(np.ceil(right)) + 1), min(h, int(np.ceil(bottom)) + 1)
    if right <= left or bottom <= top or x_1 <= x_0 or y_1 <= y_0:
        return out
    rows = _weights(y_0, y_1, top, bottom, len(mask))
    columns = _weights(x_0, x_1, left, right, len(mask))
    out[y_0:y_1, x_0:x_1] = rows @ mask @ columns.T >= threshold
    return out


def _weights(start: int, stop: int, low: float, high: float, cells: int) -> NDArray[np.float32]:
    """Return the weight of each cell for each pixel, (pixels, cells): linear between centres, zero outside."""
    places = (np.arange(start, stop) + 0.5 - low) / (high - low) * cells - 0.5
    distance = np.abs(places[:, None] - np.arange(cells))
    return np.maximum(0, 1 - distance).astype(np.float32)
