"""The tokens that a token attends to, as maps and as pixels."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageColor
from torch import Tensor

from pale.model.pale_transformer import PALE_B, PALE_NANO, PALE_T, AttentionMode, PaleConfig
from pale.ops.pale_attention.region import Region
from pale.view.drawing import DOT
from pale.view.figures import (
    CAPTION,
    DIRECTION_TINTS,
    GAP,
    HEADER,
    MARGIN,
    MAX_WIDTH,
    MODES,
    PALE_TINTS,
    UNATTENDED,
    attended_tokens,
    draw_pales,
    layout,
    save_pales,
)

# Image size, stage, token, pale size: dividing, odd, ragged, wide, tall, smaller than the pale.
CASES = {
    "56x56": ((224, 224), 0, (28, 28), 7),
    "56x56-two-pales": ((224, 224), 0, (20, 37), 7),
    "7x7-corner": ((224, 224), 3, (0, 6), 7),
    "12x16-odd-image": ((187, 251), 2, (11, 0), 5),
    "47x63-ragged": ((187, 251), 0, (11, 40), 9),
    "32x128-wide": ((512, 2048), 2, (16, 64), 7),
    "128x512-large": ((512, 2048), 0, (60, 250), 7),
    "112x28-tall": ((448, 112), 0, (111, 27), 6),
    "3x5-smaller-than-the-pale": ((96, 160), 3, (1, 2), 7),
    "1x1": ((32, 32), 3, (0, 0), 7),
}
each_case = pytest.mark.parametrize("case", CASES)


def setup(case: str) -> tuple[PaleConfig, tuple[int, int], int, tuple[int, int]]:
    """Config, image size, stage and token of a case."""
    size, stage, at, pale_size = CASES[case]
    return replace(PALE_T, pale_size=pale_size), size, stage, at


@cache
def drawn(case: str) -> Image.Image:
    """The figure of a case."""
    config, size, stage, at = setup(case)
    return draw_pales(config, size, stage=stage, at=at)


def expected(mode: AttentionMode, s: int, h: int, w: int, at: tuple[int, int]) -> list[Tensor]:
    """The one or two maps of a mode: every group or pale of the definition that holds the token."""
    i, j = at
    if mode == "vanilla":
        members = Region((s, s), "pale").members("pale", h, w)
        return list(members[members[:, i, j]])
    s = 1 if mode == "axial" else s
    region = Region((s, s), "parallel", "contiguous" if mode == "cross" else "interlaced")
    members = [region.members(kind, h, w) for kind in ("row", "column")]
    return [groups[groups[:, i, j]][0] for groups in members]


@each_case
@pytest.mark.parametrize("mode", MODES)
def test_a_token_attends_to_the_groups_of_the_region_that_hold_it(
    mode: AttentionMode, case: str
) -> None:
    config, size, stage, at = setup(case)
    h, w = config.maps(*size)[stage]
    parts = attended_tokens(config, h, w, stage=stage, at=at)[mode]
    maps = expected(mode, config.pale_sizes[stage], h, w, at)
    assert len(parts) == len(maps)
    assert all(any(torch.equal(part, map_) for map_ in maps) for part in parts.values())
    assert all(part[at] for part in parts.values())


def test_parts_are_named_by_direction() -> None:
    maps = attended_tokens(PALE_T, 56, 56, stage=0, at=(20, 37))
    for mode in ("axial", "cross", "sequential", "parallel"):
        assert list(maps[mode]) == ["row", "column"]
        assert maps[mode]["row"][20].all()
        assert maps[mode]["column"][:, 37].all()
    assert list(maps["vanilla"]) == ["row pale", "column pale"]
    assert maps["vanilla"]["row pale"][20].all()
    assert maps["vanilla"]["column pale"][:, 37].all()


def test_a_token_whose_row_and_column_share_a_pale_has_one_pale() -> None:
    assert list(attended_tokens(PALE_T, 56, 56, stage=0, at=(20, 36))["vanilla"]) == ["pale"]


def test_interlaced_rows_are_equally_spaced_and_cross_shaped_ones_adjacent() -> None:
    maps = attended_tokens(PALE_T, 56, 56, stage=0, at=(20, 37))
    rows = {
        mode: maps[mode]["row"].all(1).nonzero().flatten().tolist()
        for mode in ("parallel", "cross")
    }
    assert rows == {"parallel": [4, 12, 20, 28, 36, 44, 52], "cross": [14, 15, 16, 17, 18, 19, 20]}


def test_counts_at_the_papers_size_are_those_of_its_formula() -> None:
    maps = attended_tokens(PALE_T, 56, 56, stage=0, at=(28, 28))
    union = {mode: int(torch.stack([*parts.values()]).any(0).sum()) for mode, parts in maps.items()}
    pale = 7 * 56 + 7 * 56 - 7 * 7  # s_r w + s_c h - s_r s_c
    assert union == {
        "axial": 111,
        "cross": pale,
        "sequential": pale,
        "vanilla": pale,
        "parallel": pale,
    }


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PALE_B, id="other-heads"),
        pytest.param(replace(PALE_T, attention="axial"), id="axial"),
        pytest.param(replace(PALE_T, attention="axial", pale_size=1), id="axial-stated"),
        pytest.param(replace(PALE_T, attention="sequential", heads=(1, 1, 1, 1)), id="odd-heads"),
        pytest.param(replace(PALE_T, pale_size=(7, 3, 5, 1)), id="one-size-a-stage"),
    ],
)
def test_every_config_shows_all_modes_as_pale_t_does(config: PaleConfig) -> None:
    ours = attended_tokens(config, 30, 41, stage=0, at=(3, 40))
    theirs = attended_tokens(PALE_T, 30, 41, stage=0, at=(3, 40))
    for mode in MODES:
        assert ours[mode].keys() == theirs[mode].keys()
        assert all(torch.equal(ours[mode][part], theirs[mode][part]) for part in ours[mode])


def test_a_stage_of_one_block_is_never_sequential_by_columns() -> None:
    config = replace(PALE_NANO, depths=(1, 2, 2, 2))
    assert list(attended_tokens(config, 8, 8, stage=0, at=(0, 0))["sequential"]) == ["row"]
    assert list(attended_tokens(config, 8, 8, stage=1, at=(0, 0))["sequential"]) == [
        "row",
        "column",
    ]
    assert draw_pales(config, (32, 32)).size == draw_pales(PALE_NANO, (32, 32)).size


@each_case
@pytest.mark.parametrize("mode", MODES)
def test_cells_have_the_tint_of_the_attended_tokens(mode: AttentionMode, case: str) -> None:
    config, size, stage, at = setup(case)
    h, w = config.maps(*size)[stage]
    plan = layout(h, w)
    parts = attended_tokens(config, h, w, stage=stage, at=at)[mode]
    tints = [UNATTENDED, *(PALE_TINTS if mode == "vanilla" else DIRECTION_TINTS)]
    colours = [ImageColor.getrgb(tint) for tint in tints]
    kind = sum(part.int() << n for n, part in enumerate(parts.values())).tolist()
    x, y = plan.origins[mode]
    pixels = drawn(case).crop((x, y, x + w * plan.cell, y + h * plan.cell)).load()
    near = 10 // plan.cell + 1  # cells that the dot may cover
    step = max(1, h * w // 5000) | 1
    for n in range(0, h * w, step):
        i, j = divmod(n, w)
        if max(abs(i - at[0]), abs(j - at[1])) > near:
            last = plan.cell - plan.gap - 1
            for corner in ((0, 0), (last, last)):
                where = j * plan.cell + corner[0], i * plan.cell + corner[1]
                assert pixels[where] == colours[kind[i][j]], (i, j)


@each_case
def test_the_red_dot_is_on_the_token(case: str) -> None:
    config, size, stage, at = setup(case)
    h, w = config.maps(*size)[stage]
    plan = layout(h, w)
    red = ImageColor.getrgb(DOT)
    for mode in MODES:
        x, y = plan.origins[mode]
        box = x - 9, y - 9, x + w * plan.cell + 9, y + h * plan.cell + 9
        panel = drawn(case).crop(box)
        found = [
            (n % panel.width, n // panel.width)
            for n, pixel in enumerate(zip(*[iter(panel.tobytes())] * 3, strict=True))
            if pixel == red
        ]
        centre = [(min(c) + max(c) + 1) / 2 for c in zip(*found, strict=True)]
        true = plan.centre(mode, *at)
        assert centre == pytest.approx([true[0] - box[0], true[1] - box[1]], abs=1)
        assert x + at[1] * plan.cell <= true[0] < x + (at[1] + 1) * plan.cell
        assert y + at[0] * plan.cell <= true[1] < y + (at[0] + 1) * plan.cell


LONG_CAPTIONS = {
    "212x210": ("sequential", 9, (848, 840), 0, (211, 0)),
    "100x140": ("sequential", 13, (400, 560), 0, (99, 3)),
    "140x100": ("vanilla", 19, (560, 400), 0, (77, 3)),
    "512x512": ("parallel", 7, (2048, 2048), 0, (511, 511)),
    "512x40": ("cross", 33, (2048, 160), 0, (0, 0)),
    "1x40": ("sequential", 3, (1, 160), 0, (0, 39)),
}


@pytest.mark.parametrize("case", [*CASES, *LONG_CAPTIONS])
def test_no_caption_reaches_the_next_panel_or_the_edge(case: str) -> None:
    if case in CASES:
        config, size, stage, _ = setup(case)
        image = drawn(case)
    else:
        attention, s, size, stage, at = LONG_CAPTIONS[case]
        config = replace(PALE_T, attention=attention, pale_size=s)
        image = draw_pales(config, size, stage=stage, at=at)
    h, w = config.maps(*size)[stage]
    plan = layout(h, w)
    strips = [(x - GAP // 2, y + h * plan.cell + 12, x - 1) for x, y in plan.origins.values()]
    right = image.width - MARGIN
    strips += [(right + 3, y + h * plan.cell + 12, image.width) for _, y in plan.origins.values()]
    for left, top, end in strips:
        strip = image.crop((left, top, end, top + CAPTION - 12))
        assert strip.getextrema() == ((255, 255),) * 3
    header = image.crop((right, 0, image.width, HEADER - 12))
    assert header.getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("h", [1, 7, 32, 56, 128, 200, 512])
@pytest.mark.parametrize("w", [1, 7, 28, 128, 320, 512])
def test_layout_keeps_to_the_width_and_panels_apart(h: int, w: int) -> None:
    plan = layout(h, w)
    assert plan.cell >= 2
    assert plan.size[0] <= MAX_WIDTH
    assert plan.size[1] <= 4000
    boxes = [
        (x, y, x + w * plan.cell, y + h * plan.cell + CAPTION) for x, y in plan.origins.values()
    ]
    for n, (left, top, right, bottom) in enumerate(boxes):
        assert left >= MARGIN
        assert right <= plan.size[0] - MARGIN
        assert bottom <= plan.size[1]
        for other in boxes[:n]:
            assert left >= other[2] + GAP or top >= other[3] or right + GAP <= other[0]


def test_square_maps_stand_in_one_row_and_wide_ones_wrap() -> None:
    assert len({y for _, y in layout(56, 56).origins.values()}) == 1
    assert len({y for _, y in layout(32, 128).origins.values()}) == 3
    assert layout(32, 128).cell == 8


def test_the_same_call_gives_the_same_bytes_and_the_default_token_is_the_centre() -> None:
    first = draw_pales(PALE_T, (224, 224), stage=1)
    assert first.tobytes() == draw_pales(PALE_T, (224, 224), stage=1, at=(14, 14)).tobytes()
    assert first.tobytes() != draw_pales(PALE_T, (224, 224), stage=1, at=(14, 15)).tobytes()
    assert first.mode == "RGB"


def test_the_models_own_mode_is_marked() -> None:
    parallel = draw_pales(PALE_T, (224, 224))
    vanilla = draw_pales(replace(PALE_T, attention="vanilla"), (224, 224))
    plan = layout(56, 56)
    for mode, (x, y) in plan.origins.items():
        box = x, y, x + 425, y + 56 * plan.cell + CAPTION
        same = parallel.crop(box).tobytes() == vanilla.crop(box).tobytes()
        assert same == (mode not in ("parallel", "vanilla"))


@pytest.mark.parametrize(
    ("size", "kwargs", "message"),
    [
        ((224, 224), {"stage": 4}, r"has 4 stages and no stage 5; choose from 1 to 4 .*got 4"),
        ((224, 224), {"stage": -1}, r"no stage 0; choose from 1 to 4"),
        (
            (224, 224),
            {"at": (56, 0)},
            r"56 x 56 map of stage 1, \(0, 0\) to \(55, 55\), got \(56, 0\)",
        ),
        ((224, 224), {"at": (0, -1)}, r"got \(0, -1\); leave it out for the centre"),
        ((224, 112), {"stage": 3, "at": (0, 4)}, r"7 x 4 map of stage 4"),
        ((0, 224), {}, r"at least 1, got size=\(0, 224\)"),
        ((2052, 64), {}, r"at most 512 tokens per side .* got 513 x 16 in stage 1 .*later stage"),
    ],
)
def test_what_cannot_be_drawn_says_why(
    size: tuple[int, int], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draw_pales(PALE_T, size, **kwargs)


def test_saving_makes_the_folder_and_keeps_every_pixel(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "pales.PNG"
    save_pales(PALE_T, (64, 96), path, stage=1, at=(2, 3))
    with Image.open(path) as image:
        assert image.tobytes() == draw_pales(PALE_T, (64, 96), stage=1, at=(2, 3)).tobytes()


@pytest.mark.parametrize("name", ["pales", "pales.txt", "pales.psd"])
def test_saving_under_a_suffix_that_names_no_image_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"format that Pillow writes, got '{name}'; use .png"):
        save_pales(PALE_T, (224, 224), tmp_path / "new" / name)
    assert not (tmp_path / "new").exists()
