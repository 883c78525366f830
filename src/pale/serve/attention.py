"""A `BackboneTrace` as JSON: queries and keys for the page, or the attention at one point."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from ..view.attention import BackboneTrace
from ..view.page import MAX_PHOTO, jpeg_url, stage_data
from ..view.sheet import describe

BITS = {"row": 1, "column": 2, "pale": 4}


def attention_for_page(trace: BackboneTrace, photo: bool = False) -> dict[str, Any]:
    """Return queries and keys of the last block of each stage, in the form that `attention.js` reads.

    Args:
        trace: trace of an image.
        photo: add the image as a JPEG, for browsers that cannot read its format.
    """
    return _header(trace) | {
        "stages": [stage_data(trace, s, last=True) for s in range(len(trace.stages))],
        **({"photo": jpeg_url(_reduce(trace.image))} if photo else {}),
    }


def _reduce(image: Image.Image) -> Image.Image:
    """Return a large image at a fraction of its size; a full copy would need as much memory again."""
    factor = max(image.size) // (2 * MAX_PHOTO)
    return image.reduce(factor) if factor > 1 else image


def attention_at(trace: BackboneTrace, point: tuple[float, float]) -> dict[str, Any]:
    """Return for each stage the token at a point, its pale (bits by direction) and its attention, both (h, w)."""
    stages = []
    for s, blocks in enumerate(trace.stages):
        at, block = trace.token(point, s), blocks[-1]
        attended = trace.attended(s, at)
        bits = np.zeros(attended.shape[1:], int)
        for head in range(block.heads):
            bits |= attended[head] * BITS[block.kind(head)]
        weights = trace.weights(s, at).mean(0, dtype=np.float64)
        stages.append(
            {
                "map": list(bits.shape),
                "stride": trace.strides[s],
                "token": list(at),
                "pale": bits.tolist(),
                "attention": [[round(float(v), 8) for v in row] for row in weights],
            }
        )
    return _header(trace) | {"point": list(point), "pale_bits": BITS, "stages": stages}


def _header(trace: BackboneTrace) -> dict[str, Any]:
    h, w = trace.pixels.shape[:2]
    return {
        "about": describe(trace),
        "trained": trace.bundle.trained,
        "width": trace.image.width,
        "height": trace.image.height,
        "seen_width": w,
        "seen_height": h,
    }
