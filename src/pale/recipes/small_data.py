"""From scratch on a few thousand to a few ten thousand images; ours, not the paper's.

Sixty epochs of few images are few steps, so what makes learning slow on ImageNet is left out or halved: no RandAugment,
no erasing, half of the batches mixed, crops that keep more of the picture, a smaller batch; and matrices go by Muon.
On a tenth of tiny-imagenet-50's training images this gave 63.4 % top-1, AdamW at its usual rate 51.6 (Pale-T, one run
each; benchmarks/results/small_data_h200.md).
"""

from __future__ import annotations

from ..data.mixing import Mix
from ..data.transforms import Augment
from ..settings import vary
from ..tasks.classification import Data, Model
from .schema import Classification, Optim


def pale_t() -> Classification:
    """Pale-T from scratch on a small set, 128 px."""
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
