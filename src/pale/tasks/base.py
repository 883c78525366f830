"""The complete task, in three objects; nothing outside this package asks which task it has.

`Task` trains and evaluates. A recipe creates it (`recipe.task()`), and the constructor finds the data. It builds the
model, the datasets, the loss and the metric, and describes evaluation results for `pale eval` and the report. Facts
that need no data, such as the names of its metrics, are class attributes and class methods.

`Pipeline` (pipeline.py) predicts: preprocessing, forward pass and postprocessing of one image or many, the
computation of an exported file, and the memory of all these. It is a frozen dataclass without data and without
the model, which is an argument of its methods. `Task.pipeline` is its class.

`Prediction` (prediction.py) is the result for one image: as numbers, as JSON, as text, and drawn.

`TASKS` (in `tasks/__init__.py`) lists the task classes by kind; `recipe.kind` is the key. A folder of a task holds
task.py (`Task`), data.py and model.py (settings and networks), loss.py, metric.py, inference.py (`Pipeline` and
`Prediction`) and draw.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from ..core.console import Table
from ..core.numbers import format_number
from ..core.settings import Settings
from ..data.loader import Batch as Batch
from ..data.sources.identity import DataIdentity, identify
from ..data.stream import Part
from .pipeline import Pipeline
from .prediction import Json

VAL_SEED = 2**31  # seed of generated validation scenes: larger than every training seed


class Metric(Protocol):
    """Collects results over the validation set on each process; the states of all processes are merged."""

    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add one prepared batch."""

    def state(self) -> Any:
        """Return the state of this process, on the CPU."""

    def merge(self, states: Sequence[Any]) -> dict[str, float]:
        """Return the figures over all processes; percentages are 0 to 100."""

    def details(self) -> Json:
        """Return the data for the report, as JSON values; valid after `merge`."""
        return {}


@dataclass(frozen=True)
class Evaluated:
    """Result of one evaluation protocol.

    Attributes:
        protocol: name of the protocol; "" if the task has only one.
        figures: figures of the metric.
        metric: metric that collected them.
        how: settings of inference, if the task has any.
        task: task that was evaluated.
        paper: the metrics that the paper reports, by name, if the recipe has them.
    """

    protocol: str
    figures: dict[str, float]
    metric: Metric
    how: Settings | None
    task: Task
    paper: Mapping[str, float] = field(default_factory=dict)


class Task(ABC):
    """Interface for the training loop and evaluation; see the module's docstring.

    Attributes:
        kind: the key in `TASKS`, and `kind` of its recipes.
        best: the metric by which the best weights of a run are chosen; greater is better.
        headline: the main metrics, with their names in tables and curves.
        scores: metrics of which the report states the best value.
        titles: titles of metrics and of the columns of "per_class" in the report, with the unit after a comma.
        class_score: the column of "per_class" by which a report compares the classes of several runs.
        confusion_unit: what the confusion matrix counts.
        panel_about: description of the result of `panel`, for the report.
        pipeline: class of its inference.
        classes: names of the classes.
        train_source: training samples as they are stored; None for evaluation only.
        val_source: validation samples as they are stored, if `val_name` is to return their names.
        notes: messages about data and weights that a run logs at its start.
        groups: group number of each training sample, if the samples of a batch must be of one group.
    """

    kind: ClassVar[str]
    best: ClassVar[str]
    headline: ClassVar[Mapping[str, str]]
    scores: ClassVar[tuple[str, ...]] = ()
    titles: ClassVar[Mapping[str, str]] = {}
    class_score: ClassVar[str] = ""
    confusion_unit: ClassVar[str] = "images"
    panel_about: ClassVar[str] = "Image, labels and prediction."
    pipeline: ClassVar[type[Pipeline]]

    classes: Sequence[str]
    train_source: Sized | None
    val_source: Sized | None = None
    notes: Sequence[str] = ()

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """Groups of the training samples; by default there are none."""
        return None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Sources of the training samples, with the number of samples per epoch; by default each sample once."""
        return ()

    def phases(self, steps: int) -> Sequence[int]:
        """Return the steps at which `phase_data` changes, in order, the first of them 0.

        Args:
            steps: length of the run.
        """
        return (0,)

    def phase_data(self, data: Dataset[Any], step: int, steps: int) -> Dataset[Any]:
        """Return the training set for the phase that starts at a step, based on that of `train_data`."""
        return data

    def data_identity(self) -> DataIdentity:
        """Return the identity of the training set, by which a resumed run recognises it."""
        assert self.train_source is not None
        return identify(self.train_source, self.classes)

    @abstractmethod
    def model(self) -> nn.Module:
        """Build a new model, and load the weights that the recipe starts from."""

    @abstractmethod
    def train_data(self, device: torch.device) -> Dataset[Any]:
        """Return the training set: samples under keys (epoch, index), index below its length.

        Args:
            device: device that trains.
        """

    @abstractmethod
    def val_data(self) -> Dataset[Any]:
        """Return the validation set: samples under keys (0, index)."""

    def collate(self, samples: list[Any]) -> Batch:
        """Return a batch on the CPU: a dict with tensors, among them "keys" (b, 2); by default samples are stacked."""
        return default_collate(samples)

    def fetched(self, batch: Batch, device: torch.device) -> Batch:
        """Do the part of preparing a training batch that can fail, before a step starts."""
        return batch

    @abstractmethod
    def prepare(self, batch: Batch, step: int | None) -> Batch:
        """Normalise a batch on the device, and mix it if `step` is given; draws depend on (seed, step) only."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over a prepared batch."""

    @abstractmethod
    def metric(self, protocol: str = "") -> Metric:
        """Return a new, empty metric.

        Args:
            protocol: one of `protocols`; "" is the protocol of validation during training.
        """

    def val_image(self, index: int) -> Image.Image:
        """Return an image of the validation set, for a report with the metric's "confident_mistakes" or "gallery"."""
        raise NotImplementedError(f"{type(self).__name__} has no images for a report")

    def val_name(self, index: int) -> str:
        """Return the name of a validation sample, for the report."""
        return _source_name(self.val_source, index)

    def panel(self, entry: Json) -> Image.Image:
        """Draw an entry of the metric's "gallery", for the report."""
        return self.val_image(entry["index"])

    @classmethod
    def figure_title(cls, name: str) -> str:
        """Return the title of a metric; with the group for "pets.top1", and the name itself if it is unknown."""
        group, dot, last = name.rpartition(".")
        title = cls.titles.get(last) or (
            f"{cls.headline[last]}, %" if last in cls.headline else last
        )
        return f"{group}{': ' if title != last else dot}{title}" if group else title

    @classmethod
    def readable_names(cls, recipe: Any, classes: Sequence[str]) -> Sequence[str]:
        """Return the names of classes as the report shows them; by default as they are."""
        return classes

    def described(self) -> Json:
        """Return further facts about the data for the header of weights, as JSON values."""
        return {}

    def sample_name(self, index: int) -> str:
        """Return the name of a training sample, for messages."""
        return _source_name(self.train_source, index)

    def class_counts(self) -> Mapping[str, int]:
        """Return the number of training images of each class, or nothing if images do not have one class each."""
        return {}

    def protocols(self) -> Mapping[str, Settings | None]:
        """Return the evaluation protocols by name, with their settings."""
        return {"": None}

    @classmethod
    def evaluation_batch(cls, asked: int) -> int:
        """Return the batch size of `pale eval` if the user requests `asked`."""
        return asked

    @classmethod
    def listed_classes(cls, recipe: Any) -> Sequence[str] | None:
        """Return the class names of a recipe's data for weights without class names; None: read the training set."""
        return None

    def summary(self, found: Evaluated) -> str:
        """Return one line with the metrics, for `pale eval`."""
        figures = [f"{name} {format_number(value)}" for name, value in found.figures.items()]
        return ", ".join(figures) + paper_note(found, self.best)

    def as_json(self, found: Sequence[Evaluated]) -> Json:
        """Return the output of `pale eval --json`."""
        return dict(found[0].figures)

    def tables(self, found: Sequence[Evaluated]) -> list[Table]:
        """Return the tables that `pale eval` prints after the summaries."""
        return []

    def write_evaluation(self, found: Sequence[Evaluated], folder: Path) -> str:
        """Write the files of `pale eval --output`; return their names, "" if there are none."""
        return ""


def _source_name(source: object, index: int) -> str:
    """Return the name that a source has for a sample, or the index if it has no names."""
    name = getattr(source, "name", None)
    return str(name(index)) if callable(name) else str(index)


def paper_note(found: Evaluated, figure: str) -> str:
    """Return " (the paper: 83.4)" if the paper reports this metric, else ""."""
    value = found.paper.get(figure)
    return "" if value is None else f" (the paper: {value:g})"
