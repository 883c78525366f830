"""Content of a run folder for the report: recipe, log and last evaluation."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from ... import recipes
from ...core.numbers import finite_number
from ...core.plain_json import Json
from ...errors import RunError
from ...recipes.files import read_recipe
from ...recipes.schema import Recipe
from .. import log
from .details import Details, read_details

# Raised if the dataset has been moved or changed, or is not on this machine.
MISSING_DATA = (ValueError, OSError, LookupError, TypeError)

Event = Json
Point = tuple[float, float]

MAX_LOG_BYTES = 2**28  # a long run that logs every step has 100 MB
MAX_VALUE = 1e100  # of what is drawn, so that no sum or difference overflows
MAX_METRICS = 200  # of each kind of event
MAX_DEPTH = 3  # of metrics in groups, such as {"sources": {"pets": {"top1": 90.0}}}
CLOCK = ("event", "step", "epoch")  # when an event happened; the other values are metrics
# Metrics of the training loop: title and unit.
STEP_TITLES = {
    "loss": ("training loss", "loss"),
    "lr": ("learning rate", "learning rate"),
    "grad_norm": ("gradient norm", "norm before clipping"),
    "images_per_s": ("throughput", "images/s"),
    "data_wait": ("waiting for data", "fraction of the time"),
    "memory_mb": ("peak memory", "MB"),
}


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder.

    Attributes:
        folder: folder of the run.
        recipe: its settings.
        events: events of the log.
        details: content of the last evaluation.json.
    """

    folder: Path
    recipe: Recipe
    events: Sequence[Event]
    details: Details

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def metrics(self, kind: str) -> list[str]:
        """Return the names of all metrics in events of a kind, in the order of their first appearance."""
        names: dict[str, None] = {}
        for event in self.of(kind):
            for name, value in flat(event):
                if len(names) < MAX_METRICS and finite_number(value) is not None:
                    names.setdefault(name)
        return list(names)

    def points(self, kind: str, name: str, over: str = "step") -> list[Point]:
        """Return the steps (or epochs) at which events of a kind have a number under a name, with the number."""
        return points(self.events, kind, name, over)

    @cached_property
    def last_evaluation(self) -> dict[str, object]:
        """Metrics of the last evaluation; empty if there was none."""
        found = self.of("eval")
        return dict(flat(found[-1])) if found else {}

    @property
    def steps_done(self) -> float:
        """Steps of the newest log entry."""
        steps = [finite_number(event.get("step")) for event in self.events]
        return max((step for step in steps if step is not None), default=0.0)

    @property
    def steps_planned(self) -> float | None:
        """Length of the run, as of its last start."""
        found = self.of("start")
        return finite_number(found[-1].get("steps")) if found else None

    @property
    def state(self) -> str:
        """Whether the run has ended, was stopped, or neither."""
        last = next(
            (e for e in reversed(self.events) if e["event"] in ("start", "stop", "end")), {}
        )
        if last.get("event") == "end":
            return "finished"
        if last.get("event") == "stop":
            number = finite_number(last.get("signal"))
            known = {int(each): each.name for each in signal.Signals}
            return f"stopped by {known.get(int(number or 0), 'a signal')}"
        return "running or interrupted" if last else "not started"

    @property
    def throughput(self) -> float | None:
        """Median of the images per second, without the first entry, which includes the start of the workers."""
        found = [value for _, value in self.points("step", "images_per_s")]
        return median(found[1:] or found) if found else None

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of an epoch, from the newest entry that has both."""
        for event in reversed(self.of("step")):
            step, epoch = finite_number(event.get("step")), finite_number(event.get("epoch"))
            if step is not None and epoch is not None and epoch > 0:
                return step / epoch
        return None

    @cached_property
    def reported(self) -> Mapping[str, float]:
        """Reported metrics in the recipe, of the paper or of a peer."""
        found = self.recipe.reported.plain() if self.recipe.reported else {}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def base(self) -> Recipe | None:
        """The recipe of the package that has the name of this one."""
        name = self.recipe.name
        return recipes.get(name) if name in recipes.RECIPES else None

    def readable_names(self, classes: Sequence[str]) -> Sequence[str]:
        """Return the displayed names of classes; unchanged if the data with these names is missing."""
        try:
            return self.recipe.task_class.readable_names(self.recipe, classes)
        except MISSING_DATA:
            return classes

    def title(self, name: str) -> tuple[str, str]:
        """Return the title of an evaluation metric, and its unit, "" if it has none."""
        title = self.recipe.task_class.figure_title(name)
        head, comma, unit = title.rpartition(", ")
        return (head, unit) if comma else (title, "")


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a finished or unfinished run."""
    if not (folder / "recipe.yaml").is_file():
        raise RunError(f"{folder} is not a run: it has no recipe.yaml")
    path = folder / "log.jsonl"
    if path.is_file() and (size := path.stat().st_size) > MAX_LOG_BYTES:
        raise RunError(
            f"{path} has {size} bytes, a report reads at most {MAX_LOG_BYTES}; log less often (log_every), or keep "
            "only its newest lines"
        )
    recipe = read_recipe(folder / "recipe.yaml")
    return RunRecord(folder, recipe, log.read(path), read_details(folder / "evaluation.json"))


def flat(
    event: Mapping[str, object], prefix: str = "", depth: int = 1
) -> Iterator[tuple[str, object]]:
    """Yield the metrics of an event; those in groups have dotted names."""
    for name, value in event.items():
        if isinstance(value, dict):
            if depth < MAX_DEPTH:
                yield from flat(value, f"{prefix}{name}.", depth + 1)
        elif prefix or name not in CLOCK:
            yield prefix + name, value


def points(events: Sequence[Event], kind: str, name: str, over: str = "step") -> list[Point]:
    """Return the steps (or epochs) at which events of a kind have a number under a name, with the number."""
    found = []
    for event in events:
        if event["event"] == kind:
            value = event.get(name) if name in event else dict(flat(event)).get(name)
            pair = finite_number(event.get(over), MAX_VALUE), finite_number(value, MAX_VALUE)
            if pair[0] is not None and pair[1] is not None:
                found.append((pair[0], pair[1]))
    return found
