"""What is learned: a task builds its model, data, loss and metric. The loop knows this protocol and no task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset


class Metric(Protocol):
    """Collects over the validation set on each process; what they collected is merged."""

    def update(self, model: nn.Module, batch: Any) -> None:
        """Take in one prepared batch."""

    def state(self) -> Any:
        """What this process collected, on the CPU."""

    def merge(self, states: Sequence[Any]) -> dict[str, float]:
        """The figures over all processes; percentages are 0 to 100."""

    def details(self) -> dict[str, Any]:
        """After `merge`: what the report shows, as JSON holds it."""


class Task(Protocol):
    """All that the loop needs."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def best(self) -> str:
        """Which figure of the metric tells whether weights are better; greater is better."""

    def model(self) -> nn.Module:
        """A new model, with its first weights loaded where the recipe names some."""

    def train_data(self, device: torch.device) -> Dataset[Any]:
        """Samples under keys (epoch, index), for index below its length, to be trained with on this device."""

    def val_data(self) -> Dataset[Any]:
        """Samples under keys (0, index)."""

    def collate(self, samples: list[Any]) -> Any:
        """A batch on the CPU: a dict of tensors and whatever else, with "keys" (b, 2) among them."""

    def fetched(self, batch: Any, device: torch.device) -> Any:
        """What can be made of a training batch, and can fail, before a step begins."""

    def prepare(self, batch: Any, step: int | None) -> Any:
        """On the device: normalise, and mix when `step` is given; draws depend on (seed, step) alone."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a prepared batch."""

    def metric(self) -> Metric:
        """A new, empty metric."""

    def val_picture(self, index: int) -> Image.Image:
        """A picture of the validation set, for the report."""

    def sample_name(self, index: int) -> str:
        """Where a training sample comes from, for messages."""
