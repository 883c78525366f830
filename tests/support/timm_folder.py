"""Folders of timm models that transformers loads."""

import json
from pathlib import Path
from typing import Any

import timm
from torch import nn


def save_timm_folder(model: nn.Module, folder: Path, arguments: dict[str, Any]) -> None:
    """Write a model as `timm.models.save_for_hf` does.

    timm 1.0.31 lists all arguments of a model, also num_classes, which transformers 5.23 passes a second time: neither
    loads even a ResNet. They are reduced to those given.
    """
    timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"model_args": arguments}
    path.write_text(json.dumps(config))
