"""Inference with a model of any task, on images of any type and size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from ..core.memory import exhausted_memory
from ..data.reading import read_bytes
from ..errors import SettingsError, WeightsError
from ..tasks import DEFAULT_TASK, TASKS
from ..tasks.inference_settings import InferenceSettings
from ..tasks.pipeline import Options
from ..tasks.prediction import Prediction
from ..weights import zoo
from .bundle import ModelBundle, load
from .images import ImageLike, LazyImage, as_image, is_lazy, name_of, pixel_count
from .memory import prediction_shortage

READERS = 2  # threads that decode images in advance
SMALL_FILE = 2**22  # files up to this size are read in one piece
# An image below this part of MAX_HELD, for a batch, is decoded as soon as it is opened.
SMALL_SHARE = 8
MAX_HELD = 2**27  # maximum pixels of images read in advance; a larger image is read alone


@dataclass(frozen=True)
class Failed:
    """An image that could not be read or predicted, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Read:
    """A decoded image and the model input; the latter is None if it could not be prepared."""

    name: str
    image: Image.Image
    tensor: Tensor | None


@dataclass(frozen=True)
class Waiting:
    """An image that is being read in advance."""

    name: str
    pixels: int
    future: Future[Any]


class Predictor:
    """A trained model for images: paths, bytes, images of Pillow, arrays, tensors.

    Args:
        source: a run's folder, a .safetensors file, a name listed by `pale weights`, a model's name, or a module; by
            default the included weights for the task.
        task: "classification", "segmentation" or "detection"; by default the task of the model.
        recipe: name of the recipe of the model, for weights of another project.
        device: by default the GPU if there is one.
        top: classification: number of classes in a result.
        score: detection: score threshold; multi-label classification: probability threshold of a tag.
        most: detection: maximum number of objects in an image; by default as in evaluation.
        own_size: segmentation, detection: do not resize images.
        slide: segmentation: use sliding windows.
        multi: segmentation: use several scales, with flipped images.
        batch: maximum batch size, of images of one size; by default 16 (fewer above 384 pixels), or 4 if results are as
            large as images.

    Attributes:
        loaded: the model and its inference pipeline.
        task: its kind.
        classes: names.
        options: options that change predictions.
        batch_size: maximum batch size.
    """

    def __init__(
        self,
        source: str | Path | nn.Module | ModelBundle | None = None,
        task: str | None = None,
        *,
        recipe: str | None = None,
        device: str | torch.device | None = None,
        top: int = 5,
        score: float = 0.5,
        most: int | None = None,
        own_size: bool = False,
        slide: bool = False,
        multi: bool = False,
        batch: int | None = None,
    ) -> None:
        if task is not None and task not in TASKS:
            raise SettingsError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
        for name, value in (("top", top), ("batch", batch)):
            if value is not None and value < 1:
                raise SettingsError(f"{name} must be at least 1, got {value}")
        loaded = load(_packaged_weights(task or DEFAULT_TASK) if source is None else source, recipe)
        if task is not None and loaded.kind != task:
            raise SettingsError(
                f"{loaded.source} is for {loaded.kind}, not {task}; leave out the task, or give other weights"
            )
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.options = options = Options(top, score, most, own_size, slide, multi)
        pipeline = loaded.pipeline.with_options(options, loaded.source).completed(loaded.model)
        model = loaded.model.to(self.device).eval()
        pipeline.configure(model)
        self.loaded = replace(loaded, model=model, pipeline=pipeline)
        self.task, self.top = loaded.kind, top
        self.classes = list(pipeline.classes)
        self.batch_size = batch or pipeline.batch_size

    def __call__(self, image: ImageLike, name: str | None = None) -> Prediction:
        """Predict one image."""
        read = as_image(image, name or "image")
        return self._predict([read], [name or name_of(image)])[0]

    def batch(self, images: Sequence[ImageLike]) -> list[Prediction]:
        """Predict several images, in their order; images of one size form batches."""
        names = [name_of(image, number) for number, image in enumerate(images)]
        return self._predict([as_image(x, n) for x, n in zip(images, names, strict=True)], names)

    def prepare(self, image: Image.Image) -> Tensor:
        """Return an RGB image preprocessed for `predict`, (3, h, w), uint8; thread-safe."""
        self.loaded.pipeline.require_size(image)
        return self.loaded.pipeline.prepare(image)

    def predict(
        self, images: Sequence[Image.Image], names: Sequence[str], prepared: Sequence[Tensor]
    ) -> list[Prediction]:
        """Predict RGB images that `prepare` has prepared, in their order."""
        return self._predict(images, names, prepared)

    def stream(self, images: Iterable[ImageLike | LazyImage]) -> Iterator[Prediction | Failed]:
        """Predict any number of images, in their order, while the next batch is read and prepared.

        An image that cannot be read or predicted yields `Failed`; the others are still predicted.
        """
        readers = ThreadPoolExecutor(READERS)
        try:
            yield from self._stream(images, readers)
        finally:
            readers.shutdown(cancel_futures=True)

    def _stream(
        self, images: Iterable[ImageLike | LazyImage], readers: ThreadPoolExecutor
    ) -> Iterator[Prediction | Failed]:
        opening: deque[tuple[str, Future[Read | tuple[ImageLike, int]]]] = deque()
        waiting: deque[Waiting] = deque()

        def decode_next() -> Iterator[Prediction | Failed]:
            name, opened = opening.popleft()
            try:
                found = opened.result()
            except (ValueError, OSError):
                waiting.append(Waiting(name, 0, opened))
            else:
                later: ImageLike | None = None
                if isinstance(found, Read):
                    pixels = found.image.width * found.image.height
                else:
                    later, pixels = found
                while waiting and pixels + sum(each.pixels for each in waiting) > MAX_HELD:
                    yield from self._next(waiting)
                future = opened if later is None else readers.submit(self._read, later, name)
                waiting.append(Waiting(name, pixels, future))
            if len(waiting) >= 2 * self.batch_size:
                yield from self._next(waiting)

        for number, image in enumerate(images):
            name = name_of(image, number)
            opening.append((name, readers.submit(self._open, image, name)))
            # Readers work in the order of submission: with fewer, this thread would wait for images being decoded.
            if len(opening) > self.batch_size:
                yield from decode_next()
        while opening:
            yield from decode_next()
        while waiting:
            yield from self._next(waiting)

    def _open(self, image: ImageLike | LazyImage, name: str) -> Read | tuple[ImageLike, int]:
        """Read a small image; return a larger one, which must wait for memory, with its number of pixels."""
        loaded = image.load() if is_lazy(image) else cast(ImageLike, image)
        if isinstance(loaded, str | os.PathLike):
            with suppress(OSError):  # if a file cannot be read, `_read` returns the reason
                loaded = read_bytes(loaded, SMALL_FILE)
        pixels = pixel_count(loaded)
        if 0 < pixels <= MAX_HELD // (SMALL_SHARE * self.batch_size):
            return self._read(loaded, name)
        return loaded, pixels

    def _read(self, image: ImageLike, name: str) -> Read:
        """Decode an image and prepare it; if preparing fails, `_safely` repeats it and returns the reason."""
        read = as_image(image, name)
        try:
            return Read(name, read, self.prepare(read))
        except (ValueError, RuntimeError, MemoryError, ArithmeticError):
            return Read(name, read, None)

    def _next(self, waiting: deque[Waiting]) -> Iterator[Prediction | Failed]:
        found: list[Prediction | Failed | None] = []
        read: list[Read] = []
        places: list[int] = []
        for place in range(min(self.batch_size, len(waiting))):
            each = waiting.popleft()
            try:
                read.append(each.future.result())
                places.append(place)
                found.append(None)
            except (ValueError, OSError) as error:
                found.append(_failed(each.name, error))
        for place, result in zip(places, self._safely(read), strict=True):
            found[place] = result
        yield from (each for each in found if each is not None)

    def _safely(self, read: Sequence[Read]) -> list[Prediction | Failed]:
        """Predict all together; if that fails, one by one."""
        images, names, tensors = (
            [getattr(r, n) for r in read] for n in ("image", "name", "tensor")
        )
        try:
            return list(self._predict(images, names, tensors))
        except (ValueError, RuntimeError, MemoryError, ArithmeticError) as error:
            if len(read) == 1:
                return [_failed(read[0].name, error)]
            return [result for each in read for result in self._safely([each])]

    def _predict(
        self,
        images: Sequence[Image.Image],
        names: Sequence[str],
        prepared: Sequence[Tensor | None] | None = None,
    ) -> list[Prediction]:
        try:
            return self._results(images, names, prepared)
        except (RuntimeError, MemoryError) as error:
            if (memory := exhausted_memory(error)) is None:
                raise
            sizes = [image.size for image in images]
            raise prediction_shortage(memory, error, sizes, self.batch_size) from error

    @torch.no_grad()
    def _results(
        self,
        images: Sequence[Image.Image],
        names: Sequence[str],
        prepared: Sequence[Tensor | None] | None = None,
    ) -> list[Prediction]:
        given = prepared or [None] * len(images)
        pairs = zip(images, given, strict=True)
        tensors = [self.prepare(x) if tensor is None else tensor for x, tensor in pairs]
        loaded = self.loaded
        return loaded.pipeline.predict(loaded.model, tensors, images, names, self.batch_size)


def _failed(name: str, error: BaseException) -> Failed:
    reason = (str(error) or "there is not enough memory").splitlines()[0]
    return Failed(name, reason if reason.startswith(name) else f"{name}: {reason}")


def _packaged_weights(task: str) -> str:
    """Return the name of the included weights of a task."""
    found = zoo.default_name(task)
    if found is None:
        raise WeightsError(
            f"this installation includes no weights for {task}; give a run's folder or a .safetensors file (--weights)"
        )
    return found


def load_predictor(
    settings: InferenceSettings, recipe: str | None, warn: Callable[[str], None]
) -> Predictor:
    """Return the predictor for settings of the command line.

    Args:
        settings: model and options.
        recipe: name of the recipe of the model, for weights of another project.
        warn: called with the warning about the weights, if there is one.
    """
    names = ("device", "top", "score", "own_size", "slide", "multi", "batch")
    given: dict[str, Any] = {name: getattr(settings, name) for name in names}
    predictor = Predictor(settings.weights, settings.task, recipe=recipe, **given)
    if predictor.loaded.warning:
        warn(predictor.loaded.warning)
    return predictor
