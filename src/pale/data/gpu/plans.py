"""Augmentation plans: the random draws of `TrainTransform` without their execution, for images on the device.

The draws are the same numbers in the same order, so a sample of an epoch looks the same on CPU and device. Drawing
plans takes a worker a tenth of the time of executing them; `augment.augment_batch` executes those of a batch.
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

from ...compat import erase
from ..transforms.images import Augment, BoxRecorder, TrainTransform, draw_chance
from ..transforms.slide import GEOMETRIC, Operation, source_matrix

# Names of functions in timm, as in `augment.OPERATIONS`.
NAMES: dict[Operation, str] = {
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
# Numbers of the operations in the kernels; from "brightness" on all are look-up tables of grey levels.
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
AMOUNTS = 10  # maximum number of parameters of an operation


@dataclass
class ImagePlan:
    """The plan of one image.

    Attributes:
        sample: index of the image.
        crop: y, x, height, width in the source image.
        flips: horizontal, vertical.
        cubic: whether the crop is resized with bicubic interpolation.
        steps: operations with their parameters.
        boxes: y, x, height, width of erased boxes.
        key: seed of the noise in the boxes.
        places: matrix of `TrainTransform.with_places`.
        side: side of the augmented image.
        content: the encoded file or its pixels, if it is sent with the plan.
    """

    sample: int
    crop: tuple[int, int, int, int]
    flips: tuple[bool, bool]
    cubic: bool
    steps: list[Step]
    boxes: list[tuple[int, int, int, int]]
    key: int
    places: NDArray[np.float32]
    side: int
    content: Tensor | None = None


class OperationRecorder:
    """Stand-in for an operation that makes the same draws and records name and parameters."""

    def __init__(self, function: Operation, planner: Planner) -> None:
        if function not in NAMES:
            name = getattr(function, "__name__", function)
            raise ValueError(
                f"augment.auto uses {name}, which runs only on the CPU; set data.on_device to nothing, or choose a "
                "policy without it"
            )
        self.function, self.name, self.planner = function, NAMES[function], planner

    def __call__(self, image: Image.Image, *amounts: float, **options: Any) -> Image.Image:
        """Record the operation and return the image unchanged."""
        numbers: tuple[float, ...] = amounts or (0.0,)
        if self.name == "affine":
            resample = options["resample"]
            if isinstance(resample, list | tuple):
                resample = random.choice(resample)
            matrix = source_matrix(self.function, amounts[0], self.planner.size)
            self.planner.matrices.append(matrix)
            fill = options.get("fillcolor", (0, 0, 0))
            cubic = float(resample == Image.Resampling.BICUBIC)
            numbers = (*matrix[:2].ravel(), cubic, *fill)
        elif self.name == "posterize":
            numbers = (float(max(amounts[0], 1)),)
        self.planner.steps.append((self.name, numbers))
        return image


class JitterRecorder:
    """Stand-in for torchvision's `ColorJitter` that makes the same draws and records them."""

    def __init__(self, jitter: ColorJitter, planner: Planner) -> None:
        if jitter.hue is not None:
            raise ValueError(
                "colour jitter of the hue runs only on the CPU; set data.on_device to nothing"
            )
        self.jitter, self.planner = jitter, planner

    def __call__(self, image: Image.Image) -> Image.Image:
        """Record the operations and return the image unchanged."""
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
    """Draw plans for images of a given size; draws from the global generators, which the caller seeds."""

    def __init__(self, size: int, augment: Augment) -> None:
        if augment.interpolation not in ("bilinear", "bicubic", "random"):
            raise ValueError(
                "augment.interpolation must be bilinear, bicubic or random for augmentation on the device, "
                f"got {augment.interpolation!r}; change it, or set data.on_device to nothing"
            )
        super().__init__(size, augment)
        self.steps: list[Step] = []
        for i, step in enumerate(self.colour.transforms):
            if isinstance(step, ColorJitter):
                self.colour.transforms[i] = JitterRecorder(step, self)
            elif isinstance(step, auto_augment.RandAugment | auto_augment.AutoAugment):
                for op in self.operations(step):
                    op.aug_fn = OperationRecorder(auto_augment.NAME_TO_OP[op.name], self)
            else:
                raise ValueError(
                    f"augment.auto={augment.auto!r} needs {type(step).__name__}, which runs only on the CPU; set "
                    "data.on_device to nothing"
                )
        # Draws the boxes only: the noise is generated on the device.
        self.boxes = RandomErasing(augment.erase, mode="const", device="cpu")

    def plan(self, sample: int, width: int, height: int, key: int) -> ImagePlan:
        """Draw the plan of image number `sample`; `key` seeds the noise of random erasing."""
        augment = self.augment
        blank = Image.new("L", (width, height))
        y, x, h, w = RandomResizedCropAndInterpolation.get_params(
            blank, augment.scale, augment.ratio
        )
        cubic = augment.interpolation == "bicubic"
        if augment.interpolation == "random":
            cubic = random.choice(("bilinear", "bicubic")) == "bicubic"
        flips = draw_chance(augment.flip), draw_chance(augment.vertical_flip)
        self.matrices.clear()
        self.steps = []
        self.colour(blank)
        boxes = BoxRecorder()
        if augment.erase:
            erase(self.boxes, boxes, 3, self.size, self.size, torch.float32)
        erased = [
            (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)
            for (_, rows, columns), _ in boxes
        ]
        places = self.places((width, height), (y, x, h, w), *flips)
        return ImagePlan(
            sample, (y, x, h, w), flips, cubic, self.steps, erased, key, places, self.size
        )


@dataclass
class BatchPlan:
    """The plans of a batch in two tensors.

    Attributes:
        ints: all integers, concatenated: HEAD per image, BOX per box, the operation of each image in each turn (0 for
            none), and the image indices of each entry in `steps`.
        floats: parameters of the operations, AMOUNTS per image and turn.
        size: number of images.
        window: height and width of the largest crop.
        turns: largest number of operations on one image.
        steps: the operations grouped by turn and name: name, turn, start of the image indices in `ints`, their number.
        erased: number of boxes.
        side: side of the augmented images.
    """

    ints: Tensor
    floats: Tensor
    size: int
    window: tuple[int, int]
    turns: int
    steps: list[tuple[str, int, int, int]]
    erased: int
    side: int

    HEAD = 8  # numbers of an image: sample, crop, flips, cubic
    BOX = 6  # numbers of a box: image, y, x, height, width, key

    def __getstate__(self) -> dict[str, Any]:
        # Sent by value: for the main process this is cheaper than two file descriptors of shared memory.
        return self.__dict__ | {"ints": self.ints.numpy(), "floats": self.floats.numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: torch.from_numpy(state[name]) for name in ("ints", "floats")}
        self.__dict__.update(state | arrays)

    @property
    def boxes(self) -> int:
        """Index of the first box in `ints`."""
        return self.size * self.HEAD

    @property
    def codes(self) -> int:
        """Index of the first operation code in `ints`."""
        return self.boxes + self.erased * self.BOX

    def pin_memory(self) -> BatchPlan:
        """Return the plan in pinned memory."""
        return replace(self, ints=self.ints.pin_memory(), floats=self.floats.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> BatchPlan:
        """Return the plan on a device."""
        ints, floats = (x.to(device, non_blocking=non_blocking) for x in (self.ints, self.floats))
        return replace(self, ints=ints, floats=floats)


def batch_plans(plans: list[ImagePlan]) -> BatchPlan:
    """Combine the plans of a batch."""
    ints: list[int] = []
    for plan in plans:
        ints += [plan.sample, *plan.crop, *plan.flips, plan.cubic]
    boxes = [(i, *box, plan.key) for i, plan in enumerate(plans) for box in plan.boxes]
    for box in boxes:
        ints += box
    turns, size = max(len(plan.steps) for plan in plans), len(plans)
    floats = np.zeros((turns, size, AMOUNTS))
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    codes = np.zeros((turns, size), np.int64)
    for i, plan in enumerate(plans):
        for turn, (name, amounts) in enumerate(plan.steps):
            codes[turn, i] = CODES[name]
            floats[turn, i, : len(amounts)] = amounts
            groups[turn, name].append(i)
    ints += codes.ravel().tolist()
    steps = []
    for (turn, name), members in sorted(groups.items()):
        steps.append((name, turn, len(ints), len(members)))
        ints += members
    window = max(plan.crop[2] for plan in plans), max(plan.crop[3] for plan in plans)
    integers = torch.tensor(ints, dtype=torch.int64)
    parameters = torch.from_numpy(floats.ravel())
    side = plans[0].side
    return BatchPlan(integers, parameters, size, window, turns, steps, len(boxes), side)
