"""Inference with a model of any task, on images of any type and size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from ..core.devices import choose_device
from ..core.memory import exhausted_memory
from ..data.reading import read_bytes
from ..errors import SettingsError, WeightsError
from ..tasks import DEFAULT_TASK, TASKS
from ..tasks.inference_settings import InferenceSettings
from ..tasks.pipeline import Options
from ..tasks.prediction import Prediction
from ..weights import zoo
from .bundle import ModelBundle, load
from .images import ImageLike, LazyImage, Opened, as_image, is_lazy, name_of, open_any
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
class DecodedImage:
    """A decoded image and the model input; the latter is None if it could not be prepared."""

    name: str
    image: Image.Image
    tensor: Tensor | None


@dataclass(frozen=True)
class PendingImage:
    """An image that was opened in advance.

    Attributes:
        name: name of the image.
        pixels: number of pixels; 0 if it cannot be read.
        found: result of reading it, or of opening it if it must wait for memory.
    """

    name: str
    pixels: int
    found: Opened | DecodedImage | Failed | Future[DecodedImage | Failed]


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
        self.device = choose_device(device)
        loaded = load(_packaged_weights(task or DEFAULT_TASK) if source is None else source, recipe)
        if task is not None and loaded.kind != task:
            raise SettingsError(
                f"{loaded.source} is for {loaded.kind}, not {task}; leave out the task, or give other weights"
            )
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
        """Predict any number of images, in their order, while the next batch is read.

        It is also decoded in the meantime, unless the model needs the same cores. An image that cannot be read or
        predicted yields `Failed`; the others are still predicted.
        """
        with ExitStack() as threads:
            loaders, readers = ThreadPoolExecutor(READERS), ThreadPoolExecutor(READERS)
            for pool in (loaders, readers):
                threads.callback(pool.shutdown, cancel_futures=True)
            yield from self._stream(self._load_all(images, loaders), readers)

    def _load_all(
        self, images: Iterable[ImageLike | LazyImage], loaders: ThreadPoolExecutor
    ) -> Iterator[tuple[ImageLike | Failed, str]]:
        """Yield content and name of each image; those of the next batch are loaded in the meantime."""
        loading: deque[Future[list[tuple[ImageLike | Failed, str]]]] = deque()
        named = ((image, name_of(image, number)) for number, image in enumerate(images))
        while part := list(islice(named, self._part)):
            loading.append(loaders.submit(lambda part: [_load(*each) for each in part], part))
            if len(loading) > READERS:
                yield from loading.popleft().result()
        while loading:
            yield from loading.popleft().result()

    def _stream(
        self, images: Iterator[tuple[ImageLike | Failed, str]], readers: ThreadPoolExecutor
    ) -> Iterator[Prediction | Failed]:
        opening: deque[Future[list[PendingImage]]] = deque()
        waiting: deque[PendingImage] = deque()
        batches = 1 + self._decodes_ahead()

        def decode_next() -> Iterator[Prediction | Failed]:
            for each in opening.popleft().result():
                while waiting and each.pixels + sum(x.pixels for x in waiting) > MAX_HELD:
                    yield from self._next(waiting)
                if isinstance(each.found, Opened):
                    each = replace(each, found=readers.submit(self._read, each.found, each.name))
                waiting.append(each)
                if len(waiting) >= batches * self.batch_size:
                    yield from self._next(waiting)

        while part := list(islice(images, self._part)):
            opening.append(readers.submit(lambda part: [self._open(*each) for each in part], part))
            if len(opening) == batches * READERS:
                for _ in range(READERS):
                    yield from decode_next()
        while opening:
            yield from decode_next()
        while waiting:
            yield from self._next(waiting)

    @property
    def _part(self) -> int:
        """Images of a task of a thread: handing over a single one would take as long as reading a small image."""
        return -(-self.batch_size // READERS)

    def _decodes_ahead(self) -> bool:
        """Return whether images are decoded while the model works: not if both would share cores.

        Then the overlap would gain nothing, and waiting for cores and for the interpreter lock would cost time.
        """
        return self.device.type != "cpu" or _cores() >= torch.get_num_threads() + READERS

    def _open(self, loaded: ImageLike | Failed, name: str) -> PendingImage:
        """Read a small image; only open a larger one, which must wait for memory."""
        if isinstance(loaded, Failed):
            return PendingImage(name, 0, loaded)
        try:
            opened = open_any(loaded, name)
        except (ValueError, OSError) as error:
            return PendingImage(name, 0, _failed(name, error))
        small = 0 < opened.pixels <= MAX_HELD // (SMALL_SHARE * self.batch_size)
        return PendingImage(name, opened.pixels, self._read(opened, name) if small else opened)

    def _read(self, opened: Opened, name: str) -> DecodedImage | Failed:
        """Decode an image and prepare it; if preparing fails, `_safely` repeats it and returns the reason."""
        try:
            image = opened.decode()
        except (ValueError, OSError) as error:
            return _failed(name, error)
        try:
            return DecodedImage(name, image, self.prepare(image))
        except (ValueError, RuntimeError, MemoryError, ArithmeticError):
            return DecodedImage(name, image, None)

    def _next(self, waiting: deque[PendingImage]) -> Iterator[Prediction | Failed]:
        """Predict the next batch."""
        part = [waiting.popleft().found for _ in range(min(self.batch_size, len(waiting)))]
        found = [each.result() if isinstance(each, Future) else each for each in part]
        predicted = iter(self._safely([each for each in found if isinstance(each, DecodedImage)]))
        yield from (each if isinstance(each, Failed) else next(predicted) for each in found)

    def _safely(self, read: Sequence[DecodedImage]) -> list[Prediction | Failed]:
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


def _load(image: ImageLike | LazyImage, name: str) -> tuple[ImageLike | Failed, str]:
    """Return the content of a lazy image or of a small file, and the name."""
    try:
        loaded = image.load() if is_lazy(image) else cast(ImageLike, image)
    except (ValueError, OSError) as error:
        return _failed(name, error), name
    if isinstance(loaded, str | os.PathLike):
        with suppress(OSError):  # if a file cannot be read, decoding it raises the reason
            loaded = read_bytes(loaded, SMALL_FILE)
    return loaded, name


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
