"""Mean intersection over union from one confusion matrix, and the best and worst images for the report."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...data.decoding import undecodable_content
from ...data.reading import open_image
from ...data.sources.class_list import IGNORED, Labels
from ...errors import DataError
from ..base import Batch
from ..gallery import best_and_worst
from ..prediction import Json
from .segmenter import Inference, Segmenter

State = tuple[Tensor, int, list[Json]]  # confusion matrix, number of images, best and worst images
KEPT_SIDE = 320  # pixels of a kept prediction


def confusion(labels: Tensor, guesses: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix [label, guess], (classes, classes), int64; ignored pixels are left out."""
    counted = labels != IGNORED
    cells = labels[counted].long() * classes + guesses[counted].long()
    return cells.bincount(minlength=classes**2).view(classes, classes)


def scores(matrix: Tensor) -> dict[str, Tensor]:
    """Return IoU, accuracy (recall) and precision of each class in per cent; NaN if undefined."""
    right = matrix.diagonal().double()
    labelled, guessed = matrix.sum(1).double(), matrix.sum(0).double()
    return {
        "iou": 100 * right / (labelled + guessed - right),
        "accuracy": 100 * right / labelled,
        "precision": 100 * right / guessed,
    }


def summary(matrix: Tensor) -> dict[str, float]:
    """Return mIoU and mAcc over the classes that occur, and aAcc over pixels, in per cent."""
    found, total = scores(matrix), matrix.sum()
    if not total:
        raise DataError(
            "the validation set has no labelled pixel, so nothing can be measured; check its masks and data.ignore"
        )
    return {
        "miou": float(found["iou"].nanmean()),
        "macc": float(found["accuracy"].nanmean()),
        "aacc": float(100 * matrix.diagonal().sum() / total),
    }


class MeanIoU:
    """Segments each image at its own size and counts pixels."""

    def __init__(self, names: Sequence[str], how: Inference) -> None:
        self.names, self.how = list(names), how
        self.matrix = torch.zeros(len(names), len(names), dtype=torch.int64)
        self.images = 0
        self.entries: list[Json] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add a batch of images and masks, lists of uint8 (3, h, w) and (h, w)."""
        segment = Segmenter(model, self.how, len(self.names))
        for image, mask, key in zip(batch["images"], batch["masks"], batch["keys"], strict=True):
            guesses = segment(image)
            matrix = confusion(mask, guesses, len(self.names))
            self.matrix += matrix
            self.images += 1
            if matrix.sum():
                self._remember(int(key[1]), matrix, guesses)

    def _remember(self, index: int, matrix: Tensor, guesses: Tensor) -> None:
        # Only over classes in the labels, so that one pixel of another class does not change the score much.
        present = matrix.sum(1) > 0
        score = float(scores(matrix)["iou"][present].mean())
        entry: Json = {"index": index, "miou": score, "aacc": summary(matrix)["aacc"]}
        self.entries = best_and_worst([*self.entries, entry], "miou")
        if entry in self.entries:
            entry["prediction"] = pack(guesses.numpy())

    def state(self) -> State:
        """Return the matrix, the number of images, and the best and worst images."""
        return self.matrix, self.images, self.entries

    def merge(self, states: Sequence[State]) -> dict[str, float]:
        """Return the figures over all processes."""
        self.matrix = torch.stack([matrix for matrix, _, _ in states]).sum(0)
        self.images = sum(images for _, images, _ in states)
        entries = [entry for _, _, entries in states for entry in entries]
        self.entries = best_and_worst(entries, "miou")
        return summary(self.matrix) | {"images": float(self.images)}

    def table(self) -> list[Json]:
        """Return a row for each class; None for undefined figures."""
        found, pixels = scores(self.matrix), self.matrix.sum(1)
        share = pixels.double() / pixels.sum()
        return [
            {"class": name, "share": 100 * float(share[i])}
            | {k: None if v[i].isnan() else float(v[i]) for k, v in found.items()}
            for i, name in enumerate(self.names)
        ]

    def details(self) -> Json:
        """Return class names, confusion [label][guess], the table, the best and worst images, and the settings."""
        return {
            "classes": self.names,
            "confusion": self.matrix.tolist(),
            "per_class": self.table(),
            "gallery": self.entries,
            "inference": self.how.plain(),
        }


def pack(labels: Labels) -> str:
    """Encode labels as a small grey PNG in base64, for JSON."""
    image = Image.fromarray(labels)
    ratio = KEPT_SIDE / max(image.size)
    if ratio < 1:
        size = (max(1, round(image.width * ratio)), max(1, round(image.height * ratio)))
        image = image.resize(size, Image.Resampling.NEAREST)
    content = io.BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def unpack(text: str) -> Labels:
    """Decode the result of `pack`."""
    content = io.BytesIO(base64.b64decode(text))
    try:
        with open_image(content, KEPT_SIDE**2) as image:
            return np.asarray(image)
    except Exception as error:  # Pillow's decoders raise many exception types
        raise undecodable_content("prediction", error) from None
