"""Training from scratch on a few thousand to a few ten thousand images; not in the paper.

Sixty epochs of a small dataset are few steps, so regularisation that slows learning is removed or halved: no
RandAugment, no erasing, half of the batches mixed, larger crops, a smaller batch size; matrices are updated by Muon. On
a tenth of the training images of tiny-imagenet-50 this gave 63.4 % top-1, AdamW at its usual learning rate 51.6
(Pale-T, one run each; benchmarks/results/small_data_h200.md).
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.images import Augment
from ..data.transforms.mixing import Mix
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from .kinds import Classification
from .schema import Optim


def pale_t() -> Classification:
    """Pale-T from scratch on a small dataset, 128 px."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.1),
        data=Data(size=128, crop=1.0),
        augment=Augment(scale=(0.25, 1.0), auto=None, erase=0),
        mix=Mix(mixup=0.2, cutmix=1.0, probability=0.5),
        optim=Optim(name="muon", lr=2e-3, lr_batch=512, weight_decay=0.3),
        batch=512,
        epochs=60,
        warmup_epochs=5,
    )


def pale_t_star() -> Classification:
    """Pale-T from scratch on a small dataset, 128 px, with MixToken and token labels of a teacher."""
    return vary(
        pale_t(),
        mix={"mixup": 0, "cutmix": 0, "tokens": 1.0},
        required=("token_labels.store",),
    )


def pale_nano() -> Classification:
    """Our 2 M parameter model from scratch on a small dataset, 128 px; for a laptop."""
    return vary(
        pale_t(), model={"name": "pale_nano", "drop_path": 0.05}, batch=128, optim={"lr_batch": 128}
    )
