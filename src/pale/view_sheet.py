"""A `Look` as a picture and as a page: pales, attention, rollout and Grad-CAM over the photo.

The page is one file without a server or a network. It holds the photo, the queries and keys of every block
in 16 bits, and Grad-CAM maps in 8; what a point sees is computed in the browser from these by
`pages/attention.js`, which the tests compare with the operator.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .view import FAINT, INK, _dot, _text
from .view_attention import Array, Block, Glance, Look, chosen_heads

Point = tuple[float, float]
Pixels = NDArray[np.uint8]

PAGES = Path(__file__).parent / "pages"
# As in the page. The ramp is inferno's, which grows in lightness from end to end.
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
CLASSES = 6  # for Grad-CAM in the page
MARGIN, GAP, HEADER, CAPTION = 40, 18, 150, 54
PANEL, NARROW, LABEL = 300, 170, 34  # pixels; many panels are narrow
MOST_PHOTO = 1024  # pixels of the longer side of the photo in a page


def sheet(
    look: Look,
    point: Point | None = None,
    *,
    stage: int | None = None,
    block: int = -1,
    head: str = "mean",
    number: int | None = None,
) -> Image.Image:
    """Pale, attention, rollout and Grad-CAM in rows; a column for each stage, or for each block of one stage.

    Args:
        look: what was seen.
        point: (x, y) in pixels of the picture; the centre if not given.
        stage: from 0: show its blocks.
        block: from 0, -1 the last: of each stage.
        head: "mean", "rows", "columns", or a number from 1.
        number: the class of Grad-CAM; the best if not given.
    """
    point = centre(look) if point is None else point
    columns = _columns(look, stage, block)
    number = look.scores[0].number if number is None else number
    h, w = look.image.shape[:2]
    width = PANEL if len(columns) <= 4 else NARROW
    panel = (width, max(1, round(width * h / w)))
    rows = _rows(look, point, columns, stage is not None, head, number)
    size = (
        2 * MARGIN + len(columns) * (panel[0] + GAP) - GAP,
        HEADER + len(rows) * (LABEL + panel[1] + CAPTION),
    )
    image = Image.new("RGB", (max(size[0], 760), size[1]), "white")
    _header(image, look, point)
    y = HEADER
    for title, cells in rows:
        _text(image, MARGIN, y + 6, 19, INK, ("", title))
        for n, (overlay, stride, caption, dot) in enumerate(cells):
            x = MARGIN + n * (panel[0] + GAP)
            image.paste(laid_over(look.image, overlay, stride, panel), (x, y + LABEL))
            if dot:
                where = _shown(look, point, panel)
                _dot(image, (x + where[0], y + LABEL + where[1]), max(4, panel[0] / 60))
            _text(image, x, y + LABEL + panel[1] + 9, 14, FAINT, ("", caption))
        y += LABEL + panel[1] + CAPTION
    return image


Cell = tuple[Array, int, str, bool]  # overlay (h, w, 4), stride, caption, with the point


def _columns(look: Look, stage: int | None, block: int) -> list[tuple[int, int]]:
    """(stage, block) of each column."""
    if stage is not None:
        look.block(stage)
        return [(stage, n) for n in range(len(look.stages[stage]))]
    found = []
    for s, blocks in enumerate(look.stages):
        n = len(blocks) - 1 if block < 0 else min(block, len(blocks) - 1)
        found.append((s, n))
    return found


def _rows(
    look: Look,
    point: Point,
    columns: Sequence[tuple[int, int]],
    one_stage: bool,
    head: str,
    number: int,
) -> list[tuple[str, list[Cell]]]:
    pales, weights, rollouts, cams = [], [], [], []
    name = next(s.name for s in look.scores if s.number == number)
    for s, b in columns:
        at, stride, chosen = look.token(point, s), look.strides[s], look.block(s, b)
        seen = look.region(s, at, b)
        where = f"block {b + 1}" if one_stage else f"stage {s + 1}, block {b + 1}"
        tokens = int(seen.any(0).sum())
        pales.append((pale_colours(chosen, seen), stride, f"{where}: {tokens:,} tokens", True))
        heads = list(chosen_heads(chosen, head))
        mean, mask = look.weights(s, at, b)[heads].mean(0), np.asarray(seen[heads].any(0))
        caption = f"{where}: largest {100 * mean.max():.3g} %"
        weights.append((heat(mean, mask), stride, caption, True))
    for s in dict.fromkeys(s for s, _ in columns):
        rolled = look.rollout(s, look.token(point, s))
        caption = f"from stage {s + 1} to stage 1: largest {100 * rolled.max():.3g} %"
        rollouts.append((heat(rolled), look.strides[0], caption, True))
        cam = look.grad_cam(number, s)
        cams.append((heat(cam), look.strides[s], f"map of stage {s + 1}", False))
    which = {"mean": "mean of the heads", "rows": "heads in rows", "columns": "heads in columns"}
    return [
        ("Pale: the tokens it attends to", pales),
        (f"Attention: {which.get(head, f'head {head}')}", weights),
        ("Rollout: where its content comes from", rollouts),
        (f"Grad-CAM: what speaks for {name}", cams),
    ]


def _header(image: Image.Image, look: Look, point: Point) -> None:
    x, y = point
    _text(image, MARGIN, 32, 32, INK, ("", "What one token sees"))
    _text(image, MARGIN, 78, 18, FAINT, ("", f"{told(look)}; point {x:.0f}, {y:.0f}"))
    best = ", ".join(f"{s.name} {100 * s.share:.1f} %" for s in look.scores[:3])
    trained = (
        best if look.loaded.trained else "untrained weights: pales are true, the rest is random"
    )
    row, column = (_hex(TINTS[kind]) for kind in ("row", "column"))
    _text(image, MARGIN, 108, 18, INK, (row, "rows"), (column, "columns"), (_hex(BOTH), "both"))
    _text(image, MARGIN + 260, 108, 18, INK, ("", trained))


def told(look: Glance) -> str:
    """The model and the picture, in a line."""
    h, w = look.image.shape[:2]
    width, height = look.picture.size
    return f"{look.loaded.name}, {look.loaded.kind}; photo {width} x {height}, seen at {w} x {h}"


def centre(look: Glance) -> Point:
    """The middle of the picture."""
    return look.picture.width // 2, look.picture.height // 2


def _shown(look: Look, point: Point, panel: tuple[int, int]) -> Point:
    width, height = look.picture.size
    return (point[0] + 0.5) * panel[0] / width, (point[1] + 0.5) * panel[1] / height


def pale_colours(block: Block, seen: NDArray[np.bool_]) -> Array:
    """The tokens seen, (heads, h, w), as colours by direction, (h, w, 4)."""
    out = np.empty((*seen.shape[1:], 4), np.float32)
    out[:] = (*DARK, 0.74)
    parts = {block.kind(n): seen[n] for n in range(block.heads)}
    for kind, part in parts.items():
        out[part] = (*TINTS[kind], 0.56)
    if len(parts) == 2:
        out[parts["row"] & parts["column"]] = (*BOTH, 0.56)
    return out


def heat(values: Array, mask: NDArray[np.bool_] | None = None) -> Array:
    """Values as colours, (h, w, 4), the largest at the bright end, by the square root; dark outside `mask`."""
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


def laid_over(image: Pixels, overlay: Array, stride: int, size: tuple[int, int]) -> Image.Image:
    """The image under an overlay of tokens, which are `stride` pixels wide, at `size` (width, height)."""
    h, w = image.shape[:2]
    ground = Image.fromarray(image).resize(size, Image.Resampling.LANCZOS)
    # The token under the middle of each pixel.
    i = ((np.arange(size[1]) + 0.5) * h / size[1] / stride).astype(int).clip(0, len(overlay) - 1)
    j = ((np.arange(size[0]) + 0.5) * w / size[0] / stride).astype(int)
    cells = overlay[i[:, None], j.clip(0, overlay.shape[1] - 1)[None]]
    alpha = cells[..., 3:]
    mixed = np.asarray(ground) * (1 - alpha) + cells[..., :3] * alpha
    return Image.fromarray(mixed.round().astype(np.uint8))


def page(
    look: Look,
    point: Point | None = None,
    *,
    stage: int | None = None,
    block: int = -1,
    head: str = "mean",
    number: int | None = None,
    title: str = "",
) -> str:
    """The interactive page; it starts at what the arguments of `sheet` say."""
    point = centre(look) if point is None else point
    start = 2 if stage is None else stage
    if stage is None:
        start = min(start, len(look.stages) - 1)
    look.block(start, block if stage is not None else -1)
    look.token(point, 0)
    for blocks in look.stages if stage is None else [look.stages[start]]:
        chosen_heads(blocks[min(block, len(blocks) - 1) if block >= 0 else -1], head)
    numbers = [s.number for s in look.scores[:CLASSES]]
    if number is not None:
        numbers = [number, *(n for n in numbers if n != number)]
    by_number = {s.number: s for s in look.scores}
    h, w = look.image.shape[:2]
    width, height = look.picture.size
    data: dict[str, Any] = {
        "about": ", ".join(filter(None, [title, told(look)])),
        "trained": look.loaded.trained,
        "share": "share of pixels" if look.loaded.kind == "segmentation" else "probability",
        "photo": [width, height],
        "width": w,
        "height": h,
        "image": jpeg(look.picture),
        "stages": [stage_data(look, s) for s in range(len(look.stages))],
        "classes": [
            {
                "name": by_number[n].name,
                "share": round(by_number[n].share, 4),
                "maps": _cams(look, n),
            }
            for n in numbers
        ],
        "start": {
            "mode": "attention",
            "stage": start,
            "blocks": [b for _, b in _columns(look, None, block)],
            "head": head,
            "x": (point[0] + 0.5) * w / width,
            "y": (point[1] + 0.5) * h / height,
        },
    }
    text = (PAGES / "attention.html").read_text(encoding="utf-8")
    core = (PAGES / "attention.js").read_text(encoding="utf-8")
    # A class may be called "</script>".
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"__TITLE__": escape(f"{title or 'photo'}: what one token sees"), "__CORE__": core}
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text.replace("__DATA__", packed)


def stage_data(look: Glance, stage: int, last: bool = False) -> dict[str, Any]:
    """What `pages/attention.js` needs to know of a stage, as JSON holds it; of its last block, or of all."""
    blocks = look.stages[stage][-1:] if last else look.stages[stage]
    h, w = blocks[0].q.shape[:2]
    return {
        "h": h,
        "w": w,
        "stride": look.strides[stage],
        "blocks": [
            {
                "heads": block.heads,
                "d": block.q.shape[3],
                "scope": block.region.scope,
                "grouping": block.region.grouping,
                "pale": list(block.region.pale_size),
                "q": _half(block.q.numpy() * block.q.shape[3] ** -0.5),
                "k": _half(block.k.numpy()),
            }
            for block in blocks
        ],
    }


def _half(values: Array) -> str:
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


def _cams(look: Look, number: int) -> list[str]:
    maps = []
    for stage in range(len(look.stages)):
        cam = look.grad_cam(number, stage)
        scaled = cam * (255 / cam.max()) if cam.max() > 0 else cam
        maps.append(base64.b64encode(scaled.round().astype(np.uint8).tobytes()).decode())
    return maps


def jpeg(picture: Image.Image) -> str:
    """A picture, made small, as a data URL."""
    small = picture.copy()
    small.thumbnail((MOST_PHOTO, MOST_PHOTO))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=88)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def _hex(colour: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def save(look: Look, path: str | Path, point: Point | None = None, **options: Any) -> Path:
    """Write the page (.html) or the sheet (a suffix that Pillow writes); `options` as `page` and `sheet` take them."""
    path = Path(path)
    html = check_suffix(path)
    title = options.pop("title", "")
    if html:
        made: str | Image.Image = page(look, point, title=title, **options)
    else:
        made = sheet(look, point, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(made, str):
        path.write_text(made, encoding="utf-8")
    else:
        made.save(path)
    return path


def check_suffix(path: Path) -> bool:
    """Whether it is a page's; raises if it is no picture's either."""
    if path.suffix.lower() in (".html", ".htm"):
        return True
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(
            f"the suffix must be .html or name an image format that Pillow writes, got {path.name!r}; use .png"
        )
    return False
