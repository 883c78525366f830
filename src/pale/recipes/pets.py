"""Segmentation of the trimaps of Oxford-IIIT Pet, and detection of cats and dogs; not in the paper.

data.root must hold images/, annotations/trimaps/, annotations/trainval.txt and annotations/test.txt. Training from
scratch, with a short side of 160.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.instances import InstanceAugment
from ..data.transforms.masks import MaskAugment
from ..tasks.detection.data import InstanceData
from ..tasks.detection.inference import Testing
from ..tasks.detection.model import DetectionModel
from ..tasks.segmentation.data import MaskData
from ..tasks.segmentation.model import SegmentationModel
from ..tasks.segmentation.segmenter import MULTI_SCALES, Inference
from . import coco
from .kinds import Detection, Segmentation
from .schema import Optim


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


def mask_rcnn_pale_t() -> Detection:
    """Mask R-CNN on Pale-T from scratch: box, species and silhouette of the pet, short side 160."""
    return Detection(
        model=DetectionModel(name="pale_tiny", drop_path=0.1),
        data=InstanceData(kind="pets", train="trainval", val="test"),
        augment=InstanceAugment(short=160, long=320, scale=(0.75, 1.5), crop=192, distort=0.5),
        test=Testing(short=160, long=320),
        optim=Optim(
            lr=4e-4,
            lr_batch=32,
            min_lr=0,
            warmup_lr=4e-7,
            weight_decay=0.05,
            schedule="cosine",
            clip=5.0,
        ),
        batch=32,
        epochs=20,
        warmup_steps=300,
        eval_every=20,
    )


def mask_rcnn_nano() -> Detection:
    """A narrow Mask R-CNN on our 2 M parameter model from scratch, for a CPU."""
    return vary(
        mask_rcnn_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.0, "heads": coco.NANO},
        optim={"lr": 1e-3},
    )
