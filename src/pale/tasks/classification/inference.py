"""Inference of a classifier, and its result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...compat import save_config_for_hf
from ...core.settings import vary
from ...errors import WeightsError
from ...model.pale_transformer import VARIANTS
from ...weights.compare import load_into
from ...weights.read import Weights
from ..building import build_for
from ..pipeline import Options
from ..prediction import ArraySpec, Json, Prediction, Region
from ..square_pipeline import SquarePipeline
from .draw import draw_bars, size_with_bars

LICENSE = re.compile(r"[A-Za-z0-9.+-]{1,64}")  # an SPDX identifier


@dataclass(frozen=True)
class Classified(Prediction):
    """The classes of an image.

    Attributes:
        scores: probability by class name, the best first.
    """

    scores: Mapping[str, float]

    @property
    def best(self) -> str:
        """The most probable class."""
        return next(iter(self.scores))

    def plain(self) -> Json:
        """Return name and size of the image, and the best classes."""
        best = [{"class": name, "probability": p} for name, p in self.scores.items()]
        return self.header() | {"classes": best}

    def regions(self) -> list[Region]:
        """Return the best class, of the whole image."""
        return [Region(self.best, self.scores[self.best])]

    def words(self) -> str:
        """Return classes and per cent, the best first."""
        return ", ".join(f"{name} {100 * p:.1f} %" for name, p in self.scores.items())

    def rows(self) -> list[Json]:
        """Return one row for each class."""
        image = {"picture": self.name}  # kept name
        return [
            image | {"rank": rank, "class": name, "probability": f"{p:.6f}"}
            for rank, (name, p) in enumerate(self.scores.items(), start=1)
        ]

    def arrays(self, classes: Sequence[str]) -> dict[str, NDArray[np.generic]]:
        """Return probabilities, class indices and names, the best first."""
        index = {name: i for i, name in enumerate(classes)}
        return {
            "probabilities": np.array(list(self.scores.values()), np.float32),
            "classes": np.array([index[name] for name in self.scores], np.int64),
            "names": np.array([name.encode() for name in self.scores], object),
        }

    def draw(self) -> Image.Image:
        """Return the image with bars of its best classes below."""
        return draw_bars(self.image, self.scores)


@dataclass(frozen=True, kw_only=True)
class ClassificationPipeline(SquarePipeline):
    """Inference of a classifier.

    Attributes:
        top: number of classes in a result.
        tags: number of outputs, at the end, that are independent tags; the others are classes, of which an image has
            one. The results of a model with both list only the classes.
        score: probability above which tags are listed; the most probable tag is always listed.
    """

    kind: ClassVar[str] = "classification"
    question: ClassVar[str] = "What is it?"
    has_embedding: ClassVar[bool] = True

    top: int = 5
    tags: int = 0
    score: float = 0.5

    @classmethod
    def from_recipe(cls, recipe: Any, about: Json, source: str, *, trusted: bool) -> Self:
        """Return the pipeline of weights, with readable class names if the header has them.

        Without class names in the header there are ImageNet's 1000 classes.
        """
        how = recipe.augment.interpolation
        classes = tuple(about.get("label_names") or about.get("classes") or ())
        tags = about.get("tags", 0)
        if type(tags) is not int or not 0 <= tags <= len(classes):
            raise WeightsError(
                f"{source}: tags in the header must be a number from 0 to {len(classes)}, got {repr(tags)[:40]}; use "
                "another file"
            )
        return cls(
            classes=classes,
            tags=tags,
            size=recipe.data.size,
            crop=recipe.data.crop,
            interpolation="bicubic" if how == "random" else how,
        )

    @classmethod
    def from_module(cls, model: nn.Module, config: Mapping[str, Any]) -> Self:
        """Return the pipeline with the class names in timm's config, if they are those of the classifier."""
        names = config.get("label_names") or ()
        fitting = len(names) == getattr(model, "num_classes", None)
        known = fitting and all(isinstance(name, str) for name in names)
        return replace(super().from_module(model, config), classes=tuple(names) if known else ())

    def build(self, recipe: Any) -> nn.Module:
        """Build the classifier with random weights."""
        settings = vary(recipe.model, weights=None, new_head=False)
        model: nn.Module = settings.build(len(self.classes) or 1000, self.size)
        return model

    def with_options(self, options: Options, source: str) -> Self:
        """Return a copy that lists `top` classes, or the tags above a score."""
        return replace(super().with_options(options, source), top=options.top, score=options.score)

    @property
    def listed(self) -> int:
        """Number of outputs, from the first on, that results can list."""
        return len(self.classes) - self.tags or len(self.classes)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of classes and tags, (..., outputs), from logits."""
        classes, tags = logits.tensor_split([logits.shape[-1] - self.tags], -1)
        return (
            torch.cat([classes.softmax(-1), tags.sigmoid()], -1)
            if self.tags
            else classes.softmax(-1)
        )

    def trace_scores(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, (classes,), from `trace_logits` of one image."""
        return self.probabilities(logits)

    def postprocess(
        self,
        outputs: Tensor,
        tensors: Sequence[Tensor],
        images: Sequence[Image.Image],
        names: Sequence[str],
    ) -> list[Classified]:
        """Return the most probable classes."""
        found = self.probabilities(outputs.float())[:, : self.listed]
        best = found.topk(min(self.top, self.listed))
        rows = zip(names, images, best.values.tolist(), best.indices.tolist(), strict=True)
        least = self.score if self.listed == self.tags else 0.0
        return [
            Classified(
                n,
                x,
                {
                    self.classes[i]: v
                    for rank, (i, v) in enumerate(zip(places, values, strict=True))
                    if rank == 0 or v >= least
                },
            )
            for n, x, values, places in rows
        ]

    def array_specs(self) -> dict[str, ArraySpec]:
        """Return `top` probabilities, class indices and names; for tags, those that are listed."""
        of_tags = self.tags > 0 and self.listed == self.tags
        dims: tuple[int | str, ...] = ("count",) if of_tags else (min(self.top, self.listed),)
        types = {"probabilities": np.float32, "classes": np.int64, "names": object}
        return {name: ArraySpec(dtype, dims) for name, dtype in types.items()}

    def predicted_class(self, outputs: Sequence[Tensor]) -> int:
        """Return the number of the most probable class."""
        return int(outputs[0].argmax(1))

    def drawn_size(self, size: tuple[int, int], top: int) -> tuple[int, int]:
        """Return the size of the image with `top` bars below."""
        return size_with_bars(size, top)

    @classmethod
    def write_hub_config(cls, recipe: Any, weights: Weights, source: Path, path: Path) -> None:
        """Write timm's config.json, after the weights have been loaded into the model."""
        made = cls.from_recipe(recipe, weights.about, str(source), trusted=True)
        model: Any = build_for(weights, lambda: made.build(recipe), source)
        load_into(model, weights, source, new_head=False)
        model.pretrained_cfg = model.pretrained_cfg | {
            "num_classes": model.num_classes,
            "input_size": (3, made.size, made.size),
            "pool_size": (-(-made.size // 32),) * 2,
            "crop_pct": made.crop,
            "interpolation": made.interpolation,
            "tag": "",
            "license": _license(weights.about),
        }
        settings = recipe.model
        arguments: Json = dict(settings.options)
        if settings.name in VARIANTS:
            given = ("attention", "position", "pale_size", "stem_stride")
            default = type(settings).model_fields
            plain = settings.plain()
            arguments |= {n: plain[n] for n in given if getattr(settings, n) != default[n].default}
            if settings.position == "ape":
                arguments["img_size"] = made.size
        names = {"label_names": list(made.classes)} if made.classes else {}
        save_config_for_hf(model, path, model_config=names, model_args=arguments)
        _keep_arguments(path, arguments)


def _license(about: Json) -> str | None:
    """Return the licence that a header states; that of the code does not apply to other weights."""
    found = about.get("license")
    return found if isinstance(found, str) and LICENSE.fullmatch(found) else None


def _keep_arguments(path: Path, arguments: Json) -> None:
    """Keep only these arguments of the model in a config.json.

    timm 1.0.31 adds all others, such as num_classes, which transformers then passes twice.
    """
    config = json.loads(path.read_text())
    config.pop("model_args", None)
    if arguments:
        config["model_args"] = arguments
    path.write_text(json.dumps(config, indent=2))
