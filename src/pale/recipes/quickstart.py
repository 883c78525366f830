"""A run that needs nothing: generated scenes, a small model, two minutes on two CPU cores."""

from __future__ import annotations

from ..data.mixing import Mix
from ..data.transforms import NO_AUGMENT
from ..settings import vary
from ..tasks.classification import Data, Model
from .schema import Classification, Optim


def quickstart() -> Classification:
    """Eight shapes in generated scenes with our smallest model, about two minutes on two CPU cores."""
    return Classification(
        model=Model(name="pale_nano"),
        # Small pictures and small batches: many steps in little time.
        data=Data(kind="scenes", size=40, crop=1.0, samples=14336, val_samples=512, workers=0),
        augment=vary(NO_AUGMENT, flip=0.5, vertical_flip=0.5),
        mix=Mix(mixup=0, cutmix=0, smoothing=0),
        optim=Optim(lr=1e-3, lr_batch=32),
        batch=32,
        epochs=2,
        warmup_epochs=0.25,
    )
