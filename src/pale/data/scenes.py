"""Scenes: textured shapes on textured backgrounds, made on the fly from (seed, index); nothing to download.

The class is the shape of the largest visible object. Its colour, texture, place, size and rotation
are drawn apart from it, so none of them gives the class away. A semantic mask and instances come
with every scene, so classification, segmentation and detection all run on this data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

Plane = NDArray[np.float32]
SMALLEST_SIZE = 16
# Drawing by halves of the image: an object spans between these shares of half the image.
RADIUS = (0.6, 0.95)
LEAST_VISIBLE = 12  # pixels; an object that shows fewer is no instance


def _regular(u: Plane, v: Plane, corners: int) -> tuple[Plane, Plane]:
    # Radius, and the angle to the nearest of `corners` equally spaced directions.
    step = 2 * np.pi / corners
    angle = np.mod(np.arctan2(v, u) + step / 2, step) - step / 2
    return np.hypot(u, v), angle.astype(np.float32)


def _triangle(u: Plane, v: Plane) -> NDArray[np.bool_]:
    radius, angle = _regular(u, v, 3)
    return radius * np.cos(angle) <= 0.58


def _star(u: Plane, v: Plane) -> NDArray[np.bool_]:
    radius, angle = _regular(u, v, 5)
    return radius <= 0.36 + 0.74 * (1 - np.abs(angle) * 5 / np.pi) ** 2


def _cross(u: Plane, v: Plane) -> NDArray[np.bool_]:
    u, v = np.abs(u), np.abs(v)
    return (np.minimum(u, v) <= 0.3) & (np.maximum(u, v) <= 0.95)


SHAPES: dict[str, Callable[[Plane, Plane], NDArray[np.bool_]]] = {
    "disc": lambda u, v: u * u + v * v <= 0.85,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.72) <= 0.26,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.78,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
    "crescent": lambda u, v: (u * u + v * v <= 1) & ((u - 0.5) ** 2 + v * v >= 0.64),
    "bar": lambda u, v: (np.abs(u) <= 1) & (np.abs(v) <= 0.3),
}
CLASSES = tuple(SHAPES)


@dataclass(frozen=True)
class Scene:
    """One picture with all its labels.

    Attributes:
        image: (h, w, 3), uint8.
        label: class of the largest visible object, an index into `CLASSES`.
        mask: (h, w), uint8: 0 background, class + 1 elsewhere.
        instances: (h, w), uint8: 0 background, k the k-th object.
        labels: class of each object.
        boxes: (n, 4), int64: left, top, right, bottom of each object's visible pixels, right and bottom exclusive.
    """

    image: NDArray[np.uint8]
    label: int
    mask: NDArray[np.uint8]
    instances: NDArray[np.uint8]
    labels: tuple[int, ...]
    boxes: NDArray[np.int64]


def draw(
    seed: int,
    index: int,
    size: int = 64,
    objects: tuple[int, int] = (1, 1),
    shapes: Sequence[str] = CLASSES,
) -> Scene:
    """The scene number `index` of a seed.

    Args:
        seed: of the whole set.
        index: which scene, 0 or more.
        size: height and width.
        objects: fewest and most objects; where one hides another, fewer may remain visible.
        shapes: which may occur; labels are numbers of `CLASSES` still.
    """
    check(size, objects)
    rng = np.random.default_rng((seed, index))
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = np.meshgrid(axis, axis)
    image = _background(rng, x, y)
    ground = image.mean((0, 1))
    drawn = np.zeros((size, size), np.int64)
    found: list[int] = []
    for _ in range(int(rng.integers(objects[0], objects[1], endpoint=True))):
        shape = CLASSES.index(shapes[int(rng.integers(len(shapes)))])
        inside = _place(rng, x, y, shape, crowded=objects[1] > 1)
        image[inside] = _texture(rng, x, y, ground, 0.3)[inside]
        found.append(shape)
        drawn[inside] = len(found)
    image += 6 * rng.standard_normal(image.shape, np.float32)
    return _labelled(np.clip(image, 0, 255).astype(np.uint8), drawn, found)


def check(size: int, objects: tuple[int, int]) -> None:
    """Reject sizes and object counts that make no scene."""
    if size < SMALLEST_SIZE:
        raise ValueError(f"scenes need a size of at least {SMALLEST_SIZE} pixels, got {size}")
    if not 1 <= objects[0] <= objects[1] <= 32:
        raise ValueError(f"scenes hold 1 to 32 objects, fewest first, got {objects}")


def _texture(
    rng: np.random.Generator, x: Plane, y: Plane, unlike: Plane | None, contrast: float
) -> Plane:
    """Flat, stripes, checks or dots in two shades, (h, w, 3); the mean colour is far from `unlike`."""
    colour = rng.uniform(30, 225, 3)
    while unlike is not None and np.abs(colour - unlike).sum() < 180:
        colour = rng.uniform(30, 225, 3)
    shade = contrast * rng.uniform(-255, 255, 3)
    angle, pitch, phase = rng.uniform((0, 9, 0), (np.pi, 20, 2 * np.pi))
    c, s = np.float32(pitch * np.cos(angle)), np.float32(pitch * np.sin(angle))
    a = np.sin(c * x + s * y + np.float32(phase))
    b = np.sin(c * y - s * x + np.float32(phase))
    wave = (np.ones_like(a), a, a * b, a + b - 1)[rng.integers(4)]
    return (colour + shade * np.where(wave > 0, 0.5, -0.5)[..., None]).astype(np.float32)


def _background(rng: np.random.Generator, x: Plane, y: Plane) -> Plane:
    """A texture of little contrast under a slow change of light, (h, w, 3)."""
    tilt = rng.uniform(-20, 20, 2)
    light = (tilt[0] * x + tilt[1] * y)[..., None]
    return (_texture(rng, x, y, None, 0.12) + light).astype(np.float32)


def _place(
    rng: np.random.Generator, x: Plane, y: Plane, shape: int, crowded: bool
) -> NDArray[np.bool_]:
    """Where a shape of random size, place and rotation lies, (h, w)."""
    low, high = RADIUS if not crowded else (RADIUS[0] / 2, RADIUS[1] / 1.5)
    radius, angle = rng.uniform((low, 0), (high, 2 * np.pi))
    cx, cy = rng.uniform(-(1 - radius), 1 - radius, 2)
    c, s = np.float32(np.cos(angle) / radius), np.float32(np.sin(angle) / radius)
    dx, dy = x - np.float32(cx), y - np.float32(cy)
    return SHAPES[CLASSES[shape]](c * dx + s * dy, c * dy - s * dx)


def _labelled(image: NDArray[np.uint8], drawn: NDArray[np.int64], shapes: list[int]) -> Scene:
    area = np.bincount(drawn.ravel(), minlength=len(shapes) + 1)[1:]
    visible = [k for k, pixels in enumerate(area) if pixels >= LEAST_VISIBLE]
    number = np.zeros(len(shapes) + 1, np.uint8)  # old instance number -> new one
    kind = np.zeros(len(shapes) + 1, np.uint8)
    for new, k in enumerate(visible):
        number[k + 1], kind[k + 1] = new + 1, shapes[k] + 1
    boxes = np.zeros((len(visible), 4), np.int64)
    for new, k in enumerate(visible):
        rows, columns = np.nonzero(drawn == k + 1)
        boxes[new] = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    largest = max(visible, key=lambda k: (area[k], -k))
    return Scene(
        image=image,
        label=shapes[largest],
        mask=kind[drawn],
        instances=number[drawn],
        labels=tuple(shapes[k] for k in visible),
        boxes=boxes,
    )


class Scenes(Dataset[Scene]):
    """`length` scenes of a seed."""

    def __init__(
        self,
        length: int,
        size: int = 64,
        seed: int = 0,
        objects: tuple[int, int] = (1, 1),
        shapes: Sequence[str] = CLASSES,
    ) -> None:
        if length < 1:
            raise ValueError(f"a set of scenes needs a length of at least 1, got {length}")
        check(size, objects)
        if not shapes or set(shapes) - set(CLASSES):
            raise ValueError(f"shapes must be some of {', '.join(CLASSES)}, got {tuple(shapes)}")
        self.length, self.size, self.seed, self.objects = length, size, seed, objects
        self.classes, self.shapes = CLASSES, tuple(shapes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return draw(self.seed, index, self.size, self.objects, self.shapes)
