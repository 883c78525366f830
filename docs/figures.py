"""Draw the figures of concepts.md: `python docs/figures.py` writes docs/figures/*.svg.

The groups come from the operator's own `Region`, so the figures show what the code does.
docs/pales.png is made by `pale view pales pale_tiny --size 224 224 --at 20 37 -o docs/pales.png`,
docs/attention.jpg by `pale view attention examples/cat.jpg`, docs/predicted.jpg by `pale predict examples/cat.jpg`
with `--task segmentation` and `--task detection`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pale.ops.pale_attention.region import Region
from pale.view.drawing import FAINT, INK
from pale.view.figures import DIRECTION_TINTS, PALE_TINTS

FOLDER = Path(__file__).parent / "figures"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"
GROUPS = ("#8ab6dc", "#f3c65f", "#b7d58b", "#d99abf")
EMPTY, TOKEN = "#eceef0", "#d4151b"
SIDE, STEP = 12, 16  # tokens per side, pixels per token


def colour(value: tuple[int, ...] | str) -> str:
    """Return a colour in SVG notation."""
    return value if isinstance(value, str) else "#{:02x}{:02x}{:02x}".format(*value[:3])


def svg(name: str, title: str, w: int, h: int, parts: list[str]) -> None:
    """Write a figure; screen readers read its title."""
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
        f'role="img" font-family="{FONT}">\n<title>{title}</title>\n'
        f'<rect width="{w}" height="{h}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(text)


def text_line(
    x: float, y: float, text: str, size: int = 15, faint: bool = False, middle: bool = False
) -> str:
    """Return a line of text."""
    anchor = ' text-anchor="middle"' if middle else ""
    fill = colour(FAINT if faint else INK)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{anchor}>{text}</text>'


def cells(x: float, y: float, colours: list[list[str]], step: int = STEP) -> str:
    """Return a map of coloured tokens, as one path per colour."""
    paths: dict[str, list[str]] = {}
    for i, row in enumerate(colours):
        for j, fill in enumerate(row):
            side = step - 2
            paths.setdefault(fill, []).append(
                f"M{x + j * step:g} {y + i * step:g}h{side}v{side}h-{side}z"
            )
    return "\n".join(f'<path fill="{fill}" d="{"".join(d)}"/>' for fill, d in paths.items())


def dot(x: float, y: float, at: tuple[int, int], step: int = STEP) -> str:
    """Return the marker of the query token."""
    cx, cy = x + at[1] * step + step / 2 - 1, y + at[0] * step + step / 2 - 1
    return f'<circle cx="{cx:g}" cy="{cy:g}" r="{step * 0.45:g}" fill="{TOKEN}" stroke="white"/>'


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """Return an arrow."""
    head = f"M{x1 - 7:g} {y1 - 4:g}L{x1:g} {y1:g}L{x1 - 7:g} {y1 + 4:g}"
    return f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}{head}" fill="none" stroke="{colour(INK)}" stroke-width="1.5"/>'


def box(x: float, y: float, w: float, h: float, text: str, fill: str, below: str = "") -> str:
    """Return a labelled box for a part of the network."""
    lines = [
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" fill="{fill}"/>',
        text_line(x + w / 2, y + h / 2 + (5 if not below else -2), text, 15, middle=True),
    ]
    if below:
        lines.append(text_line(x + w / 2, y + h / 2 + 16, below, 12, faint=True, middle=True))
    return "\n".join(lines)


def by_group(group: Tensor) -> list[list[str]]:
    """Return the colours of a map of group numbers."""
    return [[GROUPS[int(g) % len(GROUPS)] for g in row] for row in group]


def groups() -> None:
    """Draw the token groups of four kinds of attention."""
    interlaced, contiguous = (Region((3, 3), "row", g) for g in ("interlaced", "contiguous"))  # type: ignore[arg-type]
    rows = [
        region.groups(SIDE, SIDE)[0][:, None].expand(SIDE, SIDE)
        for region in (interlaced, contiguous)
    ]
    columns = interlaced.groups(SIDE, SIDE)[1][None].expand(SIDE, SIDE)
    i = torch.arange(SIDE)
    windows = (i[:, None] // 6) * 2 + i[None] // 6
    panels = [
        ("Interlaced rows", "every 4th row is one group", rows[0]),
        ("Interlaced columns", "every 4th column is one group", columns),
        ("Stripes (CSWin)", "3 adjacent rows", rows[1]),
        ("Windows (Swin)", "6 x 6 tokens", windows),
    ]
    parts = []
    for n, (title, about, group) in enumerate(panels):
        x = 20 + n * 232
        parts += [
            text_line(x, 30, title),
            text_line(x, 50, about, 13, faint=True),
            cells(x, 64, by_group(group)),
        ]
    svg("groups", "Tokens of a 12 x 12 map by group, pale size 3", 930, 270, parts)


def region_colours(region: Region, kind: str, at: tuple[int, int], tint: str) -> list[list[str]]:
    """Return a map with the group of a token in colour."""
    row, column = (int(g[x]) for g, x in zip(region.groups(SIDE, SIDE), at, strict=True))
    member = region.members(kind, SIDE, SIDE)[row if kind == "row" else column]  # type: ignore[arg-type]
    return [[tint if m else EMPTY for m in line] for line in member.tolist()]


def modes() -> None:
    """Draw the tokens that the heads attend to in two blocks: parallel, sequential and vanilla."""
    at = (4, 7)
    rows, columns = DIRECTION_TINTS[:2]
    parallel, whole = Region((3, 3)), Region((3, 3), "pale")
    row = region_colours(parallel, "row", at, rows)
    column = region_colours(parallel, "column", at, columns)
    pale = [[EMPTY] * SIDE for _ in range(SIDE)]
    for k in {int(g[x]) for g, x in zip(whole.groups(SIDE, SIDE), at, strict=True)}:
        for i, line in enumerate(whole.members("pale", SIDE, SIDE)[k].tolist()):
            for j, member in enumerate(line):
                pale[i][j] = PALE_TINTS[0] if member else pale[i][j]
    lines = [
        (
            "Parallel (the paper's choice, default)",
            [(row, "half the heads"), (column, "the other half")],
            2,
        ),
        ("Sequential", [(row, "all heads"), (column, "all heads")], 1),
        ("Vanilla", [(pale, "all heads"), (pale, "all heads")], 1),
    ]
    parts, y, step = [], 20, 9
    for title, panels, a_block in lines:
        parts.append(text_line(20, y + 14, title))
        x = 20
        for block in (1, 2):
            shown = panels if a_block == 2 else [panels[block - 1]]
            for colours, who in shown:
                parts += [cells(x, y + 44, colours, step), dot(x, y + 44, at, step)]
                parts.append(text_line(x, y + 44 + SIDE * step + 14, who, 12, faint=True))
                x += SIDE * step + 16
            left = x - len(shown) * (SIDE * step + 16)
            parts.append(text_line(left, y + 36, f"block {block}", 13, faint=True))
            if block == 1:
                parts.append(arrow(x, y + 44 + SIDE * step / 2, x + 28, y + 44 + SIDE * step / 2))
                x += 44
        y += 196
    svg("modes", "Tokens that the heads attend to in two blocks, in three modes", 600, y, parts)


def block() -> None:
    """Draw a block: position encoding, attention and MLP, each with its residual connection."""
    line = f'stroke="{colour(INK)}" stroke-width="1.5" fill="none"'
    parts = [text_line(14, 96, "x", 17), arrow(30, 90, 60, 90)]
    x = 60
    names = [
        ("CPE", "3x3 depthwise", GROUPS[2], 110),
        ("LN, PS-Attention", "3 separable convs, pales", GROUPS[0], 190),
        ("LN, MLP", "c, R c, c, GELU", GROUPS[1], 140),
    ]
    for name, about, fill, w in names:
        parts += [box(x + 20, 62, w, 56, name, fill, about)]
        parts.append(f'<path d="M{x} 90H{x + 20}M{x} 90V30H{x + w + 46}V78" {line}/>')
        cx = x + w + 46
        parts.append(f'<path d="M{x + w + 20} 90H{cx - 11}" {line}/>')
        parts.append(f'<circle cx="{cx}" cy="90" r="11" {line}/>')
        parts.append(f'<path d="M{cx - 6} 90h12M{cx} 84v12" {line}/>')
        parts.append(arrow(cx + 11, 90, cx + 40, 90))
        x = cx + 36
    parts.append(text_line(78, 146, "position", 13, faint=True))
    parts.append(text_line(292, 146, "exchange between tokens", 13, faint=True))
    parts.append(text_line(568, 146, "each token separately", 13, faint=True))
    svg(
        "block",
        "A block of the Pale Transformer: CPE, attention and MLP, each added to its input",
        770,
        160,
        parts,
    )


def positions() -> None:
    """Draw the three position encodings."""
    at, blank = (5, 6), [[EMPTY] * SIDE for _ in range(SIDE)]
    near = [
        [GROUPS[2] if abs(i - at[0]) < 2 and abs(j - at[1]) < 2 else EMPTY for j in range(SIDE)]
        for i in range(SIDE)
    ]
    shades = [
        [f"#{250 - 9 * i:02x}{238 - 4 * (i + j):02x}{150 + 8 * j:02x}" for j in range(SIDE)]
        for i in range(SIDE)
    ]
    panels = [
        (
            'position="cpe"',
            "each block adds a 3x3 depthwise",
            "convolution of the neighbours",
            near,
        ),
        (
            'position="ape"',
            "each stage adds a learned map,",
            "resized to the input size",
            shades,
        ),
        ('position="none"', "only q, k, v and patch merging,", "which are convolutions too", blank),
    ]
    parts = []
    for n, (title, first, second, colours) in enumerate(panels):
        x = 20 + n * 262
        parts += [text_line(x, 30, title), cells(x, 46, colours), dot(x, 46, at)]
        parts += [
            text_line(x, 262, first, 13, faint=True),
            text_line(x, 280, second, 13, faint=True),
        ]
    svg("positions", "Three position encodings", 790, 296, parts)


if __name__ == "__main__":
    groups()
    modes()
    block()
    positions()
