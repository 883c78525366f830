"""Compare weights with a model, and load them into it if all of them fit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set

from torch import Tensor, nn

from ..core.lists import list_first
from ..errors import WeightsError
from .read import Weights


def can_resize(name: str, tensor: Tensor, own: Tensor) -> bool:
    """Return whether a model resizes this tensor to its own size while loading, as APE does with its maps."""
    return (
        name.endswith("ape.map")
        and tensor.ndim == 4
        and tensor.numel() > 0
        and (tensor.shape[0], tensor.shape[3]) == (1, own.shape[3])
    )


def load_into(
    model: nn.Module, weights: Weights, source: str | os.PathLike[str], new_head: bool
) -> None:
    """Load all weights into a model; raise `WeightsError` if one is missing, unknown or of another shape.

    Args:
        model: a model with timm's interface.
        weights: the weights to load.
        source: where they come from, for messages.
        new_head: keep the classifier of `model`, for other classes.
    """
    own, tensors = model.state_dict(), dict(weights.tensors)
    config = getattr(model, "pretrained_cfg", {})
    classifier = config.get("classifier", "head.fc")
    background = config.get("background", 0)  # outputs of the classifier that are not classes
    layers = classifier if isinstance(classifier, list | tuple) else (classifier,)
    head = [name for name in own if name.startswith(tuple(f"{layer}." for layer in layers))]
    if new_head:
        tensors |= {name: own[name] for name in head}
    for name in head:
        if name in tensors and tensors[name].shape != own[name].shape:
            raise WeightsError(
                f"{source} holds weights for {tensors[name].shape[:1].numel() - background} classes, the data has "
                f"{len(own[name]) - background}; set model.new_head=true to load the backbone alone"
            )
    _require_equal_shapes(own, tensors, source)
    require_finite({name for name, _ in model.named_parameters()}, tensors, source)
    model.load_state_dict(tensors)


def require_finite(
    parameters: Set[str], tensors: Mapping[str, Tensor], source: str | os.PathLike[str]
) -> None:
    """Raise `WeightsError` for NaN and Inf, with which every result is wrong; buffers may be infinite."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            continue
        wrong = ~tensor.isfinite() if name in parameters else tensor.isnan()
        if wrong.any():
            raise WeightsError(
                f"{source} has NaN or Inf in {name}, so all results would be wrong; the training diverged or the file "
                "was converted wrongly: use other weights"
            )


def _require_equal_shapes(
    own: dict[str, Tensor], tensors: dict[str, Tensor], source: str | os.PathLike[str]
) -> None:
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise WeightsError(
            f"{source} does not fit this model: {_list_names('missing', missing)}{_list_names('unknown', extra)}"
            "was it trained with another model, attention or position?"
        )
    for name, expected in own.items():
        tensor = tensors[name]
        if tensor.shape != expected.shape and not can_resize(name, tensor, expected):
            raise WeightsError(
                f"{source} does not fit this model: {name} is {tuple(tensor.shape)}, "
                f"expected {tuple(expected.shape)}; was it trained with another model?"
            )


def _list_names(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{kind} {list_first(names, 3)}; "
