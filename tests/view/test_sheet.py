"""Colours and panels of the sheet."""

import numpy as np
from view.traces import each_mode, traced

from pale.view.sheet import DARK, TINTS, heat, overlay_tokens, pale_colours, sheet


class TestSheet:
    def test_tokens_lie_where_their_pixels_are(self) -> None:
        overlay = np.zeros((3, 4, 4), np.float32)
        overlay[1, 2] = (255, 0, 0, 1)
        image = np.full((22, 30, 3), 7, np.uint8)  # the last tokens reach over the edge
        shown = np.asarray(overlay_tokens(image, overlay, 8, (60, 44)))
        red = np.zeros((44, 60), bool)
        red[16:32, 32:48] = True
        np.testing.assert_array_equal(shown[..., 0] == 255, red)
        assert (shown[~red] == 7).all()

    def test_colours_distinguish_rows_columns_and_both(self) -> None:
        one = traced()
        region = one.attended(0, (4, 5))
        colours = pale_colours(one.block(0), region)[..., :3]
        rows, columns = region
        assert (colours[rows & ~columns] == TINTS["row"]).all()
        assert (colours[columns & ~rows] == TINTS["column"]).all()
        assert (colours[~rows & ~columns] == DARK).all()

    def test_the_largest_value_is_the_brightest(self) -> None:
        values = np.random.default_rng(0).random((5, 6)).astype(np.float32)
        light = heat(values)[..., :3].mean(-1)
        assert light.argmax() == values.argmax()
        assert (heat(np.zeros((2, 2), np.float32)) >= 0).all()

    @each_mode
    def test_every_mode_has_a_sheet(self, attention: str) -> None:
        one = traced(attention)
        whole, blocks = sheet(one), sheet(one, (3, 4), stage=1)
        assert whole.size == blocks.size  # two stages; two blocks
        assert np.asarray(whole).std() > 20
