"""Trimaps of Oxford-IIIT Pet: pet, background, border; ours, not the paper's.

Expected are images/, annotations/trimaps/ and annotations/trainval.txt and test.txt. From scratch, at
the size of pictures whose short side is 160.
"""

from __future__ import annotations

from ..data.mask_transforms import MaskAugment
from ..settings import vary
from ..tasks.segmentation import MaskData, SegmentationModel
from ..tasks.segmentation.inference import MULTI_SCALES, Inference
from .schema import Optim, Segmentation


def upernet_pale_t() -> Segmentation:
    """UperNet on Pale-T from scratch, 160 px."""
    test = Inference(short=160, long=640)
    return Segmentation(
        model=SegmentationModel(name="pale_tiny", drop_path=0.1),
        data=MaskData(
            images="images",
            masks="annotations/trimaps",
            lists="annotations/{split}.txt",
            train="trainval",
            val="test",
            classes=("pet #e6194b", "background #3c5a96", "border #ffe119"),
            reduce_zero=True,
        ),
        augment=MaskAugment(
            short=160, long=640, crop=160, scale=(0.75, 1.75), most_of_one_class=1.0
        ),
        test=test,
        multi=vary(test, scales=MULTI_SCALES, flip=True),
        optim=Optim(lr=5e-4, lr_batch=32, min_lr=0, weight_decay=0.05, schedule="linear", clip=5.0),
        batch=32,
        steps=2000,
        warmup_steps=200,
        eval_every=1000,
    )


def upernet_nano() -> Segmentation:
    """A narrow UperNet on our 2 M parameter model from scratch, 160 px, for a CPU."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.0, "width": 64, "auxiliary": 32},
        optim={"lr": 1e-3},
    )
