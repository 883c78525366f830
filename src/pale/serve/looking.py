"""A `Glance` as JSON: all that a page needs to follow the pointer, or what one point attends to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..view_attention import Glance
from ..view_sheet import jpeg, stage_data, told

BITS = {"row": 1, "column": 2, "pale": 4}


def for_page(seen: Glance, photo: bool = False) -> dict[str, Any]:
    """Queries and keys of the last block of each stage, as `pages/attention.js` takes them.

    Args:
        seen: the picture.
        photo: add it as a JPEG, for browsers that cannot read its format.
    """
    return _about(seen) | {
        "stages": [stage_data(seen, s, last=True) for s in range(len(seen.stages))],
        **({"photo": jpeg(seen.picture)} if photo else {}),
    }


def for_point(seen: Glance, point: tuple[float, float]) -> dict[str, Any]:
    """Of each stage: the token that holds the point, its pale as bits by direction, its attention, (h, w) each."""
    stages = []
    for s, blocks in enumerate(seen.stages):
        at, block = seen.token(point, s), blocks[-1]
        region = seen.region(s, at)
        bits = np.zeros(region.shape[1:], int)
        for head in range(block.heads):
            bits |= region[head] * BITS[block.kind(head)]
        weights = seen.weights(s, at).mean(0, dtype=np.float64)
        stages.append(
            {
                "map": list(bits.shape),
                "stride": seen.strides[s],
                "token": list(at),
                "pale": bits.tolist(),
                "attention": [[round(float(v), 8) for v in row] for row in weights],
            }
        )
    return _about(seen) | {"point": list(point), "pale_bits": BITS, "stages": stages}


def _about(seen: Glance) -> dict[str, Any]:
    h, w = seen.image.shape[:2]
    return {
        "about": told(seen),
        "trained": seen.loaded.trained,
        "width": seen.picture.width,
        "height": seen.picture.height,
        "seen_width": w,
        "seen_height": h,
    }
