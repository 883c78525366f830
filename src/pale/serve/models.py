"""The models of a server: one for each task, and what each makes of a picture."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .. import zoo
from ..data.mask_transforms import fit
from ..loading import KINDS, Kind, Loaded
from ..predict import Prediction, Predictor
from ..view_attention import Glance, backbone_of, usual_size
from ..warm_up import warm_up
from .limits import MOST_SEEN, Limits, RefusedError

Source = str | Path | nn.Module | Loaded


def default_weights() -> dict[Kind, Source]:
    """What is served where no weights are given, by task: those that come with the package."""
    names = {kind: zoo.default(kind) for kind in KINDS}
    return {kind: name for kind, name in names.items() if name is not None}


@dataclass(frozen=True)
class Prepared:
    """A picture on its way to a model.

    Attributes:
        name: as the answer tells it.
        picture: RGB.
        seen: as the predictor prepared it.
    """

    name: str
    picture: Image.Image
    seen: Tensor


class Models:
    """One predictor for each task.

    Args:
        sources: runs, files of weights, names of models, modules; no two of one task.
        device: by default the GPU where there is one.
        batch: pictures that go through a model together, at most.
        top: classifier: how many classes are told.
        score: detector: least score of an object.
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
            raise ValueError("there is nothing to serve; give a run or its weights: --weights RUN")
        found: dict[Kind, Predictor] = {}
        for source in sources:
            made = Predictor(source, device=device, batch=batch, top=top, score=score)
            if made.task in found:
                raise ValueError(
                    f"one model a task can be served, but {found[made.task].loaded.source} and "
                    f"{made.loaded.source} are both for {made.task}; serve one of them at another --port"
                )
            with torch.no_grad():
                warm_up(made.loaded.model)  # or a request of another size would wait for a compiler
            found[made.task] = made
        self.predictors: Mapping[Kind, Predictor] = {k: found[k] for k in KINDS if k in found}
        self.score = score
        self._looked: dict[Kind, Loaded] = {}
        for task, predictor in self.predictors.items():
            if (apart := _apart(predictor.loaded)) is not None:
                self._looked[task] = apart

    @property
    def tasks(self) -> list[Kind]:
        """What can be asked for."""
        return list(self.predictors)

    @property
    def device(self) -> str:
        """Where the models are."""
        return str(next(iter(self.predictors.values())).device)

    def can_look(self, task: Kind) -> bool:
        """Whether a task's model has pale attention to look into."""
        return task in self._looked

    def warm_up(self) -> None:
        """Use every model once: what is slow the first time, or fails, does so before the first request."""
        picture = Image.new("RGB", (96, 80), (120, 130, 140))
        for task, predictor in self.predictors.items():
            self.predict(task, [Prepared("warm-up", picture, predictor.prepare(picture))])

    def predict(self, task: Kind, items: Sequence[Prepared]) -> list[Prediction]:
        """What a task's model says."""
        predictor = self.predictors[task]
        columns = [i.picture for i in items], [i.name for i in items], [i.seen for i in items]
        return predictor.predict(*columns)

    def look(self, task: Kind, picture: Image.Image) -> Glance:
        """What a task's model attends to, on the CPU."""
        loaded = self._looked[task]
        return Glance(loaded, picture, usual_size(loaded))

    def sizes(self, task: Kind, width: int, height: int, most: int) -> tuple[int, int]:
        """Pixels of such a picture: that a model sees at once, and of the whole scaled for it; refuses too many.

        Args:
            task: which model.
            width: of the picture.
            height: of the picture.
            most: pixels that a scaled picture may have.
        """
        loaded = self.predictors[task].loaded
        if loaded.kind == "classification":
            side = loaded.size / loaded.crop  # the short one, before the centre is cut out
            scaled, seen = round(width * height * (side / min(width, height)) ** 2), loaded.size**2
        else:
            h, w = fit(height, width, loaded.short, loaded.long)
            test: Any = loaded.test
            scaled = seen = h * w
            if getattr(test, "mode", "whole") == "slide":
                seen = min(h, test.window) * min(w, test.window) * test.windows
        if seen > MOST_SEEN:
            raise RefusedError(
                413,
                f"the model would see this picture of {width}x{height} at {scaled:,} pixels, and at most "
                f"{MOST_SEEN:,} go through it at once; shrink the picture",
            )
        if scaled > most:
            raise RefusedError(
                413,
                f"a picture of {width}x{height} is too narrow: scaled for the model it would have {scaled:,} "
                f"pixels, and {most:,} are the most; cut it",
            )
        return seen, scaled

    def about(self) -> dict[str, dict[str, Any]]:
        """Each task's model, as JSON holds it; no place on this machine is told."""
        return {
            task: {
                "model": predictor.loaded.name,
                "trained": predictor.loaded.trained,
                "classes": len(predictor.classes),
                "look": self.can_look(task),
            }
            for task, predictor in self.predictors.items()
        }


def _apart(loaded: Loaded) -> Loaded | None:
    """The backbone on the CPU with hooks of its own, so that looking and predicting do not meet; None without pales.

    On the CPU it shares its weights with the model; kernels of a GPU keep no queries and keys to look at.
    """
    try:
        backbone = backbone_of(loaded)
    except ValueError:
        return None
    held = [*backbone.parameters(), *backbone.buffers()]
    shared = {id(t): t for t in held if t.device.type == "cpu"}
    return replace(loaded, model=copy.deepcopy(backbone, shared).cpu().eval())
