"""Parameters and multiply-adds, counted from the configuration: no model is built, no image is processed.

What the paper calls FLOPs are multiply-adds. Only convolutions, linear layers and the two products
of attention count; norms, activations and interpolation, which the authors' counter includes, do
not (0.1 to 2 % of their figures). Three ways to count a map that the pale size does not divide:

- "paper": padded, as the paper pads. Parallel and sequential attention pad to whole pales before q,
  k, v and crop before the projection; vanilla computes q, k, v first and pads to a square grid of
  pales. Only this gives its tables.
- "ideal": ragged groups without padding, as the operator is defined.
- "executed": as a back-end computes it, exactly equal to PyTorch's `FlopCounterMode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..ops.pale_attention import sdpa
from ..ops.pale_attention.region import Region, check_word
from .pale_transformer import PALE_B, PALE_S, PALE_T, PaleConfig, image_size

Counting = Literal["paper", "ideal", "executed"]


@dataclass(frozen=True)
class Part:
    """Cost of one part; `kept` is the number of elements stored for the backward pass of one image."""

    name: str
    params: int
    macs: int
    kept: int = 0


@dataclass(frozen=True)
class Cost:
    """Costs of all parts; the sum of two is a cost again: backbone + head."""

    parts: tuple[Part, ...]

    @property
    def params(self) -> int:
        """Parameters."""
        return sum(part.params for part in self.parts)

    @property
    def macs(self) -> int:
        """Multiply-adds for one image."""
        return sum(part.macs for part in self.parts)

    @property
    def kept(self) -> int:
        """Elements stored for the backward pass of one image, without checkpointing."""
        return sum(part.kept for part in self.parts)

    def under(self, prefix: str) -> Cost:
        """Return the parts whose names start with `prefix`."""
        return Cost(tuple(part for part in self.parts if part.name.startswith(prefix)))

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.parts + other.parts)


def global_attention(h: int, w: int, c: int) -> int:
    """Return the multiply-adds of global self-attention on an h x w x c map (Eq. 4)."""
    return 4 * h * w * c**2 + 2 * c * (h * w) ** 2


def parallel_attention(h: int, w: int, c: int, s_r: int, s_c: int) -> int:
    """Return the multiply-adds of parallel PS-Attention if s_r divides h and s_c divides w (Eq. 5)."""
    return 4 * h * w * c**2 + h * w * c * (s_c * h + s_r * w + 27)


def attention(
    region: Region,
    h: int,
    w: int,
    c: int,
    heads: int,
    counting: Counting = "ideal",
    backend: str = "sdpa",
) -> int:
    """Return the multiply-adds of PS-Attention with phi and projection on an h x w x c map."""
    check_word("counting", counting, get_args(Counting))
    tokens = h * w
    if counting == "paper":
        s_r, s_c = region.pale_size
        n_r, n_c = region.counts(h, w)
        pairs = region.pairs(n_r * s_r, n_c * s_c, heads)
        tokens = tokens if region.scope == "pale" else n_r * s_r * n_c * s_c
    elif counting == "executed" and backend == "sdpa":
        pairs = sdpa.executed_pairs(h, w, heads, region)
    else:
        pairs = region.pairs(h, w, heads)
    phi = 3 * tokens * (9 * c + c**2)
    return phi + 2 * pairs * (c // heads) + h * w * c**2


def backbone(
    config: PaleConfig,
    size: tuple[int, int],
    *,
    counting: Counting = "ideal",
    backend: str = "sdpa",
    in_chans: int = 3,
) -> Cost:
    """Return the cost of the four stages for an image of `size` (height, width), without final norm and classifier."""
    check_word("counting", counting, get_args(Counting))
    parts = []
    c_in, kernel = in_chans, 7
    ape = config.maps(*image_size(config.img_size))
    for i, (h, w) in enumerate(config.maps(*size)):
        c, heads, ratio = config.channels[i], config.heads[i], config.mlp_ratio[i]
        hwc, stage, hidden = h * w * c, f"stages.{i}", int(c * ratio)
        # Kept: the input of the norm (the input of the convolution is the output of the stage before).
        merge = c * c_in * kernel**2
        parts.append(Part(f"{stage}.merge", merge + 3 * c, h * w * merge, hwc))
        if config.position == "ape":
            parts.append(Part(f"{stage}.ape", ape[i][0] * ape[i][1] * c, 0))
        for j in range(config.depths[i]):
            block = f"{stage}.blocks.{j}"
            macs = attention(config.region(i, j), h, w, c, heads, counting, backend)
            if config.position == "cpe":
                parts.append(Part(f"{block}.cpe", 10 * c, 9 * hwc, hwc))
            # Kept: input of the norm and of phi, three depthwise results, q, k, v, the output, its
            # concatenation.
            parts.append(Part(f"{block}.attn", 4 * (c**2 + c) + 27 * c, macs, 10 * hwc))
            parts.append(Part(f"{block}.norms", 4 * c, 0))
            # Kept: input and output of the norm, input and output of GELU.
            mlp = 2 * c * hidden
            parts.append(
                Part(f"{block}.mlp", mlp + hidden + c, h * w * mlp, 2 * h * w * (c + hidden))
            )
        c_in, kernel = c, 3
    return Cost(tuple(parts))


def classifier(config: PaleConfig, size: tuple[int, int], *, num_classes: int = 1000) -> Cost:
    """Return the cost of final norm, pool and linear classifier."""
    c = config.channels[-1]
    h, w = config.maps(*size)[-1]
    return Cost(
        (Part("norm", 2 * c, 0, h * w * c), Part("head", (c + 1) * num_classes, c * num_classes))
    )


POOLS = (1, 2, 3, 6)  # UperNet's pyramid


def upernet(
    config: PaleConfig,
    size: tuple[int, int],
    *,
    num_classes: int = 150,
    width: int = 512,
    auxiliary: int = 256,
) -> Cost:
    """Return the cost of UperNet's heads and of the norms of the four maps; the auxiliary head is not run."""
    maps, channels, c = config.maps(*size), config.channels, width
    (h, w), (h_4, w_4) = maps[0], maps[-1]
    parts = [Part("norms", 2 * sum(channels), 0)]

    def conv(name: str, c_in: int, kernel: int, pixels: int) -> None:
        weights = c_in * c * kernel**2
        parts.append(Part(f"decode.{name}", weights + 2 * c, pixels * weights))

    for i, n in enumerate(POOLS):
        conv(f"pyramid.cells.{i}", channels[-1], 1, n * n)
    conv("pyramid.merge", channels[-1] + len(POOLS) * c, 3, h_4 * w_4)
    for i, (c_i, (h_i, w_i)) in enumerate(zip(channels[:-1], maps, strict=False)):
        conv(f"laterals.{i}", c_i, 1, h_i * w_i)
        conv(f"smooth.{i}", c, 3, h_i * w_i)
    conv("fuse", len(channels) * c, 3, h * w)
    parts.append(Part("decode.classifier", (c + 1) * num_classes, h * w * c * num_classes))
    if auxiliary:
        fcn = channels[2] * auxiliary * 9 + 2 * auxiliary + (auxiliary + 1) * num_classes
        parts.append(Part("auxiliary", fcn, 0))
    return Cost(tuple(parts))


def mask_rcnn(
    config: PaleConfig,
    size: tuple[int, int],
    *,
    num_classes: int = 80,
    width: int = 256,
    box_width: int = 1024,
    mask_layers: int = 4,
    boxes: int = 1000,
    masks: int = 100,
) -> Cost:
    """Return the cost of pyramid, proposals, box head on `boxes` regions, mask head on `masks`, and map norms."""
    maps, channels, c = config.maps(*size), config.channels, width
    parts = [Part("body.norms", 2 * sum(channels), 0)]

    def layer(name: str, c_in: int, c_out: int, taps: int, times: int, params: bool = True) -> None:
        weights = c_in * c_out * taps
        parts.append(Part(name, (weights + c_out) * params, times * weights))

    levels = [
        *maps,
        ((maps[-1][0] + 1) // 2, (maps[-1][1] + 1) // 2),
    ]  # P6 is every second pixel of P5
    for i, (c_i, (h, w)) in enumerate(zip(channels, maps, strict=True)):
        layer(f"body.fpn.lateral.{i}", c_i, c, 1, h * w)
        layer(f"body.fpn.smooth.{i}", c, c, 9, h * w)
    for i, (h, w) in enumerate(levels):  # one head for all levels
        layer(f"rpn.conv.{i}", c, c, 9, h * w, params=not i)
        layer(f"rpn.out.{i}", c, 3 + 12, 1, h * w, params=not i)
    layer("box.fc6", c * 49, box_width, 1, boxes)
    layer("box.fc7", box_width, box_width, 1, boxes)
    layer("box.out", box_width, 5 * (num_classes + 1), 1, boxes)
    for i in range(mask_layers):
        layer(f"mask.conv.{i}", c, c, 9, 196 * masks)
    parts.append(Part("mask.up", 4 * c * c + c, 196 * masks * 4 * c * c))
    layer("mask.out", c, num_classes + 1, 1, 784 * masks)
    return Cost(tuple(parts))


def count(
    config: PaleConfig,
    size: tuple[int, int],
    *,
    counting: Counting = "ideal",
    backend: str = "sdpa",
    in_chans: int = 3,
    num_classes: int = 1000,
) -> Cost:
    """Return parameters and multiply-adds of a classification model for an image of `size` (height, width)."""
    body = backbone(config, size, counting=counting, backend=backend, in_chans=in_chans)
    return body + classifier(config, size, num_classes=num_classes)


@dataclass(frozen=True)
class Task:
    """A pair of columns in the paper's tables: image size and head."""

    name: str
    size: tuple[int, int]
    head: Callable[[PaleConfig, tuple[int, int]], Cost]


TASKS = {
    task.name: task
    for task in (
        Task("imagenet", (224, 224), classifier),
        Task("ade20k", (512, 2048), upernet),
        Task("coco", (800, 1280), mask_rcnn),
    )
}


@dataclass(frozen=True)
class Row:
    """A row of the paper: parameters in millions and multiply-adds in G, by task."""

    table: str
    setting: str
    config: PaleConfig
    figures: dict[str, tuple[float, float]]


def _row(
    table: str,
    setting: str,
    config: PaleConfig,
    imagenet: tuple[float, float] | None = None,
    ade20k: tuple[float, float] | None = None,
    coco: tuple[float, float] | None = None,
) -> Row:
    columns = {"imagenet": imagenet, "ade20k": ade20k, "coco": coco}
    return Row(table, setting, config, {name: f for name, f in columns.items() if f is not None})


# Variants and ImageNet-1K share their figures; the starred rows (token labelling) are the same
# networks.
PAPER = (
    _row("Variants, ImageNet-1K", "Pale-T", PALE_T, (22, 4.2)),
    _row("Variants, ImageNet-1K", "Pale-T*", PALE_T, (22, 4.2)),
    _row("Variants, ImageNet-1K", "Pale-S", PALE_S, (48, 9.0)),
    _row("Variants, ImageNet-1K", "Pale-S*", PALE_S, (48, 9.0)),
    _row("Variants, ImageNet-1K", "Pale-B", PALE_B, (85, 15.6)),
    _row("Variants, ImageNet-1K", "Pale-B*", PALE_B, (85, 15.6)),
    _row("ADE20K", "Pale-T", PALE_T, ade20k=(52, 996)),
    _row("ADE20K", "Pale-S", PALE_S, ade20k=(80, 1135)),
    _row("ADE20K", "Pale-B", PALE_B, ade20k=(119, 1311)),
    _row("COCO", "Pale-T", PALE_T, coco=(41, 306)),
    _row("COCO", "Pale-S", PALE_S, coco=(68, 432)),
    _row("COCO", "Pale-B", PALE_B, coco=(105, 595)),
    _row("Pale size", "1 1 1 1", replace(PALE_T, pale_size=1), (22, 3.8), (52, 929), (41, 253)),
    _row("Pale size", "3 3 3 3", replace(PALE_T, pale_size=3), (22, 4.1), (52, 950), (41, 269)),
    _row("Pale size", "5 5 5 5", replace(PALE_T, pale_size=5), (22, 4.4), (52, 972), (41, 283)),
    _row("Pale size", "7 7 7 7", replace(PALE_T, pale_size=7), (22, 4.2), (52, 996), (41, 306)),
    _row("Pale size", "9 9 9 9", replace(PALE_T, pale_size=9), (22, 5.4), (52, 1021), (41, 322)),
    _row(
        "Attention mode",
        "Axial",
        replace(PALE_T, attention="axial"),
        (22, 3.8),
        (52, 929),
        (41, 253),
    ),
    _row(
        "Attention mode",
        "Cross-Shaped",
        replace(PALE_T, attention="cross"),
        (22, 4.2),
        (52, 996),
        (41, 306),
    ),
    _row(
        "Attention mode",
        "Pale (vanilla)",
        replace(PALE_T, attention="vanilla"),
        (22, 5.4),
        (52, 2677),
        (41, 668),
    ),
    _row(
        "Attention mode",
        "Pale (sequential)",
        replace(PALE_T, attention="sequential"),
        (22, 4.2),
        (52, 996),
        (41, 306),
    ),
    _row("Attention mode", "Pale (parallel)", PALE_T, (22, 4.2), (52, 996), (41, 306)),
    _row("Position", "no pos.", replace(PALE_T, position="none"), (22, 4.2), (51, 996), (41, 306)),
    _row("Position", "APE", replace(PALE_T, position="ape"), (22, 4.2), (59, 996), (49, 306)),
    _row("Position", "CPE", PALE_T, (22, 4.2), (52, 996), (41, 306)),
)


@dataclass(frozen=True)
class Reproduced:
    """Figures of the paper and of this count for one row and task; parameters in millions, multiply-adds in G."""

    table: str
    setting: str
    task: str
    params_paper: float
    params: float
    macs_paper: float
    macs: float
    macs_ideal: float

    @property
    def difference(self) -> float:
        """Relative difference from the multiply-adds of the paper."""
        return self.macs / self.macs_paper - 1


def reproduce() -> list[Reproduced]:
    """Return every row of `PAPER`, counted as in the paper, and with ragged groups as executed."""
    out = []
    for row in PAPER:
        for name, (params, macs) in row.figures.items():
            task = TASKS[name]
            # The parameters in the position table match maps of the input size of the task.
            config = replace(row.config, img_size=task.size)
            head = task.head(config, task.size)
            padded = backbone(config, task.size, counting="paper") + head
            ideal = backbone(config, task.size) + head
            out.append(
                Reproduced(
                    row.table,
                    row.setting,
                    name,
                    params,
                    padded.params / 1e6,
                    macs,
                    padded.macs / 1e9,
                    ideal.macs / 1e9,
                )
            )
    return out
