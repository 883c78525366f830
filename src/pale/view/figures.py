"""The tokens that one token attends to: Figure 1 of the paper for any model, image size and token.

There is one panel for each attention mode, on the token map of a stage. The attended tokens come from
`Region.members`, the definition that the back-ends are tested against; this file only adds colour.
Cells are whole pixels, so that tests can read a panel back exactly; dot and letters are supersampled.
Tints differ in lightness as well as in hue, for colour-blind readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageColor
from torch import Tensor

from ..errors import SettingsError
from ..model.pale_transformer import AttentionMode, PaleConfig
from ..ops.pale_attention.region import Region
from .drawing import FAINT, INK, check_image_suffix, draw_dot, draw_text

Pair = tuple[int, int]
Maps = dict[str, Tensor]  # boolean, (h, w), by part

# Name in the paper, and a description.
MODES: dict[AttentionMode, tuple[str, str]] = {
    "axial": ("Axial Self-Attention", "one row and one column, half the heads each"),
    "cross": (
        "Cross-Shaped Window Self-Attention",
        "adjacent rows and columns, half the heads each",
    ),
    "sequential": ("Sequential PS-Attention", "rows and columns alternate from block to block"),
    "vanilla": ("Vanilla PS-Attention", "the whole pale, all heads"),
    "parallel": ("Parallel PS-Attention", "interlaced rows and columns, half the heads each"),
}
LABELS = {"row": "rows", "column": "columns", "pale": "its pale"}
LABELS |= {"row pale": "of its row", "column pale": "of its column"}
# First part, second part, tokens in both. Pink is the paper's colour for a pale.
DIRECTION_TINTS = ("#8dbbe0", "#f4c95d", "#4f6b93")
PALE_TINTS = ("#bf659b", "#e9b4cf", "#6f2c59")
UNATTENDED = "#eff1f3"

MAX_SIDE = 512  # tokens; a cell then has two pixels
MAX_WIDTH, MARGIN, GAP = 2400, 48, 44  # pixels, like the sizes below
HEADER, CAPTION, CAPTION_WIDTH = 206, 172, 425
GOOD_HEIGHT, MAX_PANEL, MAX_CELL = 1600, 720, 60


def attended_tokens(
    config: PaleConfig, h: int, w: int, *, stage: int, at: Pair
) -> dict[AttentionMode, Maps]:
    """Return the tokens that `at` (row, column) of an `h` x `w` map attends to in each mode.

    Parts are "row" and "column", for halves of the heads or, in sequential mode, for alternating blocks;
    vanilla has "pale", or "row pale" and "column pale" if row and column lie in two pales.
    """
    maps: dict[AttentionMode, Maps] = {}
    for mode in MODES:
        other = _in_mode(config, mode)
        maps[mode] = {}
        for block in range(min(2, config.depths[stage])):
            maps[mode] |= _parts(other.region(stage, block), h, w, at)
    return maps


def _in_mode(config: PaleConfig, mode: AttentionMode) -> PaleConfig:
    """Return the config in another mode; with the pale size of the paper if one of the two modes is axial."""
    size = None if "axial" in (mode, config.attention) else config.pale_size
    two = (2,) * len(config.depths)  # heads do not change the tokens; two heads fit every mode
    return replace(config, attention=mode, pale_size=size, channels=two, heads=two)


def _parts(region: Region, h: int, w: int, at: Pair) -> Maps:
    row, column = (int(group[x]) for group, x in zip(region.groups(h, w), at, strict=True))
    group = {"row": row, "column": column}
    if region.scope != "pale":
        return {kind: region.members(kind, h, w)[group[kind]] for kind in region.kinds}
    pales = region.members("pale", h, w)
    if row == column:
        return {"pale": pales[row]}
    return {f"{way} pale": pales[group[way]] for way in group}


@dataclass(frozen=True)
class Layout:
    """Positions in pixels."""

    cell: int  # side of a token, including the gap to the next one
    gap: int
    size: Pair  # width and height of the image
    origins: dict[AttentionMode, Pair]  # left and upper edge of each panel

    def centre(self, mode: AttentionMode, i: int, j: int) -> tuple[float, float]:
        """Return the centre (x, y) of the token in row `i`, column `j`."""
        (x, y), half = self.origins[mode], (self.cell - self.gap) / 2
        return x + j * self.cell + half, y + i * self.cell + half


def layout(h: int, w: int) -> Layout:
    """Return the layout with the largest cells within `MAX_WIDTH`, in one or several rows of panels."""
    choices = []
    for across in (5, 3, 2):
        slot = (MAX_WIDTH - 2 * MARGIN - (across - 1) * GAP) // across
        cell = min(slot // w, max(2, MAX_PANEL // h), MAX_CELL)
        height = HEADER + -(-len(MODES) // across) * (cell * h + CAPTION + GAP // 2)
        choices.append((cell >= 2, height <= GOOD_HEIGHT, cell, across, height))
    *_, cell, across, height = max(choices)
    step = max(cell * w, CAPTION_WIDTH) + GAP, cell * h + CAPTION + GAP // 2
    origins = {
        mode: (MARGIN + n % across * step[0], HEADER + n // across * step[1])
        for n, mode in enumerate(MODES)
    }
    gap = 0 if cell < 5 else 1 if cell < 20 else 2
    return Layout(cell, gap, (2 * MARGIN + across * step[0] - GAP, height), origins)


def draw_pales(
    config: PaleConfig, size: Pair, *, stage: int = 0, at: Pair | None = None
) -> Image.Image:
    """Draw the tokens that one token attends to in each attention mode, as in Figure 1 of the paper.

    Args:
        config: the architecture; its own mode is marked, the others use its pale size.
        size: height and width of the image for the model.
        stage: number of the stage from 0.
        at: row and column on the map of the stage, from 0; default: the centre.
    """
    h, w = _map(config, size, stage)
    i, j = at = (h // 2, w // 2) if at is None else at
    if not (0 <= i < h and 0 <= j < w):
        raise SettingsError(
            f"at must be (row, column) on the {h} x {w} map of stage {stage + 1}, "
            f"(0, 0) to ({h - 1}, {w - 1}), got {at}; leave it out for the centre"
        )
    plan = layout(h, w)
    image = Image.new("RGB", plan.size, "white")
    pale_size = _in_mode(config, "parallel").pale_sizes[stage]
    where = f"stage {stage + 1}, map {h} x {w} of an image of {size[0]} x {size[1]}"
    facts = f"{where}, pale size {pale_size}, token in row {i}, column {j} (from 0)"
    draw_text(image, MARGIN, 34, 38, INK, ("", "Attention of one token"))
    draw_text(image, MARGIN, 88, 23, FAINT, ("", facts))
    draw_dot(image, (MARGIN + 9, 147), 9)
    row, column, both = DIRECTION_TINTS
    key = (row, "by rows"), (column, "by columns"), (both, "by both"), (UNATTENDED, "not attended")
    draw_text(image, MARGIN + 28, 139, 21, INK, ("", "the token"), *key)
    for mode, parts in attended_tokens(config, h, w, stage=stage, at=at).items():
        x, y = plan.origins[mode]
        image.paste(_panel(parts, plan), (x, y))
        draw_dot(image, plan.centre(mode, i, j), max(6.0, 0.27 * plan.cell))
        _caption(image, x, y + h * plan.cell, mode, parts, own=config.attention == mode)
    return image


def save_pales(
    config: PaleConfig, size: Pair, path: str | Path, *, stage: int = 0, at: Pair | None = None
) -> None:
    """Write `draw_pales` to a file; its suffix gives the format, and its folder is created if needed."""
    path = Path(path)
    check_image_suffix(path)
    image = draw_pales(config, size, stage=stage, at=at)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def _map(config: PaleConfig, size: Pair, stage: int) -> Pair:
    """Return height and width of the map of a stage; raise SettingsError if it cannot be drawn."""
    n = len(config.depths)
    if not 0 <= stage < n:
        raise SettingsError(
            f"the model has {n} stages and no stage {stage + 1}; choose from 1 to {n} "
            f"(in Python, stage=0 to {n - 1}, got {stage})"
        )
    if min(size) < 1:
        raise SettingsError(f"height and width must be at least 1, got {size=}; the paper uses 224")
    h, w = config.maps(*size)[stage]
    if max(h, w) > MAX_SIDE:
        raise SettingsError(
            f"a map of at most {MAX_SIDE} tokens per side can be drawn, got {h} x {w} in stage "
            f"{stage + 1} for {size=}; choose a later stage or a smaller image"
        )
    return h, w


def _tints(parts: Maps) -> tuple[str, ...]:
    return DIRECTION_TINTS if parts.keys() <= {"row", "column"} else PALE_TINTS


def _panel(parts: Maps, plan: Layout) -> Image.Image:
    """Draw the map, one cell per token."""
    first, *rest = parts.values()
    index = first.int() + sum(2 * second for second in rest)
    h, w = index.shape
    image = Image.frombytes("P", (w, h), bytes(index.flatten().tolist()))
    image.putpalette([c for tint in (UNATTENDED, *_tints(parts)) for c in ImageColor.getrgb(tint)])
    image = image.convert("RGB").resize((w * plan.cell, h * plan.cell), Image.Resampling.NEAREST)
    for n in range(plan.gap):
        for x in range(plan.cell - 1 - n, image.width, plan.cell):
            image.paste("white", (x, 0, x + 1, image.height))
        for y in range(plan.cell - 1 - n, image.height, plan.cell):
            image.paste("white", (0, y, image.width, y + 1))
    return image


def _caption(
    image: Image.Image, x: int, y: int, mode: AttentionMode, parts: Maps, *, own: bool
) -> None:
    (name, note), in_turn, maps = MODES[mode], mode == "sequential", list(parts.values())
    total = maps[0].numel()
    # Each number once, rows first.
    counts = dict.fromkeys(int(m.sum()) for m in (maps if in_turn else [maps[0] | maps[-1]]))
    tokens = " or ".join(f"{n:,}" for n in counts) + f" of {total:,} tokens"
    share = " or ".join(f"{100 * n / total:.1f}" for n in counts) + "%"
    share += " in a block" * (in_turn and len(counts) == 1)
    key = [f"{LABELS[part]}: {int(m.sum()):,}" for part, m in parts.items()]
    if len(parts) == 2:
        key.append(f"both: {int((maps[0] & maps[1]).sum()):,}")
        note = "the pales of its row and column, all heads" if "row pale" in parts else note
    elif in_turn:
        note = "rows only, since the stage has one block"
    draw_text(image, x, y + 18, 25, INK, ("", name))
    draw_text(image, x, y + 51, 19, FAINT, ("", f'attention="{mode}"' + ", this model" * own))
    draw_text(image, x, y + 82, 21, INK, ("", f"{tokens}, {share}"))
    draw_text(image, x, y + 112, 18, INK, *zip(_tints(parts), key, strict=False))
    draw_text(image, x, y + 138, 18, FAINT, ("", note))
