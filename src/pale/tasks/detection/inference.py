"""Inference of a detector, and its result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from ...core.settings import MAX_LONG, MAX_SIZE, Settings, vary
from ...data import rle
from ...data.transforms.instances import resize_to_fit
from ..dense_pipeline import DensePipeline, is_number_list, require_classes
from ..memory import JPEG_OUT, OUTLINE, PASTED, RGB, resizing
from ..pipeline import ExportGraph, Options
from ..prediction import ArraySpec, Collector, Json, Prediction, Region, drawable
from .draw import overlay
from .fixed import NAMES, FixedMaskRCNN
from .metric import as_results
from .model import MaskRCNN, numbered

OBJECT_BOUND = 1e-2  # export: of boxes (as shares of the image's side), scores and masks
MIN_MATCHED = 0.95  # export: share of objects that both must find
MIN_OVERLAP = 0.9  # export: IoU of an object that both find


class Testing(Settings):
    """Settings of inference; the defaults are the paper's, from mmdetection.

    Attributes:
        short: length of the short side after resizing; None: images keep their size.
        long: maximum length of the long side after resizing.
        score: minimum score of a detection.
        nms: maximum overlap (IoU) of two detections of a class.
        most: maximum number of detections in an image.
    """

    short: int | None = Field(default=800, ge=16, le=MAX_SIZE)
    long: int | None = Field(default=1333, ge=16, le=MAX_LONG)
    score: float = Field(default=0.05, ge=0, le=1)
    nms: float = Field(default=0.5, gt=0, le=1)
    most: int = Field(default=100, ge=1, le=10_000)

    def describe(self) -> str:
        """Return the settings as one line of text."""
        size = "own size" if self.short is None else f"short side {self.short}"
        long = "" if self.long is None else f", long side at most {self.long}"
        return f"{size}{long}, scores from {self.score:g}, at most {self.most} objects per image"


class CocoFile:
    """Collects objects of many images for objects.json, in COCO's format."""

    def __init__(self) -> None:
        self.images: list[Json] = []
        self.objects: list[Json] = []
        self.categories: list[Json] = []

    def add(self, prediction: Detected) -> None:
        """Add the objects of one image."""
        number = len(self.images) + 1
        size = {"width": prediction.image.width, "height": prediction.image.height}
        self.images.append({"id": number, "file_name": prediction.name} | size)
        self.objects += [{"image_id": number} | entry for entry in prediction.objects]
        pairs = zip(prediction.categories, prediction.classes, strict=True)
        self.categories = [{"id": c, "name": n} for c, n in pairs]

    def write(self, folder: Path) -> None:
        """Write objects.json."""
        content = {"images": self.images, "categories": self.categories}
        content["annotations"] = self.objects
        (folder / "objects.json").write_text(json.dumps(content) + "\n")


@dataclass(frozen=True)
class Detected(Prediction):
    """The objects of an image.

    Attributes:
        objects: COCO's results without an image's id, the highest score first.
        classes: names.
        categories: their ids.
    """

    collector: ClassVar[type[Collector] | None] = CocoFile

    objects: Sequence[Json]
    classes: Sequence[str]
    categories: Sequence[int]

    def _name(self, entry: Json) -> str:
        return self.classes[list(self.categories).index(entry["category_id"])]

    @property
    def counts(self) -> dict[str, int]:
        """Number of objects by class name, the largest first."""
        counts: dict[str, int] = {}
        for entry in self.objects:
            counts[self._name(entry)] = counts.get(self._name(entry), 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def plain(self) -> Json:
        """Return name and size of the image, and objects with class, score, box and shape in COCO's run lengths."""
        return self.header() | {"objects": [{"class": self._name(e)} | e for e in self.objects]}

    def regions(self) -> list[Region]:
        """Return the objects."""
        return [
            Region(self._name(e), e["score"], tuple(e["bbox"]), e.get("segmentation"))
            for e in self.objects
        ]

    def words(self) -> str:
        """Return the number of objects of each class."""
        return ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"

    def rows(self) -> list[Json]:
        """Return one row for each object."""
        found = []
        for e in self.objects:
            box = zip(("left", "top", "width", "height"), e["bbox"], strict=True)
            row: Json = {"picture": self.name}  # kept name
            row |= {"class": self._name(e), "score": f"{e['score']:.4f}"}
            found.append(row | {k: f"{v:.2f}" for k, v in box})
        return found

    def arrays(self, classes: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Return the objects, and height and width of the image, which are needed to decode their shapes.

        Boxes are left, top, right, bottom; shapes are run lengths of COCO.
        """
        objects = self.objects
        index = {category: i for i, category in enumerate(self.categories)}
        boxes = np.array([e["bbox"] for e in objects], np.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        shapes = [e.get("segmentation", {}).get("counts", "") for e in objects]
        return {
            "boxes": boxes,
            "scores": np.array([e["score"] for e in objects], np.float32),
            "classes": np.array([index[e["category_id"]] for e in objects], np.int64),
            "names": np.array([self._name(e).encode() for e in objects], object),
            "masks": np.array([shape.encode() for shape in shapes], object),
            "size": np.array([self.image.height, self.image.width], np.int64),
        }

    def draw(self) -> Image.Image:
        """Return the image with shapes and boxes, names and scores."""
        image = drawable(self.image)
        scale = [a / b for a, b in zip(image.size, self.image.size, strict=True)] * 2
        objects = [
            e | {"bbox": [v * s for v, s in zip(e["bbox"], scale, strict=True)]}
            for e in self.objects
        ]
        return overlay(image, objects, self.classes, self.categories)


@dataclass(frozen=True, kw_only=True)
class DetectionPipeline(DensePipeline):
    """Inference of a detector.

    Attributes:
        test: settings of inference.
        categories: ids of the classes in COCO's JSON.
    """

    kind: ClassVar[str] = "detection"
    question: ClassVar[str] = "Where, and what shape?"
    counted: ClassVar[str] = "objects"
    has_score: ClassVar[bool] = True

    test: Testing = field(default_factory=Testing)
    categories: tuple[int, ...] = ()

    @classmethod
    def from_recipe(cls, recipe: Any, about: Json, source: str, *, trusted: bool) -> Self:
        """Return the pipeline of weights; classes and ids come from the header or the data of the recipe."""
        names = tuple(about.get("classes") or ())
        known, categories = names, _categories(about, len(names))
        if trusted:
            known, categories = _listed(recipe)
        classes = require_classes(names or known, source)
        if known != classes or not categories:
            categories = tuple(range(1, len(classes) + 1))
        return cls(classes=classes, test=recipe.test, categories=categories)

    def build(self, recipe: Any) -> nn.Module:
        """Build Mask R-CNN with random weights."""
        settings = vary(recipe.model, weights=None, init=None, new_head=False)
        side = recipe.augment.crop or recipe.augment.short or recipe.data.size
        model: nn.Module = settings.build(len(self.classes), side)
        return model

    @classmethod
    def model_name(cls, recipe: Any) -> str:
        """Return the names of head and backbone."""
        return f"Mask R-CNN on {recipe.model.name}"

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Return whether it is a Mask R-CNN."""
        return isinstance(model, MaskRCNN)

    def with_options(self, options: Options, source: str) -> Self:
        """Return a copy with thresholds and, if requested, without resizing."""
        changes: Json = {"short": None, "long": None} if options.own_size else {}
        changes |= {"score": options.score}
        changes |= {} if options.most is None else {"most": options.most}
        return replace(super().with_options(options, source), test=vary(self.test, **changes))

    def completed(self, model: nn.Module) -> Self:
        """Return a copy with names and ids for every class."""
        made = super().completed(model)
        ids = self.categories or tuple(range(1, len(made.classes) + 1))
        return replace(made, categories=ids)

    def count_classes(self, model: MaskRCNN) -> int:
        """Return the outputs of the classifier without the background."""
        return int(model.roi_heads.box_predictor.cls_score.out_features) - 1

    def configure(self, model: Any) -> None:
        """Set the thresholds of the model."""
        rle.codec()  # raises an error if a package is missing
        self._set_thresholds(model)

    def _set_thresholds(self, model: Any, score: float | None = None) -> None:
        score = self.test.score if score is None else score
        model.set_thresholds(score, self.test.nms, self.test.most)

    @contextmanager
    def at_score(self, model: nn.Module, score: float | None) -> Iterator[None]:
        """Detect with another score threshold in this context; None: no change."""
        self._set_thresholds(model, score)
        try:
            yield
        finally:
            self._set_thresholds(model)

    @property
    def bounds(self) -> Testing:
        """Settings of inference."""
        return self.test

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return the resized image."""
        return torch.from_numpy(resize_to_fit(image, self.test.short, self.test.long)).permute(
            2, 0, 1
        )

    def forward(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Return the detections of each image; the model normalises and pads."""
        device = next(model.parameters()).device
        return model([x.to(device) for x in tensors])

    def postprocess(
        self,
        outputs: Sequence[dict[str, Tensor]],
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
    ) -> list[Detected]:
        """Return objects in the pixels of the images."""
        found = []
        for n, image, x, one in zip(names, images, tensors, outputs, strict=True):
            own = (image.height, image.width)
            objects = as_results(one, (x.shape[1], x.shape[2]), own, 0, self.categories)
            for entry in objects:
                del entry["image_id"]
            found.append(Detected(n, image, objects, self.classes, self.categories))
        return found

    def array_specs(self) -> dict[str, ArraySpec]:
        """Return arrays with one entry for each object; a detector without masks has empty ones."""
        types = {"scores": np.float32, "classes": np.int64, "names": object, "masks": object}
        return {
            "boxes": ArraySpec(np.float32, ("count", 4)),
            **{name: ArraySpec(dtype, ("count",)) for name, dtype in types.items()},
            "size": ArraySpec(np.int64, (2,)),
        }

    def export_graph(self, model: Any) -> ExportGraph:
        """Return the model with a fixed number of results, for one image."""
        self._set_thresholds(model)
        return ExportGraph(
            FixedMaskRCNN(model), NAMES if model.with_masks else NAMES[:3], single=True
        )

    def export_bound(self, device: str) -> float:
        """Return the bound of boxes, scores and masks."""
        return OBJECT_BOUND

    def compare(
        self, wanted: Sequence[Tensor], got: Sequence[Tensor], side: int
    ) -> tuple[float, float]:
        """Return the largest difference of objects that both found; 1 if too many are found by only one."""
        return difference_of_objects(wanted, got, side), 1.0

    def agreement(self, wanted: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, int]:
        """Return the number of PyTorch's objects that are found again, and their total number."""
        _, again = found_again(wanted, got)
        return float(again.sum()), len(again)

    def trace_logits(self, model: MaskRCNN, images: Tensor) -> Tensor:
        """Return for each class the log-probability at the region with the highest one, (1, classes)."""
        maps = model.body(images)
        size = (images.shape[2], images.shape[3])
        with torch.no_grad():
            found, _ = model.rpn(ImageList(images, [size]), maps)
        logits, _ = model.roi_heads.classify(list(maps.values()), numbered(found))
        best: Tensor = logits.log_softmax(1)[:, 1:].amax(0, keepdim=True)
        return best

    def trace_scores(self, logits: Tensor) -> Tensor:
        """Return the probabilities."""
        return logits.exp()

    def prediction_bytes(
        self, size: tuple[int, int], scaled: int, output: str, inline_mask: bool, top: int
    ) -> int:
        """Return the bytes of the image, and of resized image, masks or drawing, whichever is largest."""
        pixels = size[0] * size[1]
        after = (RGB + OUTLINE + JPEG_OUT) * (output == "drawn")
        return RGB * pixels + max(resizing(size, scaled), PASTED * pixels, after * pixels)


def _listed(recipe: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and ids of the classes in a recipe's data; none if it cannot be read."""
    try:
        source = recipe.data.val_source(recipe.seed)
    except ValueError:
        return (), ()
    return tuple(source.classes), tuple(source.categories)


def _categories(about: Json, count: int) -> tuple[int, ...]:
    """Return the ids in a header; none if they are absent or wrong."""
    categories = about.get("categories")
    return tuple(categories) if is_number_list(categories, count, 2**31) else ()  # type: ignore[arg-type]


def found_again(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return for each object (boxes, scores, labels, ...) the index of its match in `got`, and whether there is one."""
    able, there = wanted[1] > 0, got[1] > 0
    overlap = box_iou(wanted[0].float(), got[0].float())
    overlap = overlap * (wanted[2][:, None] == got[2][None]) * there
    best, place = overlap.max(1)
    return place[able], best[able] >= MIN_OVERLAP


def difference_of_objects(wanted: Sequence[Tensor], got: Sequence[Tensor], side: int) -> float:
    """Return the largest difference of boxes, scores and masks of objects in both; 1 if too many are only in one.

    The order is not compared: if two scores differ only by rounding, either may come first, and of two boxes that
    suppress each other either may remain.
    """
    count = int((wanted[1] > 0).sum())
    if not count:
        return float(got[1].max()) if len(got[1]) else 0.0
    place, same = found_again(wanted, got)
    if float(same.float().mean()) < MIN_MATCHED:
        return 1.0
    own = [x[wanted[1] > 0][same] for x in wanted]
    other = [x[place][same] for x in got]
    apart = [(a.float() - b.float()).abs().max() for a, b in zip(own, other, strict=True)]
    apart[0] = apart[0] / side
    return max(float(value) for value in (apart[0], apart[1], *apart[3:]))
