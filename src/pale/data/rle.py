"""COCO's shapes: polygons and run-length codes, to pixels and back.

faster-coco-eval does the work: the same C code as pycocotools, kept up. It is the extra `det`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .mask_transforms import scaled_mask

Mask = NDArray[np.uint8]
Shape = Any  # a list of polygons [x, y, x, y, ...], a run-length code {"size", "counts"}, or None


def codec() -> Any:
    """faster-coco-eval's functions on masks."""
    try:
        from faster_coco_eval.core import mask
    except ImportError:
        raise RuntimeError(
            "detection needs faster-coco-eval; install it: pip install 'pale-transformer[det]'"
        ) from None
    return mask


def problem(shape: Shape) -> str | None:
    """Why a shape cannot be drawn, or None; no shape is none."""
    if shape is None or (isinstance(shape, list) and not shape):
        return None
    if isinstance(shape, dict):
        size, counts = shape.get("size"), shape.get("counts")
        if not isinstance(size, list | tuple) or len(size) != 2:
            return "a run-length code without its size"
        if isinstance(counts, list):
            if sum(counts) != size[0] * size[1]:
                return f"run lengths of {sum(counts)} pixels for {size[0]}x{size[1]}"
            return None
        return (
            None
            if isinstance(counts, str | bytes) and counts
            else "a run-length code without counts"
        )
    if not isinstance(shape, list):
        return f"{type(shape).__name__} is no shape"
    for polygon in shape:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return "a polygon needs three points of two numbers or more"
        if not all(isinstance(v, int | float) and abs(v) < 1e7 for v in polygon):
            return "a polygon with something that is no coordinate"
    return None


def is_empty(shape: Shape) -> bool:
    """Whether there is no shape at all."""
    return shape is None or (isinstance(shape, list) and not shape)


def draw(shape: Shape, size: tuple[int, int], to: tuple[int, int] | None = None) -> Mask:
    """The pixels of a shape, (h, w) of 0 and 1.

    Args:
        shape: given for an image of `size`.
        size: height and width.
        to: height and width of the result; polygons are scaled, run-length codes sampled at pixel centres.
    """
    to = to or size
    tool = codec()
    if isinstance(shape, list):
        scale = np.array([to[1] / size[1], to[0] / size[0]])
        scaled = [
            (np.asarray(p, np.float64).reshape(-1, 2) * scale).ravel().tolist() for p in shape
        ]
        return np.ascontiguousarray(tool.decode(tool.merge(tool.frPyObjects(scaled, *to))))
    mask = np.ascontiguousarray(tool.decode(compressed(shape)))
    return mask if mask.shape == to else scaled_mask(mask, to)


def compressed(shape: dict[str, Any]) -> dict[str, Any]:
    """A run-length code with its counts as a string, as all tools take it."""
    if isinstance(shape["counts"], list):
        return codec().frPyObjects(shape, *shape["size"])
    return shape


def encode(mask: Mask) -> dict[str, Any]:
    """The run-length code of a mask (h, w), fit for JSON."""
    code = codec().encode(np.asfortranarray(mask, np.uint8))
    counts = code["counts"]
    return {
        "size": [int(n) for n in code["size"]],
        "counts": counts.decode() if isinstance(counts, bytes) else counts,
    }


def box_of(mask: NDArray[Any]) -> tuple[int, int, int, int] | None:
    """Left, top, right, bottom of what is set, right and bottom exclusive; None where nothing is."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def paste(
    masks: NDArray[np.float32],
    boxes: NDArray[np.float64] | NDArray[np.float32],
    size: tuple[int, int],
    threshold: float = 0.5,
) -> Sequence[Mask]:
    """Square masks (n, s, s) of probabilities over their boxes -> masks (h, w) of 0 and 1, one at a time.

    Bilinear between the centres of the square's cells, zero outside, as mmdetection and detectron2 do it.
    """
    return [_paste(m, b, size, threshold) for m, b in zip(masks, boxes, strict=True)]


def _paste(
    mask: NDArray[np.float32], box: NDArray[Any], size: tuple[int, int], threshold: float
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
    """How much of each cell a pixel takes, (pixels, cells): linear between centres, zero outside."""
    places = (np.arange(start, stop) + 0.5 - low) / (high - low) * cells - 0.5
    distance = np.abs(places[:, None] - np.arange(cells))
    return np.maximum(0, 1 - distance).astype(np.float32)
