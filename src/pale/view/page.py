"""An `AttentionTrace` as an interactive page: one file without a server or a network.

The page holds the photo, the queries and keys of every block in 16 bits, and Grad-CAM maps in 8 bits. The browser
computes the attention of a point from these with `pages/attention.js`, which the tests compare with the operator.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
from PIL import Image

from ..core.data_urls import jpeg_data_url
from ..core.escaping import content_policy, escape_html
from ..core.plain_json import Json
from ..errors import SettingsError
from .attention import (
    Array,
    AttentionTrace,
    BackboneTrace,
    Block,
    select_heads,
    trace_attention,
)
from .drawing import check_image_suffix
from .settings import AttentionSettings
from .sheet import PAGES, Point, centre, column_blocks, describe, sheet

# Scripts that run; the one that holds the data has a type and does not run.
SCRIPT = re.compile("<script>(.*?)</script>", re.DOTALL)
MAX_CLASSES = 6  # with Grad-CAM maps
MAX_PHOTO = 1024  # pixels of the longer side of the photo


def page(
    trace: AttentionTrace,
    point: Point | None = None,
    *,
    stage: int | None = None,
    block: int = -1,
    head: str = "mean",
    number: int | None = None,
    title: str = "",
) -> str:
    """Return the interactive page; the arguments, which are those of `sheet`, set its initial state."""
    point = centre(trace) if point is None else point
    start = min(2, len(trace.stages) - 1) if stage is None else stage
    trace.block(start, block if stage is not None else -1)
    trace.token(point, 0)
    for blocks in trace.stages if stage is None else [trace.stages[start]]:
        select_heads(blocks[min(block, len(blocks) - 1) if block >= 0 else -1], head)
    h, w = trace.pixels.shape[:2]
    width, height = trace.image.size
    data: Json = {
        "about": ", ".join(filter(None, [title, describe(trace)])),
        "trained": trace.bundle.trained,
        "share": trace.bundle.pipeline.score_label,
        "photo": [width, height],
        "width": w,
        "height": h,
        "image": jpeg_url(trace.image),
        "stages": [stage_data(trace, s) for s in range(len(trace.stages))],
        "classes": _class_data(trace, number),
        "start": {
            "mode": "attention",
            "stage": start,
            "blocks": [b for _, b in column_blocks(trace, None, block)],
            "head": head,
            "x": (point[0] + 0.5) * w / width,
            "y": (point[1] + 0.5) * h / height,
        },
    }
    return _fill_template(data, title)


def _fill_template(data: Json, title: str) -> str:
    text = (PAGES / "attention.html").read_text(encoding="utf-8")
    core = (PAGES / "attention.js").read_text(encoding="utf-8")
    # A class may be called "</script>".
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text = text.replace("__CORE__", core)
    title = escape_html(f"{title or 'photo'}: attention of one token")
    parts = {"TITLE": title, "POLICY": content_policy(SCRIPT.findall(text)), "DATA": packed}
    # In one pass: a photo may be called "__DATA__".
    return re.sub("__(TITLE|POLICY|DATA)__", lambda mark: parts[mark[1]], text)


def _class_data(trace: AttentionTrace, number: int | None) -> list[Json]:
    """Return name, score and Grad-CAM maps of the best classes, the chosen one first."""
    numbers = [s.number for s in trace.scores[:MAX_CLASSES]]
    if number is not None:
        numbers = [number, *(n for n in numbers if n != number)]
    scores = {s.number: s for s in trace.scores}
    return [
        {"name": scores[n].name, "share": round(scores[n].share, 4), "maps": _cam_data(trace, n)}
        for n in numbers
    ]


def stage_data(trace: BackboneTrace, stage: int, last: bool = False) -> Json:
    """Return a stage for `pages/attention.js` as JSON: all of its blocks, or only the last one."""
    blocks = trace.stages[stage][-1:] if last else trace.stages[stage]
    h, w = blocks[0].q.shape[:2]
    return {
        "h": h,
        "w": w,
        "stride": trace.strides[stage],
        "blocks": [_block_data(block) for block in blocks],
    }


def _block_data(block: Block) -> Json:
    d = block.q.shape[3]
    return {
        "heads": block.heads,
        "d": d,
        "scope": block.region.scope,
        "grouping": block.region.grouping,
        "pale": list(block.region.pale_size),
        "q": _encode_float16(block.q.numpy() * d**-0.5),
        "k": _encode_float16(block.k.numpy()),
    }


def _encode_float16(values: Array) -> str:
    return base64.b64encode(values.astype("<f2").tobytes()).decode()


def _cam_data(trace: AttentionTrace, number: int) -> list[str]:
    maps = []
    for stage in range(len(trace.stages)):
        cam = trace.grad_cam(number, stage)
        scaled = cam * (255 / cam.max()) if cam.max() > 0 else cam
        maps.append(base64.b64encode(scaled.round().astype(np.uint8).tobytes()).decode())
    return maps


def jpeg_url(image: Image.Image) -> str:
    """Return a small copy of the image as a data URL."""
    return jpeg_data_url(image, (MAX_PHOTO, MAX_PHOTO), quality=88)


def draw_attention(settings: AttentionSettings) -> tuple[AttentionTrace, Point]:
    """Trace the attention of a model in a photo, and write it as page or sheet; return the trace and the point."""
    is_page(settings.output)  # an unknown suffix is an error
    for name in ("stage", "block"):
        number = getattr(settings, name)
        if number is not None and number < 1:
            raise SettingsError(f"--{name} must be at least 1, got {number}")
    trace = trace_attention(
        settings.photo, settings.weights, recipe=settings.recipe, size=settings.size
    )
    point, class_name = settings.point or centre(trace), settings.class_name
    save(
        trace,
        settings.output,
        point,
        stage=None if settings.stage is None else settings.stage - 1,
        block=-1 if settings.block is None else settings.block - 1,
        head=settings.head,
        number=None if class_name is None else trace.class_number(class_name),
        title=settings.photo.name,
    )
    return trace, point


def save(
    trace: AttentionTrace,
    path: str | Path,
    point: Point | None = None,
    *,
    stage: int | None = None,
    block: int = -1,
    head: str = "mean",
    number: int | None = None,
    title: str = "",
) -> Path:
    """Write the page (.html) or the sheet (a suffix that Pillow writes); arguments as for `page` and `sheet`."""
    path = Path(path)
    if is_page(path):
        text = page(trace, point, stage=stage, block=block, head=head, number=number, title=title)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    else:
        image = sheet(trace, point, stage=stage, block=block, head=head, number=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return path


def is_page(path: Path) -> bool:
    """Return whether the suffix is that of a page; raise SettingsError if it is not that of an image either."""
    if path.suffix.lower() in (".html", ".htm"):
        return True
    check_image_suffix(path, "be .html or ")
    return False
