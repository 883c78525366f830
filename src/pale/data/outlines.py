"""Outlines of masks as polygons along the edges of pixels: filled by the even-odd rule, they are the mask again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.int64]  # (n, 2): x, y of pixel corners


def outlines(mask: NDArray[np.bool_] | NDArray[np.integer]) -> list[Points]:
    """Return the closed outlines of a mask (h, w), of parts and of holes, each without a repeated last point."""
    inside = np.pad(mask > 0, 1)
    a, b, c, d = inside[:-1, :-1], inside[:-1, 1:], inside[1:, :-1], inside[1:, 1:]
    single = a ^ b ^ c ^ d  # one or three of the four pixels around the corner are set
    double = (a == d) & (b == c) & (a != b)  # two diagonal pixels are set: two outlines meet
    ys, xs = (
        np.concatenate([m, n, n]) for m, n in zip(single.nonzero(), double.nonzero(), strict=True)
    )
    points = np.stack([xs, ys], 1)
    # Along a row of corners an edge runs from the first to the second, from the third to the fourth, and so on; along a
    # column likewise. A walk along rows and columns in turn returns to its start.
    across, down = _pairs(np.lexsort((xs, ys))), _pairs(np.lexsort((ys, xs)))
    seen = np.zeros(len(points), np.bool_)
    found = []
    for start in range(len(points)):
        if seen[start]:
            continue
        loop, at = [], start
        while not seen[at]:
            after = int(across[at])
            seen[[at, after]] = True
            loop += [at, after]
            at = int(down[after])
        found.append(points[loop])
    return found


def _pairs(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the partner of each point; pairs are neighbours in the given order."""
    partner = np.empty_like(order)
    partner[order[0::2]], partner[order[1::2]] = order[1::2], order[0::2]
    return partner


def join_outlines(loops: Sequence[Points]) -> Points:
    """Return one polygon of several outlines, joined by edges that are traversed in both directions.

    These have no area, so the even-odd rule fills the same pixels. Outlines are joined at their nearest points.
    """
    joined = loops[0]
    for loop in loops[1:]:
        near = [((joined - point) ** 2).sum(1) for point in loop]
        own = int(np.argmin([distances.min() for distances in near]))
        at = int(near[own].argmin())
        around = np.concatenate([loop[own:], loop[: own + 1]])
        joined = np.concatenate([joined[: at + 1], around, joined[at:]])
    return joined
