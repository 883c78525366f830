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


def problem(shape: Shape, image: tuple[int, int] | None = None) -> str | None:
    """Why a shape cannot be drawn in an image of that height and width, or None; no shape is none."""
    if is_empty(shape):
        return None
    if isinstance(shape, dict):
        return _code_problem(shape.get("size"), shape.get("counts"), image)
    if not isinstance(shape, list):
        return f"{type(shape).__name__} is no shape"
    for polygon in shape:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return "a polygon needs three points of two numbers or more"
        if not all(isinstance(v, int | float) and abs(v) < 1e7 for v in polygon):
            return "a polygon with something that is no coordinate"
    return None


def _code_problem(size: Any, counts: Any, image: tuple[int, int] | None) -> str | None:
    if not isinstance(size, list | tuple) or len(size) != 2:
        return "a run-length code without its size"
    if not all(isinstance(n, int) and n > 0 for n in size):
        return f"a run-length code whose size is {size}"
    h, w = size
    if image is not None and (h, w) != image:
        return f"a run-length code for {w}x{h} in a picture of {image[1]}x{image[0]}"
    if not isinstance(counts, list | str | bytes) or not counts:
        return "a run-length code without counts"
    runs = counts if isinstance(counts, list) else run_lengths(counts)
    if runs is None or not all(isinstance(n, int) and n >= 0 for n in runs):
        return f"{str(counts)[:20]!r} are no run lengths"
    if sum(runs) != h * w:
        return f"run lengths of {sum(runs)} pixels for {w}x{h}"
    return None


def run_lengths(counts: str | bytes) -> list[int] | None:
    """The numbers of a compressed code, or None where it is none; the C code does not look.

    A number is a group of characters of 5 bits, the lowest first, each with 32 added but the last, whose bit 16
    is the sign; from the fourth number on it is the difference to the last but one.
    """
    text = counts.encode() if isinstance(counts, str) else counts
    bits = np.frombuffer(text, np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(bits < 32)
    if bits.min() < 0 or bits.max() > 63 or not len(ends) or ends[-1] != len(bits) - 1:
        return None
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 7:  # beyond 32 bits
        return None
    place = np.arange(len(bits)) - np.repeat(starts, lengths)
    runs = np.add.reduceat((bits & 31) << 5 * place, starts)
    runs -= np.where(bits[ends] & 16, 1 << 5 * lengths, 0)
    for first in (1, 2):
        runs[first::2] = runs[first::2].cumsum()
    return runs.tolist()


def area(shape: Shape, size: tuple[int, int]) -> float:
    """Pixels of a shape in an image of that height and width."""
    tool = codec()
    code = (
        tool.merge(tool.frPyObjects(shape, *size)) if isinstance(shape, list) else compressed(shape)
    )
    return float(tool.area(code))


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
