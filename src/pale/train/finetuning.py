"""Choose settings of `pale train finetune`: task and splits by the data; model, weights and precision by the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from .. import recipes
from ..errors import PaleError
from ..model.pale_transformer import VARIANTS
from ..recipes.schema import Recipe
from ..tasks import DEFAULT_TASK
from ..tasks.backbones import named_model
from ..tasks.layouts import recognise
from ..weights.read import load_header
from ..weights.zoo import best_start, get_entry
from .settings import RunSettings

NAME = "finetune"
MODEL_ON_GPU = "pale_tiny"


def plan_finetuning(
    settings: RunSettings, changes: Mapping[str, object]
) -> tuple[Recipe, list[str]]:
    """Return the recipe for a dataset on a device, and lines about what was chosen.

    Args:
        settings: settings of the run.
        changes: settings that the user gave, by dotted name; they are not changed, and not applied here.
    """
    root = changes.get("data.root")
    if root is None and not {"data.images", "data.masks", "data.annotations"} & changes.keys():
        recipes.get(NAME).override(changes)  # names a misspelt data.root
    layout = recognise(None if root is None else Path(str(root)), changes)
    name = NAME if layout.kind == DEFAULT_TASK else f"{NAME}.{layout.kind}"
    recipe = recipes.get(name)
    chosen, notes = dict(layout.settings), list(layout.notes)
    if root is not None:
        chosen["data.root"] = str(root)
    chosen |= _model_of_start(settings, changes)
    for_device, remarks = _choose_for_device(settings, {**chosen, **changes})
    chosen |= for_device
    notes += remarks
    model = str(changes.get("model.name", chosen.get("model.name", recipe.model.name)))
    if settings.init is None and not {"model.weights", "model.init"} & changes.keys():
        start = best_start(DEFAULT_TASK, model)
        if start is None:
            notes.append(
                f"there are no included weights of {model}: the run starts from random weights, which needs far more "
                "images; give --init FILE"
            )
        else:
            recipe = recipe.started_from(Path(start))
            notes.append(
                f"starts from the included weights {start}, licence {get_entry(start).license or 'unknown'} "
                f"(pale weights show {start})"
            )
    if "model.weights" in changes and "model.new_head" not in changes:
        chosen["model.new_head"] = changes["model.weights"] is not None
    return recipe.override(chosen), notes


def _model_of_start(settings: RunSettings, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the Pale model that the given weights name, as a setting; unreadable weights are an error later."""
    given = settings.init or changes.get("model.weights") or changes.get("model.init")
    if given is None or "model.name" in changes:
        return {}
    try:
        name = named_model(load_header(Path(str(given))))
    except (PaleError, OSError, ValueError):
        return {}
    return {"model.name": name} if name in VARIANTS else {}


def _choose_for_device(
    settings: RunSettings, changes: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return model and precision for the device as settings, and lines about what was chosen."""
    if settings.device != "cuda" and not (settings.device is None and torch.cuda.is_available()):
        if "precision" in changes or not has_bf16_instructions():
            return {}, []
        note = "precision bf16, which is faster than float32 on this CPU (--precision fp32 if rounding matters)"
        return {"precision": "bf16"}, [note]
    if "model.name" in changes:
        return {}, []
    # A larger model is better only if it does not start from random weights.
    if best_start(DEFAULT_TASK, MODEL_ON_GPU) is None:
        return {}, [f"there are no included weights of {MODEL_ON_GPU}; a smaller model is trained"]
    return {"model.name": MODEL_ON_GPU, "model.drop_path": 0.1}, []


def has_bf16_instructions() -> bool:
    """Return whether the CPU multiplies matrices in bfloat16; False if PyTorch cannot be asked."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) is True for name in ("avx512_bf16", "amx_bf16"))
