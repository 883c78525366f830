"""Any folder of images and masks, from some hundred to some ten thousand; ours, not the paper's.

Give --data.images DIR --data.masks DIR --data.classes FILE (docs/segmentation.md), and weights of a
classifier with --init FILE where there are any.
"""

from __future__ import annotations

from ..data.mask_transforms import MaskAugment
from ..settings import vary
from ..tasks.segmentation import SegmentationModel
from ..tasks.segmentation.inference import MULTI_SCALES, Inference
from .schema import Optim, Segmentation


def upernet_pale_t() -> Segmentation:
    """UperNet on Pale-T for images and masks of one's own, short side 320, crop 320."""
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
    """A narrow UperNet on our 2 M parameter model for images and masks of one's own, for a laptop."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "width": 64, "auxiliary": 32},
        optim={"lr": 1e-3},
    )
