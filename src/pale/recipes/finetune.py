"""Fine-tuning to other classes or another resolution; not in the paper.

`finetune` is for a few hundred images without splits: `pale train finetune --data.root DIR` chooses the task, the
splits, the model and the weights to start from (train/finetuning.py). Small sets need many passes, so the run has a
minimum number of steps; light augmentation, no mixing, a learning rate that falls towards the first layers, and a
moving average of the weights. `finetune.pale_t` and its variants follow Swin and ConvNeXt: 30 epochs from
--model.weights with a small learning rate and without mixing.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.images import Augment
from ..data.transforms.mixing import Mix
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from . import small_boxes, small_masks
from .kinds import Classification, Detection, Segmentation
from .schema import Optim


def finetune() -> Classification:
    """A few hundred own images, from included weights: plain class folders, masks or COCO; minutes on a CPU."""
    return Classification(
        model=Model(name="pale_nano", drop_path=0.05),
        data=Data(size=160, crop=0.95, check=True),
        augment=Augment(scale=(0.35, 1.0), auto=None, colour_jitter=0.3, erase=0),
        mix=Mix(mixup=0, cutmix=0),
        optim=Optim(lr=5e-4, lr_batch=16, min_lr=1e-6, weight_decay=0.05, layer_decay=0.8),
        batch=16,
        epochs=30,
        min_steps=500,
        warmup_steps=20,
        ema=0.98,
    )


def segmentation() -> Segmentation:
    """A few hundred own images with masks, from included weights, with a narrow UperNet; `finetune` chooses it."""
    return vary(
        small_masks.upernet_nano(),
        model={"drop_path": 0.05},
        augment={"short": 192, "long": 768, "crop": 192},
        test={"short": 192, "long": 768},
        multi={"short": 192, "long": 768},
        batch=8,
        optim={"lr_batch": 8},
        epochs=30,
        min_steps=400,
        warmup_epochs=20,
        warmup_steps=20,
        eval_every=1,
        ema=0.98,
    )


def detection() -> Detection:
    """A few hundred own images in COCO, YOLO or VOC format, from included weights; `finetune` chooses it."""
    return vary(
        small_boxes.mask_rcnn_nano(),
        augment={"short": 192, "long": 320},
        test={"short": 192, "long": 320},
        batch=8,
        optim={"lr_batch": 8, "schedule": "cosine"},
        epochs=30,
        min_steps=600,
        warmup_steps=50,
        eval_every=1,
        ema=0.98,
    )


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
    """Pale-T on the same classes at 384 px, from --model.weights; batch 512 and lr 2e-5, as Swin."""
    return vary(
        pale_t(),
        model={"new_head": False},
        data={"size": 384, "crop": 1.0},
        optim={"lr": 2e-5, "lr_batch": 512, "layer_decay": None, "weight_decay": 1e-8},
        batch=512,
        warmup_epochs=5,
    )
