"""The tasks, by kind: `TASKS["detection"]` is the class that knows all about detection (see `base`).

`recipes.register_task` adds a task of another package, with its recipes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Task

__all__ = ["DEFAULT_TASK", "TASKS", "Registry"]

DEFAULT_TASK = "classification"  # task of weights and modules that do not name one


class Registry(MutableMapping[str, "type[Task]"]):
    """Task classes by kind. A class is imported when it is first used, so that listing the kinds imports nothing.

    Args:
        places: module and class of each kind, "module:Class", relative to this package.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._tasks: dict[str, str | type[Task]] = dict(places)

    def __getitem__(self, kind: str) -> type[Task]:
        found = self._tasks[kind]
        if isinstance(found, str):
            module, _, name = found.partition(":")
            found = self._tasks[kind] = getattr(import_module(f".{module}", __name__), name)
        return found

    def __setitem__(self, kind: str, task: type[Task]) -> None:
        self._tasks[kind] = task

    def __delitem__(self, kind: str) -> None:
        del self._tasks[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


TASKS = Registry(
    {
        "classification": "classification.task:ClassificationTask",
        "segmentation": "segmentation.task:SegmentationTask",
        "detection": "detection.task:DetectionTask",
    }
)
