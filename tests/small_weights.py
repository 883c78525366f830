"""Weights of each task that are made in a second, and pictures to try them on."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tasks.detected import detected
from tasks.segmented import segmented
from train.tiny import tiny

from pale import weights as weight_files
from pale.data.scenes import draw

RECIPES = {"classification": tiny, "segmentation": segmented, "detection": detected}
TASKS = list(RECIPES)


def pixels(width: int = 90, height: int = 61) -> np.ndarray:
    return np.asarray(Image.fromarray(draw(5, 2, 96).image).resize((width, height)))


def weights(folder: Path) -> dict[str, Path]:
    """As a run writes them, with lively numbers; nobody trained them."""
    found = {}
    for name, recipe_of in RECIPES.items():
        recipe = (
            recipe_of() if name == "classification" else recipe_of(test__short=40, test__long=90)
        )
        classes = [f"{name} {i}" for i in range(8 if name == "detection" else 9)]
        torch.manual_seed(2)
        if name == "classification":
            model = recipe.model.build(len(classes), recipe.data.size)
        else:
            model = recipe.model.build(len(classes), recipe.augment.crop or 48)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(3)
        found[name] = folder / f"{name}.safetensors"
        about = {"recipe": recipe.plain(), "classes": classes}
        weight_files.save(found[name], model.state_dict(), about)
    return found
