"""Reports of the dataset checks: problems and statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field

from ...core.plain_json import Json

MAX_SHOWN = 20  # items that are printed per problem


@dataclass(frozen=True)
class Problem:
    """One kind of problem and the files or classes that have it.

    Attributes:
        kind: name of the problem.
        serious: whether training would stop or its results would be wrong.
        advice: consequence, or what to do.
        items: files or classes.
    """

    kind: str
    serious: bool
    advice: str
    items: list[str]


@dataclass
class CheckReport(ABC):
    """Result of a check; subclasses add the statistics of a task."""

    problems: list[Problem] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether there are no serious problems."""
        return not any(problem.serious for problem in self.problems)

    def plain(self) -> Json:
        """Return the report in the form of its JSON output."""
        problems = [vars(problem) for problem in self.problems]
        return {"good": self.good, **self.statistics(), "problems": problems}

    @abstractmethod
    def statistics(self) -> Json:
        """Return numbers of images and objects."""


@dataclass
class ImageReport(CheckReport):
    """Result of a check of images with a class each.

    Attributes:
        counts: number of images by split and class.
        sizes: number of images by size.
    """

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)

    def statistics(self) -> Json:
        """Return the number of images of each class, and the most frequent sizes."""
        sizes = self.sizes.most_common(MAX_SHOWN)  # kept name: method of Counter
        return {"counts": self.counts, "sizes": dict(sizes)}


@dataclass
class SplitReport(CheckReport):
    """Result of a check of masks or objects.

    Attributes:
        classes: names of the classes of the training set.
        splits: statistics of each split, and under "classes" those of each class.
    """

    classes: list[str] = field(default_factory=list)
    splits: dict[str, Json] = field(default_factory=dict)

    def statistics(self) -> Json:
        """Return the statistics of each split."""
        return {"classes": self.classes, "splits": self.splits}
