"""A recipe that makes a step in some ten milliseconds and has everything on: augmentation, mixing, drop path, EMA."""

from pale.recipes import get
from pale.recipes.schema import Classification

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
