"""A file beside PyTorch: how far its numbers differ, and how fast it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from .writers import Run, Say

if TYPE_CHECKING:
    from ..loading import Loaded

Size = tuple[int, int, int]  # batch, height, width
# Largest difference from PyTorch, as a share of the largest logit. CUDA convolutions run in TF32.
BOUND = {"cpu": 1e-3, "cuda": 2e-2}
OBJECT_BOUND = 1e-2  # of boxes (as shares of the image's side), scores and masks
MATCHED, SAME_BOX = 0.95, 0.9  # share of objects that must be found again; least IoU of one that is
ROUNDS, SECONDS = 10, 2.0  # of timing, at each size, whichever ends first


@dataclass(frozen=True)
class Check:
    """The file beside PyTorch on one input.

    Attributes:
        size: batch, height, width.
        difference: the largest, of any logit; of a detector, of boxes (as shares of the longer side), scores and masks
            of the objects that both found, or 1 if they found too different ones.
        scale: the largest logit of PyTorch's, without sign; of a detector 1.
        torch_ms: of the model in eager mode.
        ms: of the file.
    """

    size: Size
    difference: float
    scale: float
    torch_ms: float
    ms: float

    @property
    def share(self) -> float:
        """The difference as a share of the scale."""
        return self.difference / self.scale if self.scale else self.difference


@dataclass(frozen=True)
class OnData:
    """The file beside PyTorch on pictures.

    Attributes:
        pictures: how many.
        agreement: per cent of the pictures (segmentation: of the pixels) with the same class; of the objects, that
            both found.
        top1: PyTorch's accuracy in per cent, where folders are named as the classes.
        top1_file: likewise, of the file.
    """

    pictures: int
    agreement: float
    top1: float | None = None
    top1_file: float | None = None


@torch.no_grad()
def check(model: nn.Module, run: Run, images: Tensor) -> Check:
    """Run both on the same images."""
    b, _, h, w = images.shape
    found = model(images)
    wanted = (found,) if isinstance(found, Tensor) else found
    got = run(images)
    for one, other in zip(wanted, got, strict=True):
        if one.shape != other.shape:
            raise RuntimeError(
                f"the file gives a tensor of shape {tuple(other.shape)} in place of {tuple(one.shape)} for "
                f"{b} images of {h}x{w}"
            )
    if len(wanted) == 1:
        difference, scale = float((wanted[0] - got[0]).abs().max()), float(wanted[0].abs().max())
    else:
        difference, scale = difference_of_objects(wanted, got, max(h, w)), 1.0
    times = [median_ms(lambda call=call: call(images), images.is_cuda) for call in (model, run)]  # type: ignore[misc]
    return Check((b, h, w), difference, scale, times[0], times[1])


def found_again(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For each object (boxes, scores, labels, ...): the place of the same one in `got`, and whether there is one."""
    able, there = wanted[1] > 0, got[1] > 0
    overlap = box_iou(wanted[0].float(), got[0].float())
    overlap = overlap * (wanted[2][:, None] == got[2][None]) * there
    best, place = overlap.max(1)
    return place[able], best[able] >= SAME_BOX


def difference_of_objects(wanted: Sequence[Tensor], got: Sequence[Tensor], side: int) -> float:
    """The largest of boxes, scores and masks of objects in both; 1 if too many are in one alone.

    Places are not compared: where two scores are equal but for rounding, either may come first, and of two boxes that
    suppress each other either may stay.
    """
    count = int((wanted[1] > 0).sum())
    if not count:
        return float(got[1].max()) if len(got[1]) else 0.0
    place, same = found_again(wanted, got)
    if float(same.float().mean()) < MATCHED:
        return 1.0
    own = [x[wanted[1] > 0][same] for x in wanted]
    other = [x[place][same] for x in got]
    apart = [(a.float() - b.float()).abs().max() for a, b in zip(own, other, strict=True)]
    apart[0] = apart[0] / side
    return max(float(value) for value in (apart[0], apart[1], *apart[3:]))


def must_pass(checks: Sequence[Check], bound: float) -> None:
    """Raise where a difference is larger than its bound."""
    for one in checks:
        if not one.share <= bound:
            b, h, w = one.size
            raise RuntimeError(
                f"the file does not compute what PyTorch does: at {b} x {h} x {w} a number is off by "
                f"{one.difference:.3g}, where the largest is {one.scale:.3g} (allowed: {bound:.0e} of it); "
                "nothing was written; please report it"
            )


def median_ms(call: Callable[[], object], cuda: bool = False) -> float:
    """Milliseconds of a warm call."""
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


def pictures_in(folder: Path, loaded: Loaded) -> list[tuple[Path, int | None]]:
    """Pictures with the number of their class, where the folder that they lie in is named as one."""
    from ..data.images import SUFFIXES

    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} of pictures")
    found = [file for file in sorted(folder.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if not found:
        raise ValueError(f"there are no pictures in {folder} ({', '.join(SUFFIXES)})")
    number = {name: i for i, name in enumerate(loaded.classes)}
    return [(file, number.get(file.parent.name)) for file in found]


@torch.no_grad()
def on_data(
    loaded: Loaded,
    model: nn.Module,
    run: Run,
    pictures: Sequence[tuple[Path, int | None]],
    device: str,
    say: Say,
) -> OnData:
    """Both on pictures."""
    from ..data.images import read_image

    labelled = loaded.kind == "classification" and all(n is not None for _, n in pictures)
    same, of, right, right_file = 0.0, 0, 0, 0
    for i, (path, label) in enumerate(pictures):
        if i % 20 == 0:
            say(f"comparing, {i} of {len(pictures)} pictures")
        images = loaded.normalise(loaded.pixels(read_image(path))[None].to(device))
        if loaded.kind == "detection":
            _, again = found_again(model(images), run(images))
            same, of = same + float(again.sum()), of + len(again)
            continue
        ours, files = model(images).argmax(1), run(images)[0].argmax(1)
        same, of = same + float((ours == files).float().mean()), of + 1
        if labelled:
            right += int(ours == label)
            right_file += int(files == label)
    n = len(pictures)
    top1 = (100 * right / n, 100 * right_file / n) if labelled else (None, None)
    return OnData(n, 100 * same / max(1, of) if of else 100.0, *top1)
