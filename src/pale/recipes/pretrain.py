"""Pre-training on several datasets at once (`--data.mix`), for backbones that are fine-tuned later; not in the paper.

There are two stages; the second starts from the weights of the first. They are made for about half a million small
images (64 to 128 px) of many sources and for one GPU. None of the values is from the paper; except for Muon they are
choices with the reasons below, not results of a search.

First stage, `pale_nano` and `pale_t`:

- `data.sizes`: 96 px in the first half and 128 px, the size of the larger images, in the second. A step at 96 px has
  56 % of the pixels, and early training needs little detail.
- Muon at learning rate 2e-3 with weight decay 0.3, as in `small_data`, where it was measured. The rate is stated for
  the batch size of 1024 and not doubled, because the size of Muon's updates does not depend on that of the gradient.
- 60 epochs (`pale_nano`) or 90 (`pale_t`), 30 or 44 thousand steps with half a million images: a larger model can use
  more of them.
- Augmentation grows with the model: 2 million parameters hardly overfit so many images, so `pale_nano` has neither
  RandAugment nor drop path; `pale_t` has a RandAugment of moderate strength and drop path 0.1. Neither has erasing.
- Half of the batches are mixed, as in `small_data`. Crops have at least a quarter of the area: smaller ones of a 64 px
  image would have under 32 px on a side.
- A moving average over about 2000 steps (`ema=0.9995`), 4 epochs, is evaluated and saved.
- Evaluation every fifth epoch, because the validation sets of all sources together are large.

Second stage, `pale_nano_192` and `pale_t_192`: ten epochs at 192 px, because fine-tuning usually uses 160 to 224 px,
with a fifth of the learning rate, weak augmentation and no mixing, as in the fine-tuning of Swin at a larger size.
`--model.weights RUN` keeps the classifier of the first stage; `--init RUN` loads only its backbone, for another
mixture.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.images import Augment
from ..data.transforms.mixing import Mix
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from .kinds import Classification
from .schema import Optim


def pale_nano() -> Classification:
    """Our 2 M parameter model on several datasets (--data.mix), 96 and 128 px."""
    return Classification(
        model=Model(name="pale_nano"),
        data=Data(size=128, sizes=((0.0, 96), (0.5, 128)), crop=1.0, workers=14),
        augment=Augment(scale=(0.25, 1.0), auto=None, erase=0),
        mix=Mix(mixup=0.2, cutmix=1.0, probability=0.5),
        optim=Optim(name="muon", lr=2e-3, lr_batch=1024, weight_decay=0.3),
        batch=1024,
        epochs=60,
        warmup_epochs=2,
        ema=0.9995,
        eval_every=5,
        required=("data.mix",),
    )


def pale_t() -> Classification:
    """Pale-T on several datasets (--data.mix), 96 and 128 px."""
    return vary(
        pale_nano(),
        model={"name": "pale_tiny", "drop_path": 0.1},
        augment={"auto": "rand-m6-mstd0.5-inc1"},
        epochs=90,
    )


def _second_stage(first: Classification) -> Classification:
    return vary(
        first,
        data={"size": 192, "sizes": ()},
        augment={"scale": (0.35, 1.0), "auto": None},
        mix=Mix(mixup=0, cutmix=0),
        optim={"lr": 4e-4, "weight_decay": 0.1},
        epochs=10,
        warmup_epochs=0.5,
        ema=0.999,
        eval_every=2,
        required=("data.mix", "model.weights"),
    )


def pale_nano_192() -> Classification:
    """Second stage of pretrain.pale_nano at 192 px, from --model.weights."""
    return _second_stage(pale_nano())


def pale_t_192() -> Classification:
    """Second stage of pretrain.pale_t at 192 px, from --model.weights."""
    return _second_stage(pale_t())
