"""A model of any of the three tasks, for pictures of any kind and size."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor, nn

from .. import zoo
from ..data import rle
from ..data.masks import palette
from ..data.transforms import to_tensor
from ..loading import KINDS, Kind, Loaded, load
from ..settings import vary
from ..tasks.detection.metric import as_results
from ..tasks.segmentation.inference import MULTI_SCALES, Segmenter
from .picture import Picture, as_picture
from .results import Classified, Detected, Prediction, Segmented

T = TypeVar("T")
BATCH: dict[Kind, int] = {"classification": 16, "segmentation": 4, "detection": 4}
READERS = 2  # threads that decode pictures ahead
LEAST_SCORE = 0.5


@dataclass(frozen=True)
class Failed:
    """A picture that could not be read or predicted, and why."""

    name: str
    reason: str


class Predictor:
    """A trained model for pictures: paths, bytes, images of Pillow, arrays, tensors.

    Args:
        source: a run's folder, a .safetensors file, a name of `pale weights`, a model's name, or a module; by default
            the weights that come with the package for the task.
        task: "classification", "segmentation" or "detection"; by default what the model does.
        recipe: for foreign weights: the name of the recipe that says the model.
        device: by default the GPU where there is one.
        top: classifier: how many classes are told.
        score: detector: least score of an object.
        most: detector: objects of a picture, at most; by default as it was evaluated.
        own_size: segmenter, detector: do not resize pictures before.
        slide: segmenter: look through windows.
        multi: segmenter: look at several scales, and flipped.
        batch: pictures of one size that go through the model together, at most; by default 16, or 4 where results
            are as large as pictures.

    Attributes:
        loaded: the model, and how it sees pictures.
        task: what it does.
        classes: names.
    """

    def __init__(
        self,
        source: str | Path | nn.Module | Loaded | None = None,
        task: Kind | None = None,
        *,
        recipe: str | None = None,
        device: str | torch.device | None = None,
        top: int = 5,
        score: float = LEAST_SCORE,
        most: int | None = None,
        own_size: bool = False,
        slide: bool = False,
        multi: bool = False,
        batch: int | None = None,
    ) -> None:
        if task is not None and task not in KINDS:
            raise ValueError(f"task must be one of {', '.join(KINDS)}, got {task!r}")
        for name, value in (("top", top), ("batch", batch)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        loaded = load(_in_the_box(task) if source is None else source, recipe)
        if task is not None and loaded.kind != task:
            raise ValueError(
                f"{loaded.source} is for {loaded.kind}, not {task}; leave out the task, or give other weights"
            )
        self.task, self.top, self.batch_size = loaded.kind, top, batch or BATCH[loaded.kind]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.loaded = replace(
            loaded,
            model=loaded.model.to(self.device).eval(),
            test=_looked(loaded, score, most, own_size, slide, multi),
        )
        count = len(loaded.classes) or _outputs(self.loaded)
        self.classes = list(loaded.classes) or [f"class {i}" for i in range(count)]
        self.colours = list(loaded.colours) or palette(count)
        self.categories = list(loaded.categories) or list(range(1, count + 1))
        if self.task == "segmentation":
            self._segmenter = Segmenter(self.loaded.model, self.loaded.test, count)  # type: ignore[arg-type]
        elif self.task == "detection":
            rle.codec()  # says at once what is not installed
            test: Any = self.loaded.test
            self.loaded.model.limits(test.score, test.nms, test.most)  # type: ignore[operator]

    def __call__(self, picture: Picture, name: str | None = None) -> Prediction:
        """What the model says about one picture."""
        return self._predict([as_picture(picture, name or "picture")], [name or _named(picture)])[0]

    def batch(self, pictures: Sequence[Picture]) -> list[Prediction]:
        """What it says about several, in their order; those that it sees at one size go through it together."""
        names = [_named(picture, number) for number, picture in enumerate(pictures)]
        return self._predict(
            [as_picture(p, n) for p, n in zip(pictures, names, strict=True)], names
        )

    def prepare(self, picture: Image.Image) -> Tensor:
        """An RGB picture as `predict` takes it, (3, h, w), uint8; any thread may do this."""
        return to_tensor(picture) if self.task == "segmentation" else self.loaded.pixels(picture)

    def predict(
        self, pictures: Sequence[Image.Image], names: Sequence[str], seen: Sequence[Tensor]
    ) -> list[Prediction]:
        """What it says about RGB pictures that `prepare` has prepared, in their order."""
        return self._predict(pictures, names, seen)

    def stream(self, pictures: Iterable[Picture]) -> Iterator[Prediction | Failed]:
        """What it says about any number of pictures, in their order; they are read ahead, a few.

        One that cannot be read or predicted is told as `Failed`, and does not stop the rest.
        """
        with ThreadPoolExecutor(READERS) as readers:
            waiting: deque[tuple[str, Future[Image.Image]]] = deque()
            for number, picture in enumerate(pictures):
                name = _named(picture, number)
                waiting.append((name, readers.submit(as_picture, picture, name)))
                if len(waiting) >= self.batch_size + READERS:
                    yield from self._next(waiting)
            while waiting:
                yield from self._next(waiting)

    def _next(
        self, waiting: deque[tuple[str, Future[Image.Image]]]
    ) -> Iterator[Prediction | Failed]:
        found: list[Prediction | Failed | None] = []
        read: list[tuple[int, str, Image.Image]] = []
        for place in range(min(self.batch_size, len(waiting))):
            name, future = waiting.popleft()
            try:
                read.append((place, name, future.result()))
                found.append(None)
            except (ValueError, OSError) as error:
                found.append(Failed(name, str(error)))
        for place, said in zip((r[0] for r in read), self._safely(read), strict=True):
            found[place] = said
        yield from (each for each in found if each is not None)

    def _safely(self, read: list[tuple[int, str, Image.Image]]) -> list[Prediction | Failed]:
        """All together; where that fails, one by one."""
        try:
            return list(self._predict([p for _, _, p in read], [n for _, n, _ in read]))
        except (ValueError, RuntimeError) as error:
            if len(read) == 1:
                return [Failed(read[0][1], str(error).splitlines()[0])]
            return [said for each in read for said in self._safely([each])]

    @torch.no_grad()
    def _predict(
        self,
        pictures: Sequence[Image.Image],
        names: Sequence[str],
        seen: Sequence[Tensor] | None = None,
    ) -> list[Prediction]:
        seen = [self.prepare(p) for p in pictures] if seen is None else seen
        if self.task == "segmentation":
            labels = [
                x.numpy()
                for part in _parts(seen, self.batch_size)
                for x in self._segmenter.several(part)
            ]
            return [
                Segmented(n, p, x, self.classes, self.colours)
                for n, p, x in zip(names, pictures, labels, strict=True)
            ]
        out: list[Prediction | None] = [None] * len(seen)
        for size in dict.fromkeys(x.shape for x in seen):
            alike = [i for i, x in enumerate(seen) if x.shape == size]
            for part in _parts(alike, self.batch_size):
                run = self._classify if self.task == "classification" else self._detect
                found = run(
                    [seen[i] for i in part], [pictures[i] for i in part], [names[i] for i in part]
                )
                for i, said in zip(part, found, strict=True):
                    out[i] = said
        return [said for said in out if said is not None]

    def _classify(
        self, seen: list[Tensor], pictures: list[Image.Image], names: list[str]
    ) -> list[Classified]:
        images = self.loaded.normalise(torch.stack(seen).to(self.device))
        best = self.loaded.model(images).float().softmax(1).topk(min(self.top, len(self.classes)))
        found = []
        for n, p, values, places in zip(
            names, pictures, best.values.tolist(), best.indices.tolist(), strict=True
        ):
            found.append(
                Classified(n, p, {self.classes[i]: v for i, v in zip(places, values, strict=True)})
            )
        return found

    def _detect(
        self, seen: list[Tensor], pictures: list[Image.Image], names: list[str]
    ) -> list[Detected]:
        found = self.loaded.model([x.to(self.device) for x in seen])
        said = []
        for n, p, x, one in zip(names, pictures, seen, found, strict=True):
            own = (p.height, p.width)
            objects = as_results(one, (x.shape[1], x.shape[2]), own, 0, self.categories)
            for entry in objects:
                del entry["image_id"]
            said.append(Detected(n, p, objects, self.classes, self.categories))
        return said


def _in_the_box(task: Kind | None) -> str:
    """The name of the weights that come with the package."""
    found = zoo.default(task or "classification")
    if found is None:
        raise ValueError(
            f"no weights for {task or 'classification'} come with this installation; give a run's folder or a "
            ".safetensors file (--weights)"
        )
    return found


def _looked(
    loaded: Loaded, score: float, most: int | None, own_size: bool, slide: bool, multi: bool
) -> Any:
    """The way of looking, changed as asked."""
    if loaded.kind != "segmentation" and (slide or multi):
        raise ValueError(
            f"slide and multi belong to segmenters; {loaded.source} is for {loaded.kind}"
        )
    if loaded.kind == "classification":
        if own_size:
            raise ValueError(
                f"own_size belongs to segmenters and detectors; {loaded.source} is for classification"
            )
        return None
    changes: dict[str, Any] = {"short": None, "long": None} if own_size else {}
    if slide:
        changes["mode"] = "slide"
    if multi:
        changes |= {"scales": MULTI_SCALES, "flip": True}
    if loaded.kind == "detection":
        changes |= {"score": score} | ({} if most is None else {"most": most})
    assert loaded.test is not None
    return vary(loaded.test, **changes)


def _outputs(loaded: Loaded) -> int:
    """How many classes a model without names tells apart."""
    model: Any = loaded.model
    if loaded.kind == "segmentation":
        return int(model.decode.classifier.out_channels)
    if loaded.kind == "detection":
        return int(model.roi_heads.box_predictor.cls_score.out_features) - 1
    return int(model.num_classes)


def _named(picture: Picture, number: int = 0) -> str:
    if isinstance(picture, str | os.PathLike):
        return os.fspath(picture)
    return f"picture {number}"


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
