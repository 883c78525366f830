"""From scratch on a few thousand to a few ten thousand images; ours, not the paper's.

Few images are seen often: the crop keeps more of the picture than on ImageNet, drop path is stronger,
the batch smaller so that there are steps enough.
"""

from __future__ import annotations

from ..data.transforms import Augment
from ..settings import vary
from ..tasks.classification import Data, Model
from .schema import Classification, Optim


def pale_t() -> Classification:
    """Pale-T from scratch on a small set, 128 px."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.2),
        data=Data(size=128, crop=1.0),
        augment=Augment(scale=(0.25, 1.0)),
        optim=Optim(lr=1e-3, lr_batch=512),
        batch=512,
        epochs=60,
        warmup_epochs=5,
    )


def pale_t_star() -> Classification:
    """Pale-T from scratch on a small set, 128 px, with MixToken and token labels of a teacher."""
    return vary(
        pale_t(),
        mix={"mixup": 0, "cutmix": 0, "tokens": 1.0},
        required=("token_labels.store",),
    )


def pale_nano() -> Classification:
    """Our 2 M parameter model from scratch on a small set, 128 px; for a laptop."""
    return vary(
        pale_t(), model={"name": "pale_nano", "drop_path": 0.05}, batch=128, optim={"lr_batch": 128}
    )
