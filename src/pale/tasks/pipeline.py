"""Inference of a task: preprocessing, forward pass, postprocessing, export, and their memory.

`SquarePipeline` (square_pipeline.py) passes a centre crop of fixed size to the model, `DensePipeline`
(dense_pipeline.py) whole images whose sides are bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from ..data.reading import distinct_names
from ..data.transforms.images import channel_statistics, normalise
from ..errors import SettingsError
from ..weights.read import Weights
from . import TASKS
from .memory import JPEG_OUT, RGB, resizing
from .prediction import ArraySpec, Json, Prediction

T = TypeVar("T")
# Largest difference of an exported file from PyTorch, as a share of the largest output. CUDA convolutions run in TF32.
EXPORT_BOUND = {"cpu": 1e-3, "cuda": 2e-2}


@dataclass(frozen=True)
class Options:
    """Options of `pale.Predictor` that change how a model predicts; `Predictor` describes them."""

    top: int = 5
    score: float = 0.5
    most: int | None = None
    own_size: bool = False
    slide: bool = False
    multi: bool = False


# Options that are an error for a task that does not have them; the others have no effect there.
SWITCHES = ("own_size", "slide", "multi")


class NamedInput(nn.Module):
    """A model whose argument has the input name of exported files."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> the model's output."""
        return self.model(images)


@dataclass(frozen=True)
class ExportGraph:
    """Exported part of a model.

    Attributes:
        model: normalised images in, one tensor or a tuple of tensors out.
        outputs: their names.
        single: takes one image at a time.
    """

    model: nn.Module
    outputs: tuple[str, ...] = ("logits",)
    single: bool = False


@dataclass(frozen=True, kw_only=True)
class Pipeline(ABC):
    """Inference of one task; the model is an argument of the methods that need it.

    Attributes:
        kind: kind of the task.
        options: those of `SWITCHES` that the task has.
        question: the question that the task answers, as a title.
        counted: unit in which the agreement of an exported file with PyTorch is counted.
        score_label: meaning of the numbers that `trace_scores` returns.
        has_mask: whether predictions have a mask.
        has_score: whether predictions have objects with a score, of which `at_score` keeps more or fewer.
        has_embedding: whether its models return one vector per image (timm's `forward_head`).
        classes: names, in the order of the model's outputs; empty if not known.
        interpolation: interpolation for resizing.
        mean: mean of the pixels, 0 to 1, by channel.
        std: likewise.
    """

    kind: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    question: ClassVar[str] = "What does the model predict?"
    counted: ClassVar[str] = "images"
    score_label: ClassVar[str] = "probability"
    has_mask: ClassVar[bool] = False
    has_score: ClassVar[bool] = False
    has_embedding: ClassVar[bool] = False

    classes: tuple[str, ...] = ()
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD

    # Construction.

    @classmethod
    @abstractmethod
    def from_recipe(cls, recipe: Any, about: Json, source: str, *, trusted: bool) -> Self:
        """Return the pipeline of weights.

        Args:
            recipe: recipe that they were trained with.
            about: the header of the weights.
            source: where they come from, for messages.
            trusted: the user named the recipe, so files that it names may be read; a recipe in a header is not trusted.
        """

    @abstractmethod
    def build(self, recipe: Any) -> nn.Module:
        """Build the model of a recipe with random weights; no file is read."""

    @classmethod
    def model_name(cls, recipe: Any) -> str:
        """Return the name of a recipe's model."""
        return str(recipe.model.name)

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Return whether this is a model of the task; classification is used for models that no task accepts."""
        return False

    @classmethod
    def from_module(cls, model: nn.Module, config: Mapping[str, Any]) -> Self:
        """Return the pipeline of a model without a recipe.

        Args:
            model: model that `accepts` accepts.
            config: timm's `pretrained_cfg`, or empty.
        """
        known = ("mean", "std", "interpolation")
        return cls(**{name: config[name] for name in known if name in config})

    def with_options(self, options: Options, source: str) -> Self:
        """Return a copy with the options applied; an option of other tasks raises a SettingsError."""
        for name in SWITCHES:
            if getattr(options, name) and name not in self.options:
                owners = [kind for kind, task in TASKS.items() if name in task.pipeline.options]
                raise SettingsError(
                    f"{name} is an option of {' and '.join(owners)}, but {source} is for {self.kind}; leave it out"
                )
        return self

    def completed(self, model: nn.Module) -> Self:
        """Return a copy with a distinct name for every class, because results are listed by name."""
        count = len(self.classes) or self.count_classes(model)
        names = distinct_names(self.classes) or [f"class {i}" for i in range(count)]
        return replace(self, classes=tuple(names))

    def count_classes(self, model: Any) -> int:
        """Return the number of classes of a model without class names."""
        return int(model.num_classes)

    def configure(self, model: nn.Module) -> None:  # noqa: B027
        """Pass settings to a model that stores some itself; called once before the first prediction."""

    @contextmanager
    def at_score(self, model: nn.Module, score: float | None) -> Iterator[None]:
        """Predict with another score threshold in this context; None, or a task without one: no change."""
        yield

    # Prediction.

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Default batch size."""

    @abstractmethod
    def preprocess(self, image: Image.Image) -> Tensor:
        """Return an RGB image preprocessed as in evaluation: (3, h, w), uint8."""

    def prepare(self, image: Image.Image) -> Tensor:
        """Return an RGB image preprocessed for `predict`, (3, h, w), uint8; thread-safe."""
        return self.preprocess(image)

    def require_size(self, image: Image.Image) -> None:  # noqa: B027
        """Raise an UnreadableImageError if the model input for an image would have too many pixels."""

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 (b, 3, h, w) to float32 for the model."""
        return normalise(images, channel_statistics(self.mean, self.std, images.device))

    def forward(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Return the model's outputs for tensors (3, h, w), uint8, of one size."""
        device = next(model.parameters()).device
        return model(self.normalise(torch.stack(list(tensors)).to(device)))

    @abstractmethod
    def postprocess(
        self,
        outputs: Any,
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
    ) -> Sequence[Prediction]:
        """Turn outputs of `forward` into results.

        Args:
            outputs: outputs of the model.
            tensors: inputs of the model.
            images: decoded images.
            names: names of the images.
        """

    def predict(
        self,
        model: nn.Module,
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
        batch_size: int,
    ) -> list[Prediction]:
        """Return the results in the order of the images; tensors of one size form batches.

        Args:
            model: in evaluation mode.
            tensors: results of `prepare`.
            images: images from which they were made.
            names: names of the images.
            batch_size: maximum batch size.
        """
        found: dict[int, Prediction] = {}
        for size in dict.fromkeys(x.shape for x in tensors):
            same = [i for i, x in enumerate(tensors) if x.shape == size]
            for part in parts(same, batch_size):
                given = [tensors[i] for i in part]
                outputs = self.forward(model, given)
                results = self.postprocess(
                    outputs, given, [images[i] for i in part], [names[i] for i in part]
                )
                found.update(zip(part, results, strict=True))
        return [found[i] for i in range(len(tensors))]

    def array_specs(self) -> dict[str, ArraySpec]:
        """Return the arrays of a result (`Prediction.arrays`) by name."""
        return {"result": ArraySpec(object, ())}

    @abstractmethod
    def input_size(self) -> Json:
        """Return the settings of resizing for the metadata of an exported file."""

    # Export.

    def export_graph(self, model: nn.Module) -> ExportGraph:
        """Return the exported part of a model."""
        return ExportGraph(NamedInput(model))

    @abstractmethod
    def export_side(self) -> int:
        """Return the side of the images with which an exported file is checked."""

    def export_bound(self, device: str) -> float:
        """Return the tolerance for outputs of an exported file against PyTorch, relative to the scale."""
        return EXPORT_BOUND[device]

    def compare(
        self, wanted: Sequence[Tensor], got: Sequence[Tensor], side: int
    ) -> tuple[float, float]:
        """Return the largest difference of outputs, and the scale to which it is relative.

        Args:
            wanted: PyTorch's outputs.
            got: those of an exported file.
            side: the longer side of the images.
        """
        pairs = zip(wanted, got, strict=True)
        return (
            max(float((a - b).abs().max()) for a, b in pairs),
            max(float(a.abs().max()) for a in wanted),
        )

    def agreement(self, wanted: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[float, int]:
        """Return the number of outputs that agree for one image, and their total; arguments as in `compare`."""
        return float((wanted[0].argmax(1) == got[0].argmax(1)).float().mean()), 1

    def predicted_class(self, outputs: Sequence[Tensor]) -> int | None:
        """Return the class index of one image, or None if the task has none."""
        return None

    @classmethod  # noqa: B027
    def write_hub_config(cls, recipe: Any, weights: Weights, source: Path, path: Path) -> None:
        """Write timm's config.json for weights that timm can load; by default nothing."""

    # Attention view.

    def trace_logits(self, model: Any, images: Tensor) -> Tensor:
        """Return one logit for each class, (1, classes) or (1, classes, h, w), with a graph for Grad-CAM."""
        found: Tensor = model(images)
        return found

    def trace_scores(self, logits: Tensor) -> Tensor:
        """Return the score of each class, (classes,), from `trace_logits` of one image."""
        return logits.softmax(0)

    @abstractmethod
    def trace_size(self, default: int, maximum: int) -> int:
        """Return the default short side of traced images."""

    # Memory of a server.

    @property
    def logits_bytes(self) -> int:
        """Bytes of outputs at the size of the image, in addition to the memory of the model."""
        return 0

    def limited(self, logits_mb: int) -> Self:
        """Return a copy that needs at most so many MiB for outputs at the size of the image."""
        return self

    @abstractmethod
    def seen_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Return the number of pixels that the model processes at once, and that of the resized image."""

    @abstractmethod
    def max_seen(self, batch: int, bound: int) -> int:
        """Return the maximum number of pixels that the model processes at once.

        Args:
            batch: maximum batch size.
            bound: limit of the server.
        """

    def probe_side(self, default: int) -> int:
        """Return the side of the image with which the memory of the model is measured."""
        return default

    def drawn_size(self, size: tuple[int, int], top: int) -> tuple[int, int]:
        """Return width and height of the drawn result for an image of this width and height."""
        return size

    def prediction_bytes(
        self, size: tuple[int, int], scaled: int, output: str, inline_mask: bool, top: int
    ) -> int:
        """Return the maximum number of bytes held at once between a decoded image and the response.

        Args:
            size: width and height of the image.
            scaled: number of pixels of the image after resizing for the model.
            output: kind of the response: json, drawn, mask.
            inline_mask: whether the mask is part of the JSON.
            top: classes that a drawn classification lists.
        """
        w, h = self.drawn_size(size, top)
        drawn = (RGB + JPEG_OUT) * w * h * (output == "drawn")
        return RGB * size[0] * size[1] + max(resizing(size, scaled), drawn)


def parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in parts of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
