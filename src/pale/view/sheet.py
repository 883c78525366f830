"""An `AttentionTrace` as one image: pales, attention, rollout and Grad-CAM over the photo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .attention import Array, AttentionTrace, BackboneTrace, Block, select_heads
from .drawing import FAINT, INK, draw_dot, draw_text

Point = tuple[float, float]
Pixels = NDArray[np.uint8]

PAGES = Path(__file__).parent / "pages"
# The same colours as on the page. The ramp is inferno, whose lightness grows from end to end.
RAMP = np.array(
    [
        (27, 12, 65),
        (74, 12, 107),
        (120, 28, 109),
        (165, 45, 96),
        (207, 68, 70),
        (237, 105, 37),
        (251, 155, 6),
        (247, 209, 61),
        (252, 255, 164),
    ],
    np.float32,
)
TINTS = {"row": (95, 165, 225), "column": (244, 196, 70), "pale": (214, 110, 170)}
BOTH, DARK = (138, 205, 140), (9, 12, 20)
MARGIN, GAP, HEADER, CAPTION = 40, 18, 150, 54  # pixels
PANEL, NARROW_PANEL, LABEL = 300, 170, 34  # pixels; more than four panels in a row are narrow
MIN_WIDTH = 760  # pixels


@dataclass(frozen=True)
class Panel:
    """One panel of the sheet.

    Attributes:
        overlay: colours and opacity of the tokens, (h, w, 4).
        stride: pixels from one token to the next.
        caption: text below the panel.
        dot: whether to draw the point.
    """

    overlay: Array
    stride: int
    caption: str
    dot: bool = True


def sheet(
    trace: AttentionTrace,
    point: Point | None = None,
    *,
    stage: int | None = None,
    block: int = -1,
    head: str = "mean",
    number: int | None = None,
) -> Image.Image:
    """Draw pale, attention, rollout and Grad-CAM in rows; a column is a stage, or a block of one stage.

    Args:
        trace: the attention to draw.
        point: (x, y) in pixels of the image; default: the centre.
        stage: number of a stage from 0, to show its blocks.
        block: number of the block from 0, of each stage; -1: the last.
        head: "mean", "rows", "columns", or a number from 1.
        number: class for Grad-CAM; default: the one with the highest score.
    """
    point = centre(trace) if point is None else point
    columns = column_blocks(trace, stage, block)
    number = trace.scores[0].number if number is None else number
    h, w = trace.pixels.shape[:2]
    width = PANEL if len(columns) <= 4 else NARROW_PANEL
    size = (width, max(1, round(width * h / w)))
    rows = [
        *_attention_rows(trace, point, columns, stage is not None, head),
        *_stage_rows(trace, point, list(dict.fromkeys(s for s, _ in columns)), number),
    ]
    whole = (
        2 * MARGIN + len(columns) * (size[0] + GAP) - GAP,
        HEADER + len(rows) * (LABEL + size[1] + CAPTION),
    )
    image = Image.new("RGB", (max(whole[0], MIN_WIDTH), whole[1]), "white")
    _draw_header(image, trace, point)
    for n, (title, panels) in enumerate(rows):
        y = HEADER + n * (LABEL + size[1] + CAPTION)
        draw_text(image, MARGIN, y + 6, 19, INK, ("", title))
        for column, panel in enumerate(panels):
            x = MARGIN + column * (size[0] + GAP)
            _draw_panel(image, panel, (x, y + LABEL), size, trace, point)
    return image


def _draw_panel(
    image: Image.Image,
    panel: Panel,
    origin: tuple[int, int],
    size: tuple[int, int],
    trace: AttentionTrace,
    point: Point,
) -> None:
    x, y = origin
    image.paste(overlay_tokens(trace.pixels, panel.overlay, panel.stride, size), origin)
    if panel.dot:
        width, height = trace.image.size
        dot = (point[0] + 0.5) * size[0] / width, (point[1] + 0.5) * size[1] / height
        draw_dot(image, (x + dot[0], y + dot[1]), max(4, size[0] / 60))
    draw_text(image, x, y + size[1] + 9, 14, FAINT, ("", panel.caption))


def column_blocks(trace: AttentionTrace, stage: int | None, block: int) -> list[tuple[int, int]]:
    """Return stage and block of each column: all blocks of one stage, or one block of every stage."""
    if stage is not None:
        trace.block(stage)
        return [(stage, n) for n in range(len(trace.stages[stage]))]
    found = []
    for s, blocks in enumerate(trace.stages):
        n = len(blocks) - 1 if block < 0 else min(block, len(blocks) - 1)
        found.append((s, n))
    return found


def _attention_rows(
    trace: AttentionTrace,
    point: Point,
    columns: Sequence[tuple[int, int]],
    one_stage: bool,
    head: str,
) -> list[tuple[str, list[Panel]]]:
    pales, weights = [], []
    for s, b in columns:
        at, stride, chosen = trace.token(point, s), trace.strides[s], trace.block(s, b)
        attended = trace.attended(s, at, b)
        where = f"block {b + 1}" if one_stage else f"stage {s + 1}, block {b + 1}"
        tokens = int(attended.any(0).sum())
        pales.append(Panel(pale_colours(chosen, attended), stride, f"{where}: {tokens:,} tokens"))
        heads = list(select_heads(chosen, head))
        mean, mask = trace.weights(s, at, b)[heads].mean(0), np.asarray(attended[heads].any(0))
        caption = f"{where}: maximum {100 * mean.max():.3g} %"
        weights.append(Panel(heat(mean, mask), stride, caption))
    which = {"mean": "mean over heads", "rows": "heads in rows", "columns": "heads in columns"}
    return [
        ("Pale: the tokens that it attends to", pales),
        (f"Attention: {which.get(head, f'head {head}')}", weights),
    ]


def _stage_rows(
    trace: AttentionTrace, point: Point, stages: Sequence[int], number: int
) -> list[tuple[str, list[Panel]]]:
    rollouts, cams = [], []
    for s in stages:
        rolled = trace.rollout(s, trace.token(point, s))
        caption = f"from stage {s + 1} to stage 1: maximum {100 * rolled.max():.3g} %"
        rollouts.append(Panel(heat(rolled), trace.strides[0], caption))
        cam = heat(trace.grad_cam(number, s))
        cams.append(Panel(cam, trace.strides[s], f"map of stage {s + 1}", dot=False))
    name = next(s.name for s in trace.scores if s.number == number)
    return [
        ("Rollout: where its content comes from", rollouts),
        (f"Grad-CAM: evidence for {name}", cams),
    ]


def _draw_header(image: Image.Image, trace: AttentionTrace, point: Point) -> None:
    x, y = point
    draw_text(image, MARGIN, 32, 32, INK, ("", "Attention of one token"))
    draw_text(image, MARGIN, 78, 18, FAINT, ("", f"{describe(trace)}; point {x:.0f}, {y:.0f}"))
    best = ", ".join(f"{s.name} {100 * s.share:.1f} %" for s in trace.scores[:3])
    untrained = "untrained weights: only the pales are meaningful"
    row, column = (_hex(TINTS[kind]) for kind in ("row", "column"))
    tints = (row, "rows"), (column, "columns"), (_hex(BOTH), "both")
    draw_text(image, MARGIN, 108, 18, INK, *tints)
    scores = best if trace.bundle.trained else untrained
    draw_text(image, MARGIN + 260, 108, 18, INK, ("", scores))


def describe(trace: BackboneTrace) -> str:
    """Return one line about the model and the image."""
    h, w = trace.pixels.shape[:2]
    width, height = trace.image.size
    bundle = trace.bundle
    return f"{bundle.name}, {bundle.kind}; photo {width} x {height}, resized to {w} x {h}"


def centre(trace: BackboneTrace) -> Point:
    """Return the centre of the image."""
    return trace.image.width // 2, trace.image.height // 2


def pale_colours(block: Block, attended: NDArray[np.bool_]) -> Array:
    """Return the attended tokens, (heads, h, w), as colours by direction, (h, w, 4)."""
    out = np.empty((*attended.shape[1:], 4), np.float32)
    out[:] = (*DARK, 0.74)
    parts = {block.kind(n): attended[n] for n in range(block.heads)}
    for kind, part in parts.items():
        out[part] = (*TINTS[kind], 0.56)
    if len(parts) == 2:
        out[parts["row"] & parts["column"]] = (*BOTH, 0.56)
    return out


def heat(values: Array, mask: NDArray[np.bool_] | None = None) -> Array:
    """Return colours, (h, w, 4), for the square root of values; the maximum is brightest, outside `mask` is dark."""
    top = float(values.max())
    v = np.sqrt(np.clip(values / top, 0, 1)) if top > 0 else np.zeros_like(values)
    at = v * (len(RAMP) - 1)
    low = np.minimum(at.astype(int), len(RAMP) - 2)
    part = (at - low)[..., None]
    colour = RAMP[low] * (1 - part) + RAMP[low + 1] * part
    alpha = (0.35 if mask is None else 0.45) + 0.4 * v
    out = np.concatenate([colour, alpha[..., None]], -1).astype(np.float32)
    if mask is not None:
        out[~mask] = (*DARK, 0.74)
    return out


def overlay_tokens(
    pixels: Pixels, overlay: Array, stride: int, size: tuple[int, int]
) -> Image.Image:
    """Return the image at `size` (width, height) under an overlay of tokens that are `stride` pixels wide."""
    h, w = pixels.shape[:2]
    ground = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
    # The token under the centre of each pixel.
    i = ((np.arange(size[1]) + 0.5) * h / size[1] / stride).astype(int).clip(0, len(overlay) - 1)
    j = ((np.arange(size[0]) + 0.5) * w / size[0] / stride).astype(int)
    cells = overlay[i[:, None], j.clip(0, overlay.shape[1] - 1)[None]]
    alpha = cells[..., 3:]
    mixed = np.asarray(ground) * (1 - alpha) + cells[..., :3] * alpha
    return Image.fromarray(mixed.round().astype(np.uint8))


def _hex(colour: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
