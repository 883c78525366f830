"""The models of a server, by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..errors import SettingsError, WeightsError
from ..model.warm_up import warm_up
from ..predict import Prediction, Predictor
from ..predict.bundle import ModelBundle, load
from ..tasks import TASKS
from ..view.attention import MAX_ASPECT, BackboneTrace, default_size, find_backbone
from ..weights import zoo
from . import workspace
from .graphs import tensor_graph
from .limits import MAX_MODEL_PIXELS, Limits, RefusedError
from .names import Source, name_models

JSON_BYTES = 4  # of JSON and its source, per byte of queries and keys in 32 bits
POINT_BYTES = 128  # per token in the lists about one point, and as text
PHOTO_BYTES = 16_000_000  # of the reduced photo for a page


def default_weights() -> dict[str, Source]:
    """Return the included weights, by task; they are served if no weights are given."""
    names = {kind: zoo.default_name(kind) for kind in TASKS}
    return {kind: name for kind, name in names.items() if name is not None}


@dataclass(frozen=True)
class Prepared:
    """An image that waits for a model.

    Attributes:
        name: name of the file, repeated in the response.
        image: RGB.
        tensor: the image as `Predictor.prepare` returns it.
        score: detection: score threshold; None: that of the server.
    """

    name: str
    image: Image.Image
    tensor: Tensor
    score: float | None = None


class Models:
    """Predictors by name. Several may be of one task; the first of a task is its default.

    Args:
        sources: run folders, weights files, model names or modules; text may be NAME=SOURCE (`names.name_models`).
        device: default: the GPU if there is one.
        batch: maximum batch size.
        top: classification: number of classes in a result.
        score: detection: score threshold.

    Attributes:
        predictors: predictors by name, in the order of the tasks.
        defaults: name of the default model of each task.
        graphs: the models as functions of preprocessed tensors, by name.
        score: detection: score threshold.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        device: str | None = None,
        batch: int = Limits.batch,
        top: int = 5,
        score: float = 0.5,
    ) -> None:
        sources = list(sources) or list(default_weights().values())
        if not sources:
            raise SettingsError(
                "there is no model to serve; give a run or its weights: --weights RUN"
            )
        found: dict[str, Predictor] = {}
        for name, source in name_models(sources).items():
            made = Predictor(
                _limit_logits(source), device=device, batch=batch, top=top, score=score
            )
            with torch.no_grad():
                # Compile kernels now; otherwise a request of another size would wait for the compiler.
                warm_up(made.loaded.model)
            found[name] = made
        self.predictors: Mapping[str, Predictor] = {
            name: made for task in TASKS for name, made in found.items() if made.task == task
        }
        self.defaults: dict[str, str] = {}
        for name, predictor in self.predictors.items():
            self.defaults.setdefault(predictor.task, name)
        self.score = score
        self.graphs = {name: tensor_graph(made) for name, made in self.predictors.items()}
        self._traced: dict[str, ModelBundle] = {}
        self._trace_bytes: dict[str, int] = {}
        for name, predictor in self.predictors.items():
            if (separate := _separate_backbone(predictor.loaded)) is not None:
                self._traced[name] = separate
                self._trace_bytes[name] = self._measure_trace(name)
        self._workspace: int | None = None

    def find(self, task: str | None, name: str | None) -> str | None:
        """Return the name of the model of a request; None if there is no such model.

        Args:
            task: its task; None: any.
            name: its name; None: the default of the task, or of the first task.
        """
        if name is None:
            return self.defaults.get(self.tasks[0] if task is None else task)
        if name not in self.predictors or task not in (None, self.predictors[name].task):
            return None
        return name

    @property
    def tasks(self) -> list[str]:
        """The tasks that have a model."""
        return list(self.defaults)

    @property
    def device(self) -> str:
        """The device of the models."""
        return str(next(iter(self.predictors.values())).device)

    def can_trace(self, name: str) -> bool:
        """Return whether a model has pale attention."""
        return name in self._traced

    def has_mask(self, name: str) -> bool:
        """Return whether the predictions of a model have a mask."""
        return self.predictors[name].loaded.pipeline.has_mask

    def warm_up(self) -> None:
        """Run every model once, so that slow first calls and failures happen before the first request."""
        image = Image.new("RGB", (96, 80), (120, 130, 140))
        for name, predictor in self.predictors.items():
            self.predict(name, [Prepared("warm-up", image, predictor.prepare(image))])

    def trace_bytes(self, name: str) -> int:
        """Return the maximum memory of the trace of one image, with its JSON."""
        return self._trace_bytes[name]

    def _measure_trace(self, name: str) -> int:
        trace = self.trace(name, self._largest_traced(name))
        blocks = [block for stage in trace.stages for block in stage]
        held = sum(block.q.nbytes + block.k.nbytes for block in blocks) + trace.pixels.nbytes
        last = [stage[-1] for stage in trace.stages]
        page = JSON_BYTES * sum(block.q.nbytes + block.k.nbytes for block in last)
        point = POINT_BYTES * sum(block.q.shape[0] * block.q.shape[1] for block in last)
        return held + max(page, point) + PHOTO_BYTES

    def _largest_traced(self, name: str) -> Image.Image:
        size = default_size(self._traced[name])
        return Image.new("RGB", (int(MAX_ASPECT * size), size))

    def workspace(self) -> int:
        """Return the maximum memory in bytes while all models work; it is measured once."""
        if self._workspace is None:
            total = 0
            for name, predictor in self.predictors.items():
                batch = predictor.batch_size
                needed = workspace.measure(predictor.loaded, predictor.device, batch)
                total += max(needed, workspace.measure_graph(self.graphs[name]))
                if name in self._traced:
                    total += self._trace_workspace(name)
            self._workspace = total
        return self._workspace

    def _trace_workspace(self, name: str) -> int:
        image = self._largest_traced(name)
        peak = workspace.peak_memory(lambda: self.trace(name, image))
        if peak is None:
            return workspace.DEFAULT_BYTES * image.width * image.height
        return int(workspace.MARGIN * peak)

    def run(self, name: str, items: Sequence[Prepared | Tensor]) -> list[Any]:
        """Return the predictions of images, and the outputs of preprocessed tensors, in the order of the items."""
        images = [item for item in items if isinstance(item, Prepared)]
        tensors = [item for item in items if isinstance(item, Tensor)]
        predictions = iter(self.predict(name, images) if images else ())
        outputs = iter(self.graphs[name](tensors) if tensors else ())
        return [next(predictions if isinstance(i, Prepared) else outputs) for i in items]

    def predict(self, name: str, items: Sequence[Prepared]) -> list[Prediction]:
        """Return the predictions of a model; images with one score threshold go through it together."""
        predictor, found = self.predictors[name], dict[int, Prediction]()
        for score in dict.fromkeys(item.score for item in items):
            numbers = [n for n, item in enumerate(items) if item.score == score]
            given = [items[n] for n in numbers]
            columns = [i.image for i in given], [i.name for i in given], [i.tensor for i in given]
            with predictor.loaded.pipeline.at_score(predictor.loaded.model, score):
                found.update(zip(numbers, predictor.predict(*columns), strict=True))
        return [found[n] for n in range(len(items))]

    def trace(self, name: str, image: Image.Image) -> BackboneTrace:
        """Return the attention of a model on an image, computed on the CPU."""
        bundle = self._traced[name]
        return BackboneTrace(bundle, image, default_size(bundle))

    def model_pixels(self, name: str, width: int, height: int, max_pixels: int) -> tuple[int, int]:
        """Return the number of pixels that the model processes at once, and that of the whole resized image.

        Raises RefusedError if one of them is too large.

        Args:
            name: name of the model.
            width: width of the image.
            height: height of the image.
            max_pixels: maximum number of pixels of the resized image.
        """
        pipeline = self.predictors[name].loaded.pipeline
        seen, resized = pipeline.seen_pixels(width, height)
        if seen > MAX_MODEL_PIXELS:
            raise RefusedError(
                413,
                f"the image of {width}x{height} would have {resized:,} pixels when resized for the model, and at most "
                f"{MAX_MODEL_PIXELS:,} go through it at once; make the image smaller",
            )
        if resized > max_pixels:
            raise RefusedError(
                413,
                f"the image of {width}x{height} is too narrow: resized for the model it would have {resized:,} "
                f"pixels, and at most {max_pixels:,} are allowed; crop it",
            )
        return seen, resized

    def about(self) -> dict[str, dict[str, Any]]:
        """Return a description of the default model of each task for JSON, without paths of this machine."""
        return {task: self._describe(name) for task, name in self.defaults.items()}

    def about_all(self) -> list[dict[str, Any]]:
        """Return a description of every model for JSON, with its name and task."""
        return [
            {"name": name, "task": predictor.task} | self._describe(name)
            for name, predictor in self.predictors.items()
        ]

    def _describe(self, name: str) -> dict[str, Any]:
        predictor = self.predictors[name]
        return {
            "model": predictor.loaded.name,
            "trained": predictor.loaded.trained,
            "classes": len(predictor.classes),
            "look": self.can_trace(name),
        }


def _limit_logits(source: Source) -> ModelBundle:
    """Load the model; a segmenter computes logits at the size of an image in small blocks."""
    bundle = load(source)
    return replace(bundle, pipeline=bundle.pipeline.limited(workspace.LOGITS_MB))


def _separate_backbone(bundle: ModelBundle) -> ModelBundle | None:
    """Return a copy of the backbone on the CPU with hooks of its own, so that tracing does not disturb predictions.

    A model on the CPU shares its weights with the copy. GPU kernels keep no queries and keys, hence the CPU. Returns
    None for a model without pale attention.
    """
    try:
        backbone = find_backbone(bundle)
    except WeightsError:
        return None
    held = [*backbone.parameters(), *backbone.buffers()]
    shared = {id(t): t for t in held if t.device.type == "cpu"}
    return replace(bundle, model=copy.deepcopy(backbone, shared).cpu().eval())
