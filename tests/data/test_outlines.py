"""Outlines of masks: filled again, they are the mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pale.data import rle
from pale.data.outlines import join_outlines, outlines


def filled(loops, shape) -> np.ndarray:
    """Fill by the even-odd rule: a pixel is inside where an odd number of edges is to the left of its centre."""
    h, w = shape
    out = np.zeros(shape, np.uint8)
    ys, xs = np.mgrid[:h, :w] + 0.5
    for loop in loops:
        for (x_0, y_0), (_, y_1) in zip(loop, np.roll(loop, -1, 0), strict=True):
            out ^= ((ys > min(y_0, y_1)) & (ys < max(y_0, y_1)) & (xs > x_0)).astype(np.uint8)
    return out


@given(st.integers(0, 100_000))
def test_outlines_filled_again_are_the_mask(seed):
    rng = np.random.default_rng(seed)
    mask = (rng.random(tuple(rng.integers(1, 25, 2))) < rng.random()).astype(np.uint8)
    loops = outlines(mask)
    assert np.array_equal(filled(loops, mask.shape), mask)
    for loop in loops:  # edges run along rows and columns in turn
        steps = np.roll(loop, -1, 0) - loop
        assert ((steps == 0).sum(1) == 1).all()
    if loops:
        polygon = join_outlines(loops).astype(float).ravel().tolist()
        assert np.array_equal(rle.draw([polygon], mask.shape), mask)


def test_a_mask_without_pixels_has_no_outline():
    assert outlines(np.zeros((3, 4))) == []


@pytest.mark.parametrize(("hole", "loops"), [(False, 1), (True, 2)])
def test_a_rectangle_has_four_corners_and_a_hole_is_an_outline(hole, loops):
    mask = np.zeros((9, 12), np.uint8)
    mask[2:8, 3:11] = 1
    mask[4:6, 5:7] = not hole
    found = outlines(mask)
    assert len(found) == loops
    assert {tuple(p) for p in found[0].tolist()} == {(3, 2), (11, 2), (11, 8), (3, 8)}
