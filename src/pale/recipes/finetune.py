"""From weights to other classes or another resolution; ours, after the fine-tuning of Swin and ConvNeXt.

They train 30 epochs with a small learning rate and without mixing; layer decay keeps the early blocks,
which are general, near where they were.
"""

from __future__ import annotations

from ..data.mixing import Mix
from ..settings import vary
from ..tasks.classification import Model
from .schema import Classification, Optim


def pale_t() -> Classification:
    """Pale-T on other classes, from --model.weights."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.1, new_head=True),
        mix=Mix(mixup=0, cutmix=0),
        optim=Optim(lr=5e-4, lr_batch=256, min_lr=1e-6, weight_decay=0.05, layer_decay=0.9),
        batch=256,
        epochs=30,
        warmup_epochs=3,
        required=("model.weights",),
    )


def pale_s() -> Classification:
    """Pale-S on other classes, from --model.weights."""
    return vary(pale_t(), model={"name": "pale_small", "drop_path": 0.2})


def pale_b() -> Classification:
    """Pale-B on other classes, from --model.weights."""
    return vary(pale_t(), model={"name": "pale_base", "drop_path": 0.3})


def pale_t_384() -> Classification:
    """Pale-T on the same classes at 384 px, from --model.weights; batch 512 and lr 2e-5 a 512 as Swin."""
    return vary(
        pale_t(),
        model={"new_head": False},
        data={"size": 384, "crop": 1.0},
        optim={"lr": 2e-5, "lr_batch": 512, "layer_decay": None, "weight_decay": 1e-8},
        batch=512,
        warmup_epochs=5,
    )
