"""A fourth task as another package would write it: regression of the angle of generated images, by cosine and sine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from PIL import Image
from support.recipes import SMALL
from torch import Tensor, nn

from pale.core.settings import Settings, vary
from pale.data.sources.identity import DataIdentity
from pale.data.transforms.images import normalise
from pale.recipes.schema import Optim, Recipe
from pale.tasks.base import Metric, Task
from pale.tasks.classification.model import Model
from pale.tasks.prediction import Prediction
from pale.tasks.square_pipeline import SquarePipeline

OUTPUTS = ("cosine", "sine")  # in the place of class names


def draw_ramp(angle: Tensor) -> Tensor:
    """Return an image (3, 32, 32), uint8, whose brightness grows in one direction."""
    x = torch.linspace(-1, 1, 32)
    return (127 + 85 * (angle.cos() * x + angle.sin() * x[:, None])).byte().expand(3, -1, -1)


def angles(outputs: Tensor) -> Tensor:
    """(b, 2) -> (b,), radians."""
    return torch.atan2(outputs[:, 1], outputs[:, 0])


@dataclass(frozen=True)
class Ramps:
    """Generated samples under keys (epoch, index)."""

    count: int
    offset: float = 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Tensor]:
        angle = torch.tensor(2 * torch.pi * (key[1] + self.offset) / self.count)
        return {"images": draw_ramp(angle), "angles": angle, "keys": torch.tensor(key)}


@dataclass
class AngleError(Metric):
    errors: list[float] = field(default_factory=list)

    def update(self, model: nn.Module, batch: dict[str, Any]) -> None:
        difference = angles(model(batch["images"])) - batch["angles"]
        self.errors += torch.atan2(difference.sin(), difference.cos()).abs().rad2deg().tolist()

    def state(self) -> list[float]:
        return self.errors

    def merge(self, states: Sequence[list[float]]) -> dict[str, float]:
        errors = torch.tensor([error for state in states for error in state])
        return {"within_30": 100 * (errors < 30).float().mean().item()}


@dataclass(frozen=True)
class Rotated(Prediction):
    degrees: float

    def plain(self) -> dict[str, Any]:
        return self.header() | {"degrees": self.degrees}

    def words(self) -> str:
        return f"{self.degrees:.0f} degrees"

    def draw(self) -> Image.Image:
        return self.image.rotate(self.degrees)


@dataclass(frozen=True, kw_only=True)
class RotationPipeline(SquarePipeline):
    kind = "rotation"
    size: int = 32
    crop: float = 1.0

    @classmethod
    def from_recipe(cls, recipe, about, source, *, trusted) -> Self:
        return cls(classes=OUTPUTS)

    def build(self, recipe: RotationRecipe) -> nn.Module:
        return vary(recipe.model, weights=None).build(len(OUTPUTS), self.size)

    def postprocess(self, outputs, tensors, images, names) -> list[Rotated]:
        return list(map(Rotated, names, images, angles(outputs).rad2deg().tolist()))


class RotationTask(Task):
    kind = "rotation"
    best = "within_30"
    headline: ClassVar = {"within_30": "within 30 degrees"}
    pipeline = RotationPipeline
    classes = OUTPUTS

    def __init__(self, recipe: RotationRecipe) -> None:
        self.recipe = recipe

    def data_identity(self) -> DataIdentity:
        return DataIdentity(OUTPUTS, self.recipe.data.samples, "ramps")

    def model(self) -> nn.Module:
        return self.recipe.model.build(len(OUTPUTS), 32)

    def train_data(self, device: torch.device) -> Ramps:
        return Ramps(self.recipe.data.samples)

    def val_data(self) -> Ramps:
        return Ramps(self.recipe.data.samples // 2, offset=0.5)

    def prepare(self, batch: dict[str, Tensor], step: int | None) -> dict[str, Tensor]:
        return batch | {"images": normalise(batch["images"])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        a = batch["angles"]
        return F.mse_loss(model(batch["images"]), torch.stack([a.cos(), a.sin()], 1))

    def metric(self, protocol: str = "") -> Metric:
        return AngleError()


class RotationData(Settings):
    samples: int = 64
    workers: int = 0


class RotationRecipe(Recipe):
    kind: Literal["rotation"] = "rotation"
    model: Model = Model(name="pale_tiny", options=SMALL["model.options"])
    data: RotationData = RotationData()

    def task(self, classes: Sequence[str] | None = None) -> RotationTask:
        return RotationTask(self)


def small() -> RotationRecipe:
    """Angle of a brightness ramp."""
    return RotationRecipe(batch=16, epochs=15, warmup_epochs=1, optim=Optim(lr=0.01, lr_batch=16))
