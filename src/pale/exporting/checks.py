"""Compare the outputs and the speed of an exported file with PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.decoding import read_image
from ..data.reading import SUFFIXES
from ..errors import DataError, SettingsError
from ..predict.bundle import ModelBundle
from ..tasks.pipeline import Pipeline
from .writers import ExportError, Run, Say, as_tuple

Size = tuple[int, int, int]  # batch, height, width
ROUNDS, SECONDS = 5, 1.0  # limits of the timing at each size; the first one reached ends it


@dataclass(frozen=True)
class Check:
    """Comparison on one input.

    Attributes:
        size: batch, height, width.
        difference: largest difference of an output; for a detector, of boxes (relative to the longer side), scores and
            masks of the objects that both found, or 1 if their objects differ too much.
        scale: largest absolute output of PyTorch; 1 for a detector.
        torch_ms: milliseconds of the model in eager mode.
        ms: milliseconds of the file.
    """

    size: Size
    difference: float
    scale: float
    torch_ms: float
    ms: float

    @property
    def share(self) -> float:
        """The difference relative to the scale."""
        return self.difference / self.scale if self.scale else self.difference


@dataclass(frozen=True)
class OnData:
    """Comparison on images.

    Attributes:
        pictures: number of images (kept name).
        agreement: per cent of the images (segmentation: of the pixels) with the same class; detection: of the objects
            that both found.
        top1: accuracy of PyTorch in per cent, if folders are named like the classes.
        top1_file: accuracy of the file.
    """

    pictures: int  # kept name
    agreement: float
    top1: float | None = None
    top1_file: float | None = None


@torch.no_grad()
def check(model: nn.Module, run: Run, images: Tensor, pipeline: Pipeline) -> Check:
    """Run model and file on the same inputs, and compare outputs and times."""
    b, _, h, w = images.shape
    wanted, got = as_tuple(model(images)), run(images)
    for one, other in zip(wanted, got, strict=True):
        if one.shape != other.shape:
            raise ExportError(
                f"the file returns a tensor of shape {tuple(other.shape)} instead of {tuple(one.shape)} for "
                f"{b} images of {h}x{w}"
            )
    difference, scale = pipeline.compare(wanted, got, max(h, w))
    times = [median_ms(lambda call=call: call(images), images.is_cuda) for call in (model, run)]  # type: ignore[misc]
    return Check((b, h, w), difference, scale, times[0], times[1])


def must_pass(checks: Sequence[Check], bound: float) -> None:
    """Raise an error if a difference exceeds the bound."""
    for one in checks:
        if not one.share <= bound:
            b, h, w = one.size
            raise ExportError(
                f"the file does not compute the same as PyTorch: at {b} x {h} x {w} an output differs by "
                f"{one.difference:.3g}, the largest is {one.scale:.3g} (allowed: {bound:.0e} of it); "
                "nothing was written; please report it"
            )


def median_ms(call: Callable[[], object], cuda: bool = False) -> float:
    """Return the median time of a call after the first, in milliseconds."""
    times: list[float] = []
    call()
    began = time.perf_counter()
    while len(times) < ROUNDS and (not times or time.perf_counter() - began < SECONDS):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def images_in(folder: Path, loaded: ModelBundle) -> list[tuple[Path, int | None]]:
    """Return images with their class index, if their folder is named like a class."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give a folder of images")
    found = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError(
            f"there are no images in {folder} ({', '.join(SUFFIXES)}); give another folder"
        )
    number = {name: i for i, name in enumerate(loaded.classes)}
    return [(file, number.get(file.parent.name)) for file in found]


@torch.no_grad()
def on_data(
    loaded: ModelBundle,
    model: nn.Module,
    run: Run,
    images: Sequence[tuple[Path, int | None]],
    device: str,
    report: Say,
) -> OnData:
    """Run model and file on images, one at a time, and compare their predictions."""
    pipeline = loaded.pipeline
    same, of = 0.0, 0
    right: list[tuple[bool, bool]] = []  # of PyTorch and of the file, for labelled images
    for i, (path, label) in enumerate(images):
        if i % 20 == 0:
            report(f"comparing, {i} of {len(images)} images")
        pixels = loaded.normalise(loaded.preprocess(read_image(path))[None].to(device))
        wanted, got = as_tuple(model(pixels)), run(pixels)
        agreed, counted = pipeline.agreement(wanted, got)
        same, of = same + agreed, of + counted
        classes = pipeline.predicted_class(wanted), pipeline.predicted_class(got)
        if label is not None and None not in classes:
            right.append((classes[0] == label, classes[1] == label))
    labelled = len(right) == len(images)
    top1 = [100 * sum(column) / len(images) for column in zip(*right, strict=True)]
    agreement = 100 * same / of if of else 100.0
    return OnData(len(images), agreement, *(top1 if labelled else (None, None)))


def parse_size(word: str) -> Size:
    """Return batch, height and width of "1x224x224"."""
    parts = word.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise SettingsError(f"--sizes are batch x height x width, such as 1x224x224, got {word!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])
