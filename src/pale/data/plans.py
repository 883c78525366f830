"""What training will do to a picture, drawn but not done: for pictures that are kept on the device.

The draws are those of `TrainTransform`, number by number, so a sample of an epoch looks the same wherever it is made.
A worker draws plans in a tenth of the time that it takes to carry them out; `augmenting.show` carries out a batch.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import auto_augment
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import ColorJitter

from .slide import GEOMETRIC, place
from .transforms import Augment, Boxes, TrainTransform, chance

# timm's function: what the device calls it
NAMES = {
    auto_augment.auto_contrast: "auto_contrast",
    auto_augment.equalize: "equalize",
    auto_augment.invert: "invert",
    auto_augment.posterize: "posterize",
    auto_augment.solarize: "solarize",
    auto_augment.solarize_add: "solarize_add",
    auto_augment.color: "colour",
    auto_augment.contrast: "contrast",
    auto_augment.brightness: "brightness",
    auto_augment.sharpness: "sharpness",
} | dict.fromkeys(GEOMETRIC, "affine")
Step = tuple[str, tuple[float, ...]]
# What kernels call them; from "brightness" on all are look-ups of grey levels.
CODES = {
    name: code
    for code, name in enumerate(
        (
            *("affine", "sharpness", "colour", "brightness", "contrast", "invert", "posterize"),
            *("solarize", "solarize_add", "auto_contrast", "equalize"),
        ),
        start=1,
    )
}
AMOUNTS = 10  # numbers of an operation at most


@dataclass
class Sketch:
    """The plan of one image."""

    sample: int
    crop: tuple[int, int, int, int]  # y, x, height, width in the picture
    flips: tuple[bool, bool]  # left and right, up and down
    cubic: bool  # how the crop is resized
    steps: list[Step]  # operations with their numbers
    boxes: list[tuple[int, int, int, int]]  # y, x, height, width: erased
    key: int  # of the noise in them
    places: NDArray[np.float32]  # as `TrainTransform.see` gives them
    content: Tensor | None = None  # where the picture comes with its plan: a file, or pixels


class Recorder:
    """Takes the place of an operation: draws what it draws, notes what it would do."""

    def __init__(self, function: Any, planner: Planner) -> None:
        if function not in NAMES:
            name = getattr(function, "__name__", function)
            raise ValueError(
                f"augment.auto asks for {name}, which is done to pictures on the CPU alone; set "
                "data.on_device to nothing, or choose a policy without it"
            )
        self.function, self.name, self.planner = function, NAMES[function], planner

    def __call__(self, image: Image.Image, *amounts: float, **how: Any) -> Image.Image:
        """The image as it was."""
        numbers: tuple[float, ...] = amounts or (0.0,)
        if self.name == "affine":
            resample = how["resample"]
            if isinstance(resample, list | tuple):
                resample = random.choice(resample)
            where = place(self.function, amounts[0], self.planner.size)
            self.planner.notes.append(where)
            fill = how.get("fillcolor", (0, 0, 0))
            cubic = float(resample == Image.Resampling.BICUBIC)
            numbers = (*where[:2].ravel(), cubic, *fill)
        elif self.name == "posterize":
            numbers = (float(max(amounts[0], 1)),)
        self.planner.steps.append((self.name, numbers))
        return image


class JitterRecorder:
    """The same for torchvision's colour jitter."""

    def __init__(self, jitter: ColorJitter, planner: Planner) -> None:
        if jitter.hue is not None:
            raise ValueError(
                "a jitter of hues is done to pictures on the CPU alone; set data.on_device to nothing"
            )
        self.jitter, self.planner = jitter, planner

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image as it was."""
        jitter = self.jitter
        order, *factors = ColorJitter.get_params(
            jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue
        )
        for i in order.tolist():
            if i < 3 and factors[i] is not None:
                self.planner.steps.append(
                    (("brightness", "contrast", "colour")[i], (float(factors[i]),))
                )
        return image


class Planner(TrainTransform):
    """Size of a picture -> what to do to it; draws from the global generators, to be seeded outside."""

    def __init__(self, size: int, augment: Augment) -> None:
        if augment.interpolation not in ("bilinear", "bicubic", "random"):
            raise ValueError(
                "augment.interpolation must be bilinear, bicubic or random for images made on the device, "
                f"got {augment.interpolation!r}; change it, or set data.on_device to nothing"
            )
        super().__init__(size, augment)
        self.steps: list[Step] = []
        for i, step in enumerate(self.colour.transforms):
            if isinstance(step, ColorJitter):
                self.colour.transforms[i] = JitterRecorder(step, self)
            elif isinstance(step, auto_augment.RandAugment | auto_augment.AutoAugment):
                for op in self.operations(step):
                    op.aug_fn = Recorder(auto_augment.NAME_TO_OP[op.name], self)
            else:
                raise ValueError(
                    f"augment.auto={augment.auto!r} needs {type(step).__name__}, which is done to pictures on the CPU "
                    "alone; set data.on_device to nothing"
                )
        # Without noise: the device makes its own.
        self.boxes = RandomErasing(augment.erase, mode="const", device="cpu")

    def plan(self, sample: int, width: int, height: int, key: int) -> Sketch:
        """What will be done to picture number `sample`; `key` is for the noise of random erasing."""
        augment = self.augment
        picture = Image.new("L", (width, height))
        y, x, h, w = RandomResizedCropAndInterpolation.get_params(
            picture, augment.scale, augment.ratio
        )
        cubic = augment.interpolation == "bicubic"
        if augment.interpolation == "random":
            cubic = random.choice(("bilinear", "bicubic")) == "bicubic"
        flips = chance(augment.flip), chance(augment.vertical_flip)
        self.notes.clear()
        self.steps = []
        self.colour(picture)
        boxes = Boxes()
        if augment.erase:
            self.boxes._erase(boxes, 3, self.size, self.size, torch.float32)
        erased = [
            (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)
            for (_, rows, columns), _ in boxes
        ]
        places = self.places((width, height), (y, x, h, w), *flips)
        return Sketch(sample, (y, x, h, w), flips, cubic, self.steps, erased, key, places)


@dataclass
class Plan:
    """The plans of a batch, as few tensors as can be.

    Attributes:
        ints: all whole numbers, one after the other: HEAD of each image, BOX of each box, the operation of each image
            in each turn (0 for none), and the images of each of `steps`.
        floats: the operations' numbers, AMOUNTS of each image in each turn.
        size: images in the batch.
        window: height and width of the largest crop.
        turns: operations on an image at most.
        steps: the operations once more, image by image: name, turn, where their images begin in `ints`, and how many
            there are.
        erased: how many boxes.
    """

    ints: Tensor
    floats: Tensor
    size: int
    window: tuple[int, int]
    turns: int
    steps: list[tuple[str, int, int, int]]
    erased: int

    HEAD = 8  # numbers of an image: sample, crop, flips, cubic
    BOX = 6  # numbers of a box: image, y, x, height, width, key

    @property
    def boxes(self) -> int:
        """Where they begin in `ints`."""
        return self.size * self.HEAD

    @property
    def codes(self) -> int:
        """Where they begin in `ints`."""
        return self.boxes + self.erased * self.BOX

    def pin_memory(self) -> Plan:
        """Where a GPU can fetch it while it computes."""
        return replace(self, ints=self.ints.pin_memory(), floats=self.floats.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> Plan:
        """On the device."""
        ints, floats = (x.to(device, non_blocking=non_blocking) for x in (self.ints, self.floats))
        return replace(self, ints=ints, floats=floats)


def gather(sketches: list[Sketch]) -> Plan:
    """The plans of a batch in one."""
    ints: list[int] = []
    for s in sketches:
        ints += [s.sample, *s.crop, *s.flips, s.cubic]
    boxes = [(i, *box, s.key) for i, s in enumerate(sketches) for box in s.boxes]
    for box in boxes:
        ints += box
    turns, size = max(len(s.steps) for s in sketches), len(sketches)
    floats = np.zeros((turns, size, AMOUNTS))
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    codes = np.zeros((turns, size), np.int64)
    for i, s in enumerate(sketches):
        for turn, (name, amounts) in enumerate(s.steps):
            codes[turn, i] = CODES[name]
            floats[turn, i, : len(amounts)] = amounts
            groups[turn, name].append(i)
    ints += codes.ravel().tolist()
    steps = []
    for (turn, name), members in sorted(groups.items()):
        steps.append((name, turn, len(ints), len(members)))
        ints += members
    window = max(s.crop[2] for s in sketches), max(s.crop[3] for s in sketches)
    whole = torch.tensor(ints, dtype=torch.int64)
    numbers = torch.from_numpy(floats.ravel())
    return Plan(whole, numbers, size, window, turns, steps, len(boxes))
