"""Included weights in timm: the tagged names, their configurations, and loading.

An entry of the zoo's index with a part "timm" becomes the name MODEL.TAG. timm's `pretrained_cfg` names the file and
sets `custom_load`, because timm cannot read the packed format: timm then calls `PaleTransformer.load_pretrained`.
Importing reads only the index.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm.models import adapt_input_conv

from ..errors import UnavailableError, WeightsError
from ..weights import zoo
from ..weights.compare import load_into
from ..weights.read import Weights, load_weights
from ..weights.zoo.index import UNTRAINED

if TYPE_CHECKING:
    from .pale_transformer import PaleTransformer

SOURCES = ("url", "file", "state_dict", "hf_hub_id")  # of weights, in timm's `pretrained_cfg`
RGB = 3
STRIDE = 32  # of the last map


def tagged_configs(base: Mapping[str, Any], models: Container[str]) -> dict[str, dict[str, Any]]:
    """Return timm's configurations of the included weights by tagged name.

    An invalid index is a warning here, so that it does not prevent `import timm`; everything else raises for it.

    Args:
        base: configuration of a model without weights.
        models: names of the models.
    """
    try:
        entries = [entry for entry in zoo.list_entries() if entry.timm and entry.model in models]
    except WeightsError as error:
        warnings.warn(f"timm has no names for the included weights: {error}", stacklevel=2)
        return {}
    return {entry.timm_name: dict(base) | _config(entry) for entry in entries}


def _config(entry: zoo.ZooEntry) -> dict[str, Any]:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.timm_config.items()}
    return given | {
        "file": str(zoo.index.FOLDER / entry.file),
        "custom_load": True,
        "num_classes": entry.classes,
        "pool_size": tuple(-(-side // STRIDE) for side in given["input_size"][1:]),
        "license": entry.license or None,
        "description": entry.data or None,
    }


def names_weights(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments of `timm.create_model` name weights: by a tag, a configuration or a source.

    timm's scripts pass the configuration of a name without a tag, which names none.
    """
    given, overlay = (arguments.get(f"pretrained_cfg{part}") or {} for part in ("", "_overlay"))
    if isinstance(given, str):
        given = {"tag": given}
    elif not isinstance(given, Mapping):
        given = vars(given)  # timm's PretrainedCfg
    if any(config.get(source) for config in (given, overlay) for source in SOURCES):
        return True
    return bool(given) and given.get("tag") != UNTRAINED


def default_tag(model: str) -> str:
    """Return the tag of the general-purpose weights of a model; raise `UnavailableError` if there are none."""
    entries = [entry for entry in zoo.list_entries() if entry.timm and entry.model == model]
    for entry in entries:
        if entry.timm.get("default"):
            return str(entry.timm["tag"])
    tagged = "".join(
        f'timm.create_model("{entry.timm_name}", pretrained=True) loads those for {entry.classes} classes '
        f"({entry.data}); "
        for entry in entries
    )
    raise UnavailableError(
        f"No pretrained weights exist for {model}: nobody has trained it on ImageNet with this code. "
        f"`pale weights` lists the included weights; {tagged}`pale weights export NAME DIR` writes a folder for "
        'timm.create_model("local-dir:DIR", pretrained=True), and `pale train finetune --data.root photos` starts '
        "from them"
    )


def load_pretrained(model: PaleTransformer, path: Path) -> None:
    """Load a safetensors file, packed or not, into a model with any number of classes and channels.

    An included file must have the SHA-256 of the index. The classifier is left as it is if its number of classes
    differs; the first convolution is adapted to other channels as in timm.
    """
    if path.suffix != ".safetensors":
        raise WeightsError(f"pretrained weights must be a .safetensors file, got {path}")
    zoo.require_intact(path)
    tensors, own = dict(load_weights(path).tensors), model.state_dict()
    head, conv = ("head.fc.weight", "head.fc.bias"), "stages.0.merge.conv.weight"
    if any(name in tensors and tensors[name].shape != _shape(own, name) for name in head):
        for name in head:
            tensors.pop(name, None)
            if name in own:
                tensors[name] = own[name]
    if model.in_chans != RGB and conv in tensors and tensors[conv].shape[1:2] == (RGB,):
        tensors[conv] = adapt_input_conv(model.in_chans, tensors[conv])
    load_into(model, Weights(tensors), path, new_head=False)


def _shape(tensors: Mapping[str, Any], name: str) -> Any:
    return tensors[name].shape if name in tensors else None
