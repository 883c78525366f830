"""Mean intersection over union from one confusion matrix; the best and the worst images for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...data.masks import IGNORED, Colour, Labels
from .inference import Inference, Segmenter

SHOWN = 6  # images at each end
KEPT_SIDE = 320  # pixels of a kept prediction
STRIP = 256  # rows


def confusion(labels: Tensor, guesses: Tensor, classes: int) -> Tensor:
    """(classes, classes) of int64, [label, guess]; ignored pixels are left out."""
    counted = labels != IGNORED
    cells = labels[counted].long() * classes + guesses[counted].long()
    return cells.bincount(minlength=classes**2).view(classes, classes)


def scores(matrix: Tensor) -> dict[str, Tensor]:
    """Per class, in per cent: IoU, accuracy (recall), precision; no number where nothing could be right."""
    right = matrix.diagonal().double()
    labelled, guessed = matrix.sum(1).double(), matrix.sum(0).double()
    return {
        "iou": 100 * right / (labelled + guessed - right),
        "accuracy": 100 * right / labelled,
        "precision": 100 * right / guessed,
    }


def summary(matrix: Tensor) -> dict[str, float]:
    """MIoU and mAcc over the classes that occur, aAcc over pixels, in per cent."""
    found, total = scores(matrix), matrix.sum()
    if not total:
        raise ValueError(
            "there is no labelled pixel in the validation set; nothing can be measured"
        )
    return {
        "miou": float(found["iou"].nanmean()),
        "macc": float(found["accuracy"].nanmean()),
        "aacc": float(100 * matrix.diagonal().sum() / total),
    }


class MeanIoU:
    """Segments each image of the batch at its own size and counts."""

    def __init__(self, names: Sequence[str], how: Inference, keep: bool = True) -> None:
        self.names, self.how, self.keep = list(names), how, keep
        self.matrix = torch.zeros(len(names), len(names), dtype=torch.int64)
        self.images = 0
        self.entries: list[dict[str, Any]] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Take in images and masks, lists of uint8 (3, h, w) and (h, w)."""
        segment = Segmenter(model, self.how, len(self.names))
        for image, mask, key in zip(batch["images"], batch["masks"], batch["keys"], strict=True):
            guesses = segment(image)
            matrix = confusion(mask, guesses, len(self.names))
            self.matrix += matrix
            self.images += 1
            if self.keep and matrix.sum():
                self._remember(int(key[1]), matrix, guesses)

    def _remember(self, index: int, matrix: Tensor, guesses: Tensor) -> None:
        # Over the classes that are there: a stray pixel of another one should not decide.
        present = matrix.sum(1) > 0
        score = float(scores(matrix)["iou"][present].mean())
        entry: dict[str, Any] = {"index": index, "miou": score, "aacc": summary(matrix)["aacc"]}
        self.entries = ends([*self.entries, entry])
        if entry in self.entries:
            entry["prediction"] = pack(guesses.numpy())

    def state(self) -> Any:
        """Matrix, count, images at both ends."""
        return self.matrix, self.images, self.entries

    def merge(self, states: Sequence[Any]) -> dict[str, float]:
        """Figures over all processes."""
        self.matrix = torch.stack([matrix for matrix, _, _ in states]).sum(0)
        self.images = sum(images for _, images, _ in states)
        self.entries = ends([entry for _, _, entries in states for entry in entries])
        return summary(self.matrix) | {"images": float(self.images)}

    def table(self) -> list[dict[str, Any]]:
        """A row for each class; None where there is no number."""
        found, pixels = scores(self.matrix), self.matrix.sum(1)
        share = pixels.double() / pixels.sum()
        return [
            {"class": name, "share": 100 * float(share[i])}
            | {k: None if v[i].isnan() else float(v[i]) for k, v in found.items()}
            for i, name in enumerate(self.names)
        ]

    def details(self) -> dict[str, Any]:
        """Class names, confusion [label][guess], the table, the images at both ends, what was done."""
        return {
            "classes": self.names,
            "confusion": self.matrix.tolist(),
            "per_class": self.table(),
            "gallery": self.entries,
            "inference": self.how.plain(),
        }


def ends(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best and the worst, best first."""
    entries = sorted(entries, key=lambda entry: (-entry["miou"], entry["index"]))
    return entries if len(entries) <= 2 * SHOWN else entries[:SHOWN] + entries[-SHOWN:]


def pack(labels: Labels) -> str:
    """A small grey PNG in base64, for JSON."""
    image = Image.fromarray(labels)
    ratio = KEPT_SIDE / max(image.size)
    if ratio < 1:
        size = (max(1, round(image.width * ratio)), max(1, round(image.height * ratio)))
        image = image.resize(size, Image.Resampling.NEAREST)
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def unpack(text: str) -> Labels:
    """What `pack` packed."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def pixel_counts(labels: Labels, classes: int) -> NDArray[np.int64]:
    """Pixels of each class, counted in strips."""
    counts = np.zeros(256, np.int64)
    for top in range(0, len(labels), STRIP):
        counts += np.bincount(labels[top : top + STRIP].ravel(), minlength=256)
    return counts[:classes]


def indexed(labels: Labels, colours: Sequence[Colour]) -> Image.Image:
    """A palette PNG: pixels are class numbers, shown in their colours; ignored ones are white."""
    h, w = labels.shape
    image = Image.frombytes("P", (w, h), np.ascontiguousarray(labels).tobytes())
    table = [0] * 768
    for i, colour in enumerate(colours):
        table[3 * i : 3 * i + 3] = colour
    table[765:] = [255, 255, 255]
    image.putpalette(table)
    return image


def overlay(
    picture: Image.Image, labels: Labels, colours: Sequence[Colour], strength: float = 0.55
) -> Image.Image:
    """The picture under its classes' colours; labels of another size are scaled to it."""
    mask = Image.fromarray(labels)
    if mask.size != picture.size:
        mask = mask.resize(picture.size, Image.Resampling.NEAREST)
    index, pixels = np.asarray(mask), np.asarray(picture.convert("RGB"))
    table = np.zeros((256, 3), np.float32)
    table[: len(colours)] = colours
    mixed = np.empty_like(pixels)
    for top in range(0, len(index), STRIP):  # a large picture in floats would be many times itself
        rows = slice(top, top + STRIP)
        known = (index[rows] != IGNORED)[..., None]
        both = (1 - strength) * pixels[rows] + strength * table[index[rows]]
        mixed[rows] = np.where(known, both.round(), pixels[rows])
    return Image.fromarray(mixed)
