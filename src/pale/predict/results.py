"""What a model says about one picture: as numbers, as JSON, in words, and drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..data.masks import Colour, Labels
from ..tasks.detection import drawing
from ..tasks.segmentation import metric

INK, PAPER, BAR = (38, 42, 51), (250, 250, 247), (60, 118, 160)


@dataclass(frozen=True)
class Prediction(ABC):
    """What was said about one picture.

    Attributes:
        name: of the picture.
        picture: RGB, as it was read.
    """

    name: str
    picture: Image.Image

    @abstractmethod
    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""

    @abstractmethod
    def words(self) -> str:
        """In one line."""

    @abstractmethod
    def draw(self) -> Image.Image:
        """On the picture."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Lines of a table."""

    def _about(self) -> dict[str, Any]:
        return {"picture": self.name, "width": self.picture.width, "height": self.picture.height}


@dataclass(frozen=True)
class Classified(Prediction):
    """The classes of a picture.

    Attributes:
        scores: probability by class name, the best first.
    """

    scores: Mapping[str, float]

    @property
    def best(self) -> str:
        """The most probable class."""
        return next(iter(self.scores))

    def plain(self) -> dict[str, Any]:
        """Picture, size, and the best classes."""
        best = [{"class": name, "probability": p} for name, p in self.scores.items()]
        return self._about() | {"classes": best}

    def words(self) -> str:
        """Class and per cent, the best first."""
        return ", ".join(f"{name} {100 * p:.1f} %" for name, p in self.scores.items())

    def rows(self) -> list[dict[str, Any]]:
        """One for each class."""
        return [
            {"picture": self.name, "rank": rank, "class": name, "probability": f"{p:.6f}"}
            for rank, (name, p) in enumerate(self.scores.items(), start=1)
        ]

    def draw(self) -> Image.Image:
        """The picture with bars of its best classes below."""
        width = max(self.picture.width, 240)
        line = max(16, width // 22)
        font = ImageFont.load_default(round(0.7 * line))
        height = round(line * (len(self.scores) + 0.6))
        canvas = Image.new("RGB", (width, self.picture.height + height), PAPER)
        canvas.paste(self.picture, ((width - self.picture.width) // 2, 0))
        pen = ImageDraw.Draw(canvas)
        for i, (name, p) in enumerate(self.scores.items()):
            top = self.picture.height + round(line * (i + 0.3))
            end = 0.03 * width + 0.4 * width * p
            pen.rectangle((0.03 * width, top + 0.15 * line, end, top + 0.85 * line), fill=BAR)
            words = f"{100 * p:.1f} %  {name}"
            pen.text((0.46 * width, top + 0.05 * line), words, INK, font)
        return canvas


@dataclass(frozen=True)
class Segmented(Prediction):
    """The class of every pixel.

    Attributes:
        labels: class numbers, (h, w), uint8.
        classes: names, by number.
        colours: likewise.
    """

    labels: Labels
    classes: Sequence[str]
    colours: Sequence[Colour]

    @property
    def shares(self) -> dict[str, float]:
        """Per cent of the pixels by class name, the largest first; absent ones are left out."""
        counts = metric.pixel_counts(self.labels, len(self.classes))
        order = np.argsort(-counts, kind="stable")
        return {self.classes[i]: float(100 * counts[i] / counts.sum()) for i in order if counts[i]}

    def plain(self) -> dict[str, Any]:
        """Picture, size, shares of the classes."""
        shares = [
            {
                "class": name,
                "share": share,
                "colour": list(self.colours[list(self.classes).index(name)]),
            }
            for name, share in self.shares.items()
        ]
        return self._about() | {"classes": shares}

    def words(self) -> str:
        """Class and per cent of the pixels."""
        return ", ".join(f"{name} {share:.1f} %" for name, share in self.shares.items())

    def rows(self) -> list[dict[str, Any]]:
        """One for each class that occurs."""
        return [
            {"picture": self.name, "class": name, "share": f"{share:.4f}"}
            for name, share in self.shares.items()
        ]

    def draw(self) -> Image.Image:
        """The picture under its classes' colours."""
        return metric.overlay(self.picture, self.labels, self.colours)

    def mask(self) -> Image.Image:
        """A palette PNG: pixels are class numbers."""
        return metric.indexed(self.labels, self.colours)


@dataclass(frozen=True)
class Detected(Prediction):
    """The objects of a picture.

    Attributes:
        objects: COCO's results without an image's id, the surest first.
        classes: names.
        categories: their ids.
    """

    objects: Sequence[dict[str, Any]]
    classes: Sequence[str]
    categories: Sequence[int]

    def _name(self, entry: dict[str, Any]) -> str:
        return self.classes[list(self.categories).index(entry["category_id"])]

    @property
    def counts(self) -> dict[str, int]:
        """Objects by class name, the most first."""
        counts: dict[str, int] = {}
        for entry in self.objects:
            counts[self._name(entry)] = counts.get(self._name(entry), 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def plain(self) -> dict[str, Any]:
        """Picture, size, objects with class, score, box and, in COCO's run lengths, shape."""
        return self._about() | {"objects": [{"class": self._name(e)} | e for e in self.objects]}

    def words(self) -> str:
        """How many of what."""
        return ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "nothing"

    def rows(self) -> list[dict[str, Any]]:
        """One for each object."""
        found = []
        for e in self.objects:
            box = zip(("left", "top", "width", "height"), e["bbox"], strict=True)
            row = {"picture": self.name, "class": self._name(e), "score": f"{e['score']:.4f}"}
            found.append(row | {k: f"{v:.2f}" for k, v in box})
        return found

    def draw(self) -> Image.Image:
        """The picture under shapes and boxes, with names and scores."""
        return drawing.overlay(self.picture, self.objects, self.classes, self.categories)
