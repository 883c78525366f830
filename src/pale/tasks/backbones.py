"""Backbones of dense tasks: four maps of any hierarchical model of timm's, and a classifier's weights inside."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from pydantic import model_validator
from torch import nn

from .. import weights as weight_files
from ..pale_transformer import VARIANTS
from .classification import Model

STRIDES = (4, 8, 16, 32)


def maps_of(model: Model, size: int | tuple[int, int], what: str) -> tuple[nn.Module, list[int]]:
    """The backbone that the settings name, which gives maps at strides 4, 8, 16 and 32, and their channels.

    Args:
        model: the settings.
        size: of images in training, for models that ask.
        what: needs them, for messages.
    """
    if model.name not in timm.list_models():
        near = timm.list_models(f"*{model.name[:8]}*")[:3]
        raise ValueError(
            f"model.name must be one of {', '.join(VARIANTS)} or a model of timm's, got {model.name!r}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    arguments: dict[str, Any] = {"features_only": True, "feature_cls": "getter"}
    if model.drop_path:
        arguments["drop_path_rate"] = model.drop_path
    if model.name in VARIANTS:
        arguments |= {
            "attention": model.attention,
            "position": model.position,
            "pale_size": model.pale_size,
            "stem_stride": model.stem_stride,
            "img_size": size,
        }
        del arguments["feature_cls"]  # its own
    # Lists are what YAML makes of sizes.
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in model.options.items()}
    arguments |= given
    try:
        # Models of a fixed size, as Swin, are told ours, and not to insist on it.
        sized = {"img_size": size, "strict_img_size": False} if model.name not in VARIANTS else {}
        backbone = timm.create_model(model.name, **(sized | arguments))
    except TypeError:
        backbone = timm.create_model(model.name, **arguments)
    info = backbone.feature_info
    if not hasattr(backbone, "model") or tuple(info.reduction()[-4:]) != STRIDES:
        raise ValueError(
            f"{what} needs maps at strides 4, 8, 16 and 32, {model.name} gives "
            f"{', '.join(map(str, info.reduction()))}; take a hierarchical backbone with stem stride 4"
        )
    if len(info.reduction()) > len(STRIDES):
        backbone.out_indices = backbone.out_indices[-4:]
    return backbone, list(info.channels()[-4:])


class DenseModel(Model):
    """Heads on a backbone, and what both start from.

    Attributes:
        init: a classifier (a run, a .safetensors file, or a foreign .pth) that the backbone starts from.
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
        """The model with random weights."""

    def build(self, classes: int, size: int | tuple[int, int]) -> Any:
        """The model, with its weights loaded where some are named."""
        return self.assemble(classes, size)[0]

    def assemble(self, classes: int, size: int | tuple[int, int]) -> tuple[Any, list[str]]:
        """The model, and what there is to say about the weights that it starts from."""
        model = self.network(classes, size)
        if self.checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        notes = []
        if self.weights is not None:
            weight_files.put(model, weight_files.load(self.weights), self.weights, self.new_head)
            notes.append(
                f"weights of {self.weights}" + (" but for the classifiers" * self.new_head)
            )
        if self.init is not None:
            notes.append(init_backbone(model, self.init))
        return model, notes


def init_backbone(model: nn.Module, path: Path) -> str:
    """Put a classifier's weights into the backbone; says what was loaded, what is new and what did not fit."""
    tensors = dict(weight_files.load(path).tensors)
    inner: Any = inner_model(model)
    adapt = getattr(sys.modules[type(inner).__module__], "checkpoint_filter_fn", None)
    own = inner.state_dict()
    # timm's own adapter, for tables that depend on the size, as Swin's.
    if adapt is not None and any(n in own and t.shape != own[n].shape for n, t in tensors.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the speed of its interpolation
            tensors = adapt(tensors, inner)
    sized = ("ape.map",)  # resized while loading
    fitting = {
        name: t
        for name, t in tensors.items()
        if name in own and (t.shape == own[name].shape or name.endswith(sized))
    }
    unfit = sorted(name for name in tensors if name in own and name not in fitting)
    unused = sorted(name for name in tensors if name not in own)
    missing = sorted(name for name in own if name not in fitting)
    if len(fitting) < len(own) / 2:
        raise ValueError(
            f"{path} does not fit this backbone: {len(fitting)} of its {len(own)} tensors could be loaded; "
            "was it trained with another model?"
        )
    inner.load_state_dict(fitting, strict=False)
    heads = len(model.state_dict()) - len(own)
    parts = [f"{path}: {len(fitting)} of {len(own)} tensors of the backbone loaded"]
    parts.append(f"new: the heads ({heads} tensors){_few(missing)}")
    if unfit:
        parts.append(f"did not fit:{_few(unfit).removeprefix(',')}")
    if unused:
        parts.append(f"not used:{_few(unused).removeprefix(',')}")
    return "; ".join(parts)


def _few(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f", {', '.join(names[:3])}{more}"


def inner_model(model: nn.Module) -> Any:
    """The model of timm's inside a detector or segmenter, wherever its features are taken."""
    return next(
        m for m in model.modules() if hasattr(m, "feature_info") and hasattr(m, "model")
    ).model


def spared(backbone: Any, prefix: str) -> set[str]:
    """Parameters that the backbone wants without weight decay, by their names under `prefix`."""
    inner = getattr(backbone, "model", backbone)
    named = getattr(inner, "no_weight_decay", None)
    return {f"{prefix}{name}" for name in named()} if callable(named) else set()


def layer_groups(backbone: Any, coarse: bool, prefix: str) -> dict[str, Any]:
    """Timm's patterns for layer-wise learning rates, for a backbone under `prefix`."""
    inner = backbone.model.group_matcher(coarse)
    return {name: _under(pattern, prefix) for name, pattern in inner.items()}


def _under(pattern: Any, prefix: str) -> Any:
    # timm's patterns: a string, or a list of (string, number); each begins with ^.
    if isinstance(pattern, str):
        return pattern.replace("^", f"^{prefix}")
    if isinstance(pattern, list | tuple):
        return [(_under(p, prefix), n) for p, n in pattern]
    return pattern
