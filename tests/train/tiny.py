"""A recipe that makes a step in some ten milliseconds and has everything on: augmentation, mixing, drop path, EMA."""

from pathlib import Path

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from pale.recipes import get
from pale.recipes.schema import Classification
from pale.teacher import Teacher, make

CHANGES = {
    "model.options": {"depths": [1, 1, 1, 1], "channels": [8, 16, 16, 16], "heads": [2, 2, 2, 2]},
    "model.drop_path": 0.4,
    "data.size": 32,
    "data.samples": 22,
    "data.val_samples": 12,
    "augment": {},
    "mix": {},
    "batch": 8,
    "epochs": 3,
    "ema": 0.9,
    "log_every": 1,
    "optim.lr": 0.01,
}


def tiny(**changes) -> Classification:
    """The recipe, with settings changed by dotted name; "." is written "__"."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return get("quickstart").override(CHANGES | changes)


def picture_folders(root: Path) -> None:
    """train and val, each with two classes of four pictures."""
    for split in ("train", "val"):
        for name in ("a", "b"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (40, 40), (i * 60, 0, 90)).save(folder / f"{i}.png")


def star(folder: Path, **changes) -> Classification:
    """The recipe with MixToken and token labels of a teacher with random weights; RandAugment, erasing, EMA as ever."""
    mix = {"mixup": 0, "cutmix": 0, "tokens": 1.0}
    recipe = tiny(mix=mix, token_labels__store=str(folder), data__size=64, **changes)
    source = recipe.data.train_source(recipe.seed)
    torch.manual_seed(5)
    model = recipe.model.build(len(source.classes), recipe.data.size).eval()
    for parameter in model.head.parameters():
        parameter.data.mul_(40)  # or all labels would be alike
    found = Teacher("random", model, 64, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    make(found, source, folder, shard=8)
    return recipe
