"""Scenes: textured shapes on textured backgrounds, generated from (seed, index) without a download.

The class is the shape of the largest visible object. Its colour, texture, position, size and rotation
are drawn independently, so that none of them reveals the class. Every scene has a semantic mask and
instances, so classification, segmentation and detection all run on this data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

Plane = NDArray[np.float32]
MIN_SIZE = 16
# Range of the radius of an object, relative to half the image.
RADIUS = (0.6, 0.95)
MIN_VISIBLE = 12  # minimum number of visible pixels of an instance


def _polar(u: Plane, v: Plane, corners: int) -> tuple[Plane, Plane]:
    """Return the radius, and the angle to the nearest of `corners` equally spaced directions."""
    step = 2 * np.pi / corners
    angle = np.mod(np.arctan2(v, u) + step / 2, step) - step / 2
    return np.hypot(u, v), angle.astype(np.float32)


def _triangle(u: Plane, v: Plane) -> NDArray[np.bool_]:
    radius, angle = _polar(u, v, 3)
    return radius * np.cos(angle) <= 0.58


def _star(u: Plane, v: Plane) -> NDArray[np.bool_]:
    radius, angle = _polar(u, v, 5)
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
    """One image with all its labels.

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


def draw_scene(
    seed: int,
    index: int,
    size: int = 64,
    objects: tuple[int, int] = (1, 1),
    shapes: Sequence[str] = CLASSES,
) -> Scene:
    """Draw scene number `index` of a seed.

    Args:
        seed: seed of the whole set.
        index: number of the scene, 0 or more.
        size: height and width.
        objects: minimum and maximum number of objects; hidden ones may reduce the number of visible ones.
        shapes: shapes that may occur; labels are indices into `CLASSES` nevertheless.
    """
    check_scene(size, objects)
    rng = np.random.default_rng((seed, index))
    axis = np.linspace(-1, 1, size, dtype=np.float32)
    x, y = np.meshgrid(axis, axis)
    image = _background(rng, x, y)
    ground = image.mean((0, 1))
    drawn = np.zeros((size, size), np.int64)
    found: list[int] = []
    for _ in range(int(rng.integers(objects[0], objects[1], endpoint=True))):
        shape = CLASSES.index(shapes[int(rng.integers(len(shapes)))])
        inside = _draw_shape(rng, x, y, shape, crowded=objects[1] > 1)
        image[inside] = _texture(rng, x, y, ground, 0.3)[inside]
        found.append(shape)
        drawn[inside] = len(found)
    image += 6 * rng.standard_normal(image.shape, np.float32)
    return _label_scene(np.clip(image, 0, 255).astype(np.uint8), drawn, found)


def check_scene(size: int, objects: tuple[int, int]) -> None:
    """Raise if size or number of objects are out of range."""
    if size < MIN_SIZE:
        raise ValueError(f"scenes need a size of at least {MIN_SIZE} pixels, got {size}")
    if not 1 <= objects[0] <= objects[1] <= 32:
        raise ValueError(f"scenes have 1 to 32 objects, minimum first, got {objects}")


def _texture(
    rng: np.random.Generator, x: Plane, y: Plane, unlike: Plane | None, contrast: float
) -> Plane:
    """Draw a flat, striped, checked or dotted texture (h, w, 3) whose mean colour differs clearly from `unlike`."""
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
    """Draw a texture of low contrast with a brightness gradient, (h, w, 3)."""
    tilt = rng.uniform(-20, 20, 2)
    light = (tilt[0] * x + tilt[1] * y)[..., None]
    return (_texture(rng, x, y, None, 0.12) + light).astype(np.float32)


def _draw_shape(
    rng: np.random.Generator, x: Plane, y: Plane, shape: int, crowded: bool
) -> NDArray[np.bool_]:
    """Draw the mask (h, w) of a shape with random size, position and rotation."""
    low, high = RADIUS if not crowded else (RADIUS[0] / 2, RADIUS[1] / 1.5)
    radius, angle = rng.uniform((low, 0), (high, 2 * np.pi))
    cx, cy = rng.uniform(-(1 - radius), 1 - radius, 2)
    c, s = np.float32(np.cos(angle) / radius), np.float32(np.sin(angle) / radius)
    dx, dy = x - np.float32(cx), y - np.float32(cy)
    return SHAPES[CLASSES[shape]](c * dx + s * dy, c * dy - s * dx)


def _label_scene(image: NDArray[np.uint8], drawn: NDArray[np.int64], shapes: list[int]) -> Scene:
    """Build the scene from its image, the object at each pixel (0 for none) and the shape of each object."""
    area = np.bincount(drawn.ravel(), minlength=len(shapes) + 1)[1:]
    visible = [k for k, pixels in enumerate(area) if pixels >= MIN_VISIBLE]
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
    """Dataset of `length` scenes of a seed."""

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
        check_scene(size, objects)
        if not shapes or set(shapes) - set(CLASSES):
            raise ValueError(f"shapes must be some of {', '.join(CLASSES)}, got {tuple(shapes)}")
        self.length, self.size, self.seed, self.objects = length, size, seed, objects
        self.shapes = tuple(shapes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Scene:
        if not 0 <= index < self.length:
            raise IndexError(f"scene {index} of {self.length}")
        return draw_scene(self.seed, index, self.size, self.objects, self.shapes)


class SceneSource:
    """Base of the sources of scenes, one for each task."""

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def image(self, index: int) -> Image.Image:
        """Draw a scene and return its image."""
        return Image.fromarray(self.scenes[index].image)

    def name(self, index: int) -> str:
        """Return number and seed of a scene."""
        return f"scene {index} of seed {self.scenes.seed}"


class SceneImages(SceneSource):
    """Scenes as a source of images with a class each."""

    classes = CLASSES

    @property
    def labels(self) -> Sequence[int]:
        """The class of every scene; draws all scenes."""
        return [self.scenes[i].label for i in range(len(self.scenes))]

    def image_and_label(self, index: int) -> tuple[Image.Image, int]:
        """Draw a scene once and return image and class."""
        scene = self.scenes[index]
        return Image.fromarray(scene.image), scene.label

    def content(self, index: int) -> bytes:
        """Return no bytes: a scene has no file."""
        return b""
