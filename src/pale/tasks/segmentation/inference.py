"""Inference of a segmenter, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...core.settings import vary
from ...data import rle
from ...data.sources.class_list import ClassList, Colour, Labels, palette
from ...data.transforms.images import to_tensor
from ..dense_pipeline import DensePipeline, is_number_list, require_classes
from ..memory import ARRAY, JPEG_OUT, LABELS, PNG_OUT, RGB, resizing
from ..pipeline import ExportGraph, Options, parts
from ..prediction import ArraySpec, Json, Prediction, Region, drawable
from .draw import add_legend, indexed, overlay, pixel_counts
from .model import UperNet
from .segmenter import MULTI_SCALES, Inference, Segmenter, resize_image


@dataclass(frozen=True)
class Segmented(Prediction):
    """The class of every pixel.

    Attributes:
        labels: class numbers, (h, w), uint8.
        classes: names, by number.
        colours: colours, by number.
    """

    labels: Labels
    classes: Sequence[str]
    colours: Sequence[Colour]

    @property
    def shares(self) -> dict[str, float]:
        """Per cent of the pixels by class name, the largest first; absent ones are left out."""
        counts = pixel_counts(self.labels, len(self.classes))
        order = np.argsort(-counts, kind="stable")
        return {self.classes[i]: float(100 * counts[i] / counts.sum()) for i in order if counts[i]}

    def plain(self) -> Json:
        """Return name and size of the image, and the shares of the classes."""
        colour_of = dict(zip(self.classes, self.colours, strict=True))
        shares = [
            {"class": name, "share": share, "colour": list(colour_of[name])}
            for name, share in self.shares.items()
        ]
        return self.header() | {"classes": shares}

    def regions(self) -> list[Region]:
        """Return the pixels of each class that occurs."""
        found = [int(v) for v in np.unique(self.labels) if v < len(self.classes)]
        return [
            Region(self.classes[v], None, None, rle.encode((self.labels == v).astype(np.uint8)))
            for v in found
        ]

    def words(self) -> str:
        """Return classes and per cent of the pixels."""
        return ", ".join(f"{name} {share:.1f} %" for name, share in self.shares.items())

    def rows(self) -> list[Json]:
        """Return one row for each class that occurs."""
        image = {"picture": self.name}  # kept name
        return [
            image | {"class": name, "share": f"{share:.4f}"} for name, share in self.shares.items()
        ]

    def arrays(self, classes: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Return the class indices of the pixels."""
        return {"mask": self.labels}

    def draw(self) -> Image.Image:
        """Return the image blended with the colours of its classes, and the names of those that occur."""
        drawn = overlay(drawable(self.image), self.labels, self.colours)
        colours = dict(zip(self.classes, self.colours, strict=False))
        return add_legend(drawn, {name: colours[name] for name in self.shares if name in colours})

    def mask(self) -> Image.Image:
        """Return a palette image: pixels are class numbers."""
        return indexed(self.labels, self.colours)


class FullSize(nn.Module):
    """A model whose logits have the size of the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, classes, h, w)."""
        return F.interpolate(
            self.model(images), images.shape[-2:], mode="bilinear", align_corners=False
        )


@dataclass(frozen=True, kw_only=True)
class SegmentationPipeline(DensePipeline):
    """Inference of a segmenter.

    Attributes:
        test: settings of inference.
        colours: colours of the classes.
    """

    kind: ClassVar[str] = "segmentation"
    options: ClassVar[frozenset[str]] = frozenset({"own_size", "slide", "multi"})
    question: ClassVar[str] = "Which pixels?"
    counted: ClassVar[str] = "pixels"
    score_label: ClassVar[str] = "share of pixels"
    has_mask: ClassVar[bool] = True

    test: Inference = field(default_factory=lambda: Inference(short=None, long=None))
    colours: tuple[Colour, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: Any, about: Json, source: str, *, trusted: bool) -> Self:
        """Return the pipeline of weights; classes and colours come from the header or the data of the recipe."""
        names = tuple(about.get("classes") or ())
        known, colours = names, _colours(about, len(names))
        # A recipe that lists the classes itself names no file to be read.
        if trusted or (not colours and isinstance(recipe.data.classes, tuple)):
            known, colours = _listed(recipe)
        classes = require_classes(names or known, source)
        if known != classes or not colours:
            colours = tuple(palette(len(classes)))
        return cls(classes=classes, test=recipe.test, colours=colours)

    def build(self, recipe: Any) -> nn.Module:
        """Build UperNet with random weights."""
        settings = vary(recipe.model, weights=None, init=None, new_head=False)
        model: nn.Module = settings.build(len(self.classes), recipe.augment.crop)
        return model

    @classmethod
    def model_name(cls, recipe: Any) -> str:
        """Return the names of head and backbone."""
        return f"UperNet on {recipe.model.name}"

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Return whether it is a UperNet."""
        return isinstance(model, UperNet)

    def with_options(self, options: Options, source: str) -> Self:
        """Return a copy that segments at the original size, by windows, or at several scales."""
        changes: Json = {"short": None, "long": None} if options.own_size else {}
        if options.slide:
            changes["mode"] = "slide"
        if options.multi:
            changes |= {"scales": MULTI_SCALES, "flip": True}
        return replace(super().with_options(options, source), test=vary(self.test, **changes))

    def completed(self, model: nn.Module) -> Self:
        """Return a copy with names and colours for every class."""
        made = super().completed(model)
        return replace(made, colours=self.colours or tuple(palette(len(made.classes))))

    def count_classes(self, model: UperNet) -> int:
        """Return the outputs of the classifier."""
        return int(model.decode.classifier.out_channels)

    @property
    def bounds(self) -> Inference:
        """Settings of inference."""
        return self.test

    @property
    def scale(self) -> float:
        """The largest scale."""
        return max(self.test.scales)

    @property
    def in_pieces(self) -> bool:
        """Whether the image is segmented by windows."""
        return self.test.mode == "slide"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return the image resized as for a single scale."""
        pixels = to_tensor(image)
        return resize_image(pixels, self.resized(pixels.shape[1], pixels.shape[2]))

    def prepare(self, image: Image.Image) -> Tensor:
        """Return the image at its own size: `Segmenter` resizes it, once for each scale."""
        return to_tensor(image)

    def predict(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
        batch_size: int,
    ) -> list[Prediction]:
        """Return the class of each pixel at the size of each image."""
        segmenter = Segmenter(model, self.test, len(self.classes))
        labels = [x for part in parts(tensors, batch_size) for x in segmenter.segment_all(part)]
        return list(self.postprocess(labels, tensors, images, names))

    def postprocess(
        self,
        outputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
    ) -> list[Segmented]:
        """Return results from the class numbers of `Segmenter`."""
        return [
            Segmented(n, x, labels.numpy(), self.classes, self.colours)
            for n, x, labels in zip(names, images, outputs, strict=True)
        ]

    def array_specs(self) -> dict[str, ArraySpec]:
        """Return the mask at the size of the image."""
        return {"mask": ArraySpec(np.uint8, ("height", "width"))}

    def export_graph(self, model: nn.Module) -> ExportGraph:
        """Return the model with logits at the size of the image."""
        return ExportGraph(FullSize(model))

    def trace_scores(self, logits: Tensor) -> Tensor:
        """Return the share of pixels that each class has."""
        won = logits.argmax(0).flatten()
        return torch.bincount(won, minlength=len(logits)) / len(won)

    @property
    def logits_bytes(self) -> int:
        """Bytes of logits at the size of the image, which are computed in blocks."""
        return self.test.memory_mb * 2**20

    def limited(self, logits_mb: int) -> Self:
        """Return a copy with smaller blocks."""
        return replace(self, test=vary(self.test, memory_mb=logits_mb))

    def seen_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return the pixels of the resized image; by windows, those of the windows that run together."""
        h, w = self.resized(height, width)
        if not self.in_pieces:
            return h * w, h * w
        window = self.test.window
        return min(h, window) * min(w, window) * self.test.windows, h * w

    def prediction_bytes(
        self, size: tuple[int, int], scaled: int, output: str, inline_mask: bool, top: int
    ) -> int:
        """Return the bytes of image, resized image, and labels or response."""
        pixels = size[0] * size[1]
        after = LABELS + {"json": 0, "drawn": RGB + JPEG_OUT, "mask": PNG_OUT}[output]
        after += PNG_OUT * inline_mask
        return RGB * pixels + resizing(size, scaled) + max(ARRAY + LABELS, after) * pixels


def _listed(recipe: Any) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Return names and colours in the class list of a recipe's data; none where it cannot be read."""
    try:
        listed: ClassList = recipe.data.class_list()
    except ValueError:
        return (), ()
    return tuple(listed.names), tuple(listed.colours)


def _colours(about: Json, count: int) -> tuple[Colour, ...]:
    """Return the colours in a header; none where they are absent or wrong."""
    colours = about.get("colours")
    if not isinstance(colours, list) or len(colours) != count:
        return ()
    if not all(is_number_list(colour, 3, 256) for colour in colours):
        return ()
    return tuple((r, g, b) for r, g, b in colours)
