"""Segmentation on a custom dataset with a few hundred to a few ten thousand images; not in the paper.

Give --data.images DIR --data.masks DIR --data.classes FILE (docs/segmentation.md), and weights of a classifier with
--init FILE if available.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.masks import MaskAugment
from ..tasks.segmentation.model import SegmentationModel
from ..tasks.segmentation.segmenter import MULTI_SCALES, Inference
from .kinds import Segmentation
from .schema import Optim


def upernet_pale_t() -> Segmentation:
    """UperNet on Pale-T for a custom dataset, short side 320, crop 320."""
    test = Inference(short=320, long=1280)
    return Segmentation(
        model=SegmentationModel(name="pale_tiny", drop_path=0.2),
        augment=MaskAugment(short=320, long=1280, crop=320),
        test=test,
        multi=vary(test, scales=MULTI_SCALES, flip=True),
        optim=Optim(lr=2e-4, lr_batch=16, min_lr=0, weight_decay=0.05, schedule="linear", clip=5.0),
        steps=None,
        warmup_steps=None,
        epochs=60,
        warmup_epochs=3,
        eval_every=5,
        required=("data.images", "data.masks", "data.classes"),
    )


def upernet_nano() -> Segmentation:
    """A narrow UperNet on our 2 M parameter model for a custom dataset, for a laptop."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "width": 64, "auxiliary": 32},
        optim={"lr": 1e-3},
    )
