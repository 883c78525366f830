"""A model with its inference pipeline: from a run, from weights, by name, or as a module."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from torch import Tensor, nn

from ..data.transforms.images import to_tensor
from ..data.transforms.resizing import fit_size
from ..errors import WeightsError
from ..model.pale_transformer import VARIANTS
from ..recipes.stored import stored_recipe
from ..tasks import DEFAULT_TASK, TASKS
from ..tasks.building import build_for
from ..tasks.pipeline import Pipeline
from ..weights import zoo
from ..weights.compare import load_into
from ..weights.read import load_header, load_rest

UNTRAINED_SEED = 0  # so that two commands with one untrained model have the same weights


@dataclass(frozen=True)
class ModelBundle:
    """A model and its inference pipeline.

    Attributes:
        model: in evaluation mode, in float32 on the CPU.
        pipeline: preprocessing, prediction and postprocessing of the task.
        name: name of the architecture.
        source: where it comes from, as text.
        trained: whether weights were loaded; otherwise they are random.
    """

    model: nn.Module
    pipeline: Pipeline
    name: str
    source: str
    trained: bool

    @property
    def kind(self) -> str:
        """The task."""
        return self.pipeline.kind

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the outputs; empty if not known."""
        return self.pipeline.classes

    @property
    def warning(self) -> str | None:
        """Warning about a model with random weights; None for a trained one."""
        if self.trained:
            return None
        return f"{self.name} is untrained: its results mean nothing; give a run with --weights RUN"

    def preprocess(self, image: Image.Image) -> Tensor:
        """Return an RGB image preprocessed as in evaluation: (3, h, w), uint8."""
        return self.pipeline.preprocess(image)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 (b, 3, h, w) to float32 for the model."""
        return self.pipeline.normalise(images)

    def about(self) -> dict[str, Any]:
        """Return the metadata of an exported file, as JSON values."""
        pipeline = self.pipeline
        return {
            "task": pipeline.kind,
            "model": self.name,
            "trained": self.trained,
            "classes": list(pipeline.classes),
            **pipeline.input_size(),
            "interpolation": pipeline.interpolation,
            "mean": [float(v) for v in pipeline.mean],
            "std": [float(v) for v in pipeline.std],
        }


def load(source: str | Path | nn.Module | ModelBundle, recipe: str | None = None) -> ModelBundle:
    """Load a model.

    Args:
        source: run folder, weights file, name listed by `pale weights`, model name, or module.
        recipe: name of the recipe of the model, for weights of another project.
    """
    if isinstance(source, ModelBundle):
        return source
    if isinstance(source, nn.Module):
        return _from_module(source)
    path = Path(source)
    if not path.exists() and (known := zoo.find_file(str(source))) is not None:
        path = known
    # A word that is neither an existing path nor looks like one is a name.
    if not path.exists() and path.name == str(source) and path.suffix != ".safetensors":
        if recipe is not None:
            raise WeightsError(
                f"there are no weights at {source} for the recipe {recipe}; give a run's folder or a weights file"
            )
        return _from_name(str(source))
    return _from_weights(path, recipe)


def _from_weights(path: Path, name: str | None) -> ModelBundle:
    header = load_header(path)
    chosen = stored_recipe(header.about, path, name)
    made = chosen.task_class.pipeline.from_recipe(
        chosen, header.about, str(path), trusted=name is not None
    )
    model = build_for(header, lambda: made.build(chosen), path).eval()
    load_into(model, load_rest(header, path), path, new_head=False)
    return ModelBundle(model, made, made.model_name(chosen), str(path), True)


def _from_name(name: str) -> ModelBundle:
    base = name.partition(".")[0]
    if base not in timm.list_models():
        near = timm.list_models(f"*{name[:8]}*")[:3]
        raise WeightsError(
            f"there is no run, file or model {name!r}; give a run's folder, a .safetensors file, a name that pale "
            f"weights lists, or one of {', '.join(VARIANTS)}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        model: nn.Module = timm.create_model(name)
    return replace(_from_module(model), name=name, source=f"{name}, untrained", trained=False)


def _from_module(model: nn.Module) -> ModelBundle:
    """Copy a module; timm's `pretrained_cfg` describes its preprocessing."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    pipelines = [task.pipeline for task in TASKS.values()]
    chosen = next((p for p in pipelines if p.accepts(model)), TASKS[DEFAULT_TASK].pipeline)
    return ModelBundle(
        copy.deepcopy(model).cpu().float().eval(),
        chosen.from_module(model, config),
        config.get("architecture") or type(model).__name__,
        type(model).__name__,
        True,
    )


def read_pixels(image: Image.Image, short: int, longest: int) -> Tensor:
    """Resize a whole image: short side `short`, long side at most `longest`; returns (3, h, w), uint8."""
    w, h = image.size
    size = fit_size(h, w, short, longest)
    return to_tensor(image.resize((size[1], size[0]), Image.Resampling.BICUBIC))
