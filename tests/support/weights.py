"""Random weights of each task, made in a second, and an image to try them on."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from support.recipes import classification_recipe, detection_recipe, segmentation_recipe

from pale.data.sources.scenes import draw_scene
from pale.weights.write import save_weights

RECIPES = {
    "classification": classification_recipe,
    "segmentation": segmentation_recipe,
    "detection": detection_recipe,
}
TASKS = list(RECIPES)


def pixels(width: int = 90, height: int = 61) -> np.ndarray:
    return np.asarray(Image.fromarray(draw_scene(5, 2, 96).image).resize((width, height)))


def weights(folder: Path) -> dict[str, Path]:
    """Write weights as a run does, scaled so that outputs differ; they are not trained."""
    found = {}
    for name, recipe_of in RECIPES.items():
        resized = {} if name == "classification" else {"test__short": 40, "test__long": 90}
        recipe = recipe_of(**resized)
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
        save_weights(found[name], model.state_dict(), about)
    return found
