"""Detection on a custom dataset in COCO format with a few hundred to a few ten thousand images; not in the paper.

Give --data.root DIR --data.images '{split}' --data.annotations 'annotations/{split}.json' (docs/detection.md), and
weights of a classifier with --init FILE if available. For boxes without masks: --model.heads.masks false. Labels of
YOLO or Pascal VOC need only --data.kind yolo (or voc) --data.root DIR.
"""

from __future__ import annotations

from ..core.settings import vary
from ..tasks.detection.data import InstanceData
from . import coco
from .kinds import Detection
from .schema import Optim


def mask_rcnn_pale_t() -> Detection:
    """Mask R-CNN on Pale-T for a custom dataset, short side 480."""
    return vary(
        coco.mask_rcnn_pale_t(),
        model={"drop_path": 0.1},
        data=InstanceData(images=None, annotations=None, train="train", val="val"),
        augment={"short": 480, "long": 800, "distort": 0.5},
        test={"short": 480, "long": 800},
        optim=Optim(lr=2e-4, lr_batch=16, min_lr=0, weight_decay=0.05, clip=5.0),
        epochs=36,
        warmup_steps=200,
        eval_every=4,
        reported=None,
        required=("data.images", "data.annotations"),
    )


def mask_rcnn_nano() -> Detection:
    """A narrow Mask R-CNN on our 2 M parameter model for a custom dataset, for a laptop."""
    return vary(
        mask_rcnn_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "heads": coco.NANO},
        augment={"short": 256, "long": 448},
        test={"short": 256, "long": 448},
        optim={"lr": 1e-3},
    )
