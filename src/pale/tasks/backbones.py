"""Backbones of dense tasks: feature maps of any hierarchical timm model, which may start from a classifier."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

from pydantic import model_validator
from torch import Tensor, nn

from ..core.lists import list_first
from ..errors import SettingsError, WeightsError
from ..model.pale_transformer import VARIANTS
from ..weights.compare import can_resize, load_into, require_finite
from ..weights.read import Weights, load_weights
from .building import create
from .classification.model import Model

STRIDES = (4, 8, 16, 32)


def build_backbone(
    model: Model, size: int | tuple[int, int], user: str
) -> tuple[nn.Module, list[int]]:
    """Build a backbone that returns maps at strides 4, 8, 16 and 32, and return it with their channels.

    Args:
        model: settings of the network.
        size: size of training images, for models that need it.
        user: name of the consumer of the maps, for messages.
    """
    arguments = {"features_only": True} | model.architecture(size)
    sized: dict[str, Any] = {}
    if model.name not in VARIANTS:  # Pale models have their own class for feature maps
        arguments["feature_cls"] = "getter"
        # Models with a fixed size, such as Swin, get the size of training images and accept others.
        sized = {"img_size": size, "strict_img_size": False}
    backbone = create(model.name, arguments, model.options, sized)
    info = backbone.feature_info
    if not hasattr(backbone, "model") or tuple(info.reduction()[-4:]) != STRIDES:
        raise SettingsError(
            f"{user} needs maps at strides 4, 8, 16 and 32, {model.name} gives "
            f"{', '.join(map(str, info.reduction()))}; take a hierarchical backbone with stem stride 4"
        )
    if len(info.reduction()) > len(STRIDES):
        backbone.out_indices = backbone.out_indices[-4:]
    return backbone, list(info.channels()[-4:])


class DenseModel(Model):
    """Settings of heads on a backbone, and of the weights that both start from.

    Attributes:
        init: a classifier (a run, a .safetensors file, or a .pth file of another project) that the backbone starts
            from.
    """

    init: Path | None = None

    @model_validator(mode="after")
    def _one_start(self) -> DenseModel:
        if self.init is not None and self.weights is not None:
            raise ValueError(
                "model.init (a classifier, for the backbone) and model.weights (the whole model) "
                "exclude each other; give one"
            )
        return self

    @abstractmethod
    def network(self, classes: int, size: int | tuple[int, int]) -> nn.Module:
        """Build the model with random weights."""

    def build(self, classes: int, size: int | tuple[int, int]) -> Any:
        """Build the model, and load the weights that the settings name."""
        return self.assemble(classes, size)[0]

    def assemble(self, classes: int, size: int | tuple[int, int]) -> tuple[Any, list[str]]:
        """Build the model, and return it with notes about the weights that it starts from."""
        model = self.network(classes, size)
        if self.checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        notes = []
        if self.weights is not None:
            load_into(model, load_weights(self.weights), self.weights, self.new_head)
            notes.append(f"weights of {self.weights}" + (" except the classifiers" * self.new_head))
        if self.init is not None:
            notes.append(init_backbone(model, self.init))
        return model, notes


def init_backbone(model: nn.Module, path: Path) -> str:
    """Load the weights of a classifier into the backbone; return notes about loaded, new and unfitting tensors."""
    inner = inner_model(model)
    own = inner.state_dict()
    weights = load_weights(path)
    tensors = _adapt(inner, dict(weights.tensors), path)
    fitting = {n: t for n, t in tensors.items() if n in own and _fits(n, t, own[n])}
    if len(fitting) < len(own) / 2:
        raise WeightsError(
            f"{path} does not fit this backbone: {len(fitting)} of its {len(own)} tensors could be loaded; "
            f"{_other_model(weights)}"
        )
    require_finite({name for name, _ in inner.named_parameters()}, fitting, path)
    inner.load_state_dict(fitting, strict=False)
    missing = sorted(own.keys() - fitting.keys())
    unfit = sorted((own.keys() & tensors.keys()) - fitting.keys())
    unused = sorted(tensors.keys() - own.keys())
    heads = f"the heads ({len(model.state_dict()) - len(own)} tensors)"
    parts = [f"{path}: {len(fitting)} of {len(own)} tensors of the backbone loaded"]
    parts.append(f"new: {heads}" + (f", {list_first(missing, 3)}" if missing else ""))
    parts += [f"did not fit: {list_first(unfit, 3)}"] if unfit else []
    parts += [f"not used: {list_first(unused, 3)}"] if unused else []
    return "; ".join(parts)


def named_model(weights: Weights) -> str | None:
    """Return the model that the recipe of weights names; None if it names none."""
    recipe = weights.about.get("recipe")
    model = recipe.get("model") if isinstance(recipe, dict) else None
    name = model.get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def _other_model(weights: Weights) -> str:
    """Return a hint about weights that do not fit: their own model, if they name it."""
    name = named_model(weights)
    if any(tensor.startswith("backbone.") for tensor in weights.tensors):
        return "it is not a classifier: continue it with --model.weights FILE, or give a classifier"
    if name is not None:
        return f"it holds weights of {name[:80]}: set --model.name {name[:80]}, or give others (pale weights)"
    return "was it trained with another model?"


def _adapt(inner: nn.Module, tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the tensors adapted by timm, for models whose tables depend on the image size, such as Swin."""
    adapter = getattr(sys.modules[type(inner).__module__], "checkpoint_filter_fn", None)
    own = inner.state_dict()
    resized = any(n in own and t.shape != own[n].shape for n, t in tensors.items())
    if adapter is None or not resized:
        return tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # warning about the speed of its interpolation
        try:
            adapted: dict[str, Tensor] = adapter(tensors, inner)
        except Exception as error:  # timm does not check the shapes of tensors
            raise WeightsError(
                f"{path} does not fit this backbone ({type(error).__name__} in timm's adapter); "
                "was it trained with another model?"
            ) from error
    return adapted


def _fits(name: str, tensor: Tensor, own: Tensor) -> bool:
    return tensor.shape == own.shape or can_resize(name, tensor, own)


def inner_model(model: nn.Module) -> nn.Module:
    """Return the timm model inside a detector or segmenter."""
    found = next(m for m in model.modules() if hasattr(m, "feature_info") and hasattr(m, "model"))
    inner = found.model
    assert isinstance(inner, nn.Module)
    return inner


def parameters_without_decay(backbone: nn.Module, prefix: str) -> set[str]:
    """Return the parameters that the backbone exempts from weight decay, by their names under `prefix`."""
    inner = getattr(backbone, "model", backbone)
    named = getattr(inner, "no_weight_decay", None)
    return {f"{prefix}{name}" for name in named()} if callable(named) else set()


def layer_groups(backbone: Any, coarse: bool, prefix: str) -> dict[str, Any]:
    """Return timm's patterns for layer-wise learning rates, for a backbone under `prefix`."""
    groups = backbone.model.group_matcher(coarse)
    return {name: _with_prefix(pattern, prefix) for name, pattern in groups.items()}


def _with_prefix(pattern: object, prefix: str) -> Any:
    # timm's patterns are a string, or a list of (string, number); each begins with ^.
    if isinstance(pattern, str):
        return pattern.replace("^", f"^{prefix}")
    if isinstance(pattern, list | tuple):
        return [(_with_prefix(p, prefix), n) for p, n in pattern]
    return pattern
