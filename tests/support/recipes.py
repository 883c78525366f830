"""Recipes of each task with a small model and generated data: a step takes about ten milliseconds on a CPU."""

from pathlib import Path

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from pale.data.sources.scenes import CLASSES
from pale.recipes import get
from pale.recipes.kinds import Classification, Detection, Segmentation
from pale.tools.teacher import Teacher, write_token_labels

SMALL = {
    "model.options": {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]},
    "data.samples": 22,
    "log_every": 1,
}
# With augmentation, mixing, drop path and EMA.
CLASSIFICATION = SMALL | {
    "model.drop_path": 0.4,
    "data.size": 32,
    "data.val_samples": 12,
    "augment": {},
    "mix": {},
    "batch": 8,
    "epochs": 3,
    "ema": 0.9,
    "optim.lr": 0.01,
}
# With all augmentations, dropout and the auxiliary head.
SEGMENTATION = SMALL | {
    "model.drop_path": 0.3,
    "model.width": 12,
    "model.auxiliary": 6,
    "model.dropout": 0.1,
    "data.size": 32,
    "data.val_samples": 5,
    "augment.crop": 32,
    "augment.scale": [0.5, 2.0],
    "augment.most_of_one_class": 0.75,
    "augment.distort": 1.0,
    "loss.class_weights": None,
    "steps": 6,
    "warmup_steps": 2,
    "batch": 8,
}
DETECTION = SMALL | {
    "model.drop_path": 0.3,
    "model.heads.width": 16,
    "model.heads.box_width": 16,
    "model.heads.mask_width": 8,
    "model.heads.mask_layers": 1,
    "model.heads.proposals": 20,
    "model.heads.rpn_samples": 16,
    "model.heads.box_samples": 8,
    "data.size": 48,
    "data.val_samples": 5,
    "data.objects": [1, 3],
    "data.shapes": list(CLASSES),
    "epochs": 3,
    "steps": 6,
    "warmup_steps": 2,
    "batch": 4,
}


def dotted(changes: dict) -> dict:
    """Return settings by dotted name from keyword arguments, in which "__" stands for the dot."""
    return {name.replace("__", "."): value for name, value in changes.items()}


def classification_recipe(**changes) -> Classification:
    """Return the small recipe with settings changed; see `dotted`."""
    return get("quickstart").override(CLASSIFICATION | dotted(changes))


def segmentation_recipe(**changes) -> Segmentation:
    """Return the small recipe with settings changed; see `dotted`."""
    return get("quickstart.segmentation").override(SEGMENTATION | dotted(changes))


def detection_recipe(**changes) -> Detection:
    """Return the small recipe with settings changed; see `dotted`."""
    return get("quickstart.detection").override(DETECTION | dotted(changes))


def token_label_recipe(folder: Path, **changes) -> Classification:
    """Return the recipe with MixToken, and write token labels of a teacher with random weights."""
    mix = {"mixup": 0, "cutmix": 0, "tokens": 1.0}
    recipe = classification_recipe(
        mix=mix, token_labels__store=str(folder), data__size=64, **changes
    )
    source = recipe.data.train_source(recipe.seed)
    torch.manual_seed(5)
    model = recipe.model.build(len(source.classes), recipe.data.size).eval()
    for parameter in model.head.parameters():
        parameter.data.mul_(40)  # otherwise all labels would be almost equal
    found = Teacher("random", model, 64, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    write_token_labels(found, source, folder, shard=8)
    return recipe
