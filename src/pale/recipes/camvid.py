"""CamVid, 11 classes of street scenes, with the split of SegNet; not in the paper.

data.root must hold train/, trainannot/, val/, valannot/ (and test/, testannot/ for --data.val test) and classes.txt.
The training set is small (367 frames of a few videos), so drop path and distortion are on, and 1500 steps are enough.
Images keep their size.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.masks import MaskAugment
from ..tasks.segmentation.data import MaskData
from ..tasks.segmentation.model import SegmentationModel
from ..tasks.segmentation.segmenter import MULTI_SCALES, Inference
from .kinds import Segmentation
from .schema import Optim


def upernet_pale_t() -> Segmentation:
    """UperNet on Pale-T, 320x240; better with the weights of a classifier: --init FILE."""
    own_size = Inference(short=None, long=None)
    return Segmentation(
        model=SegmentationModel(name="pale_tiny", drop_path=0.2),
        data=MaskData(
            images="{split}", masks="{split}annot", classes="classes.txt", ignore=(11, 255)
        ),
        augment=MaskAugment(short=None, long=None, crop=(240, 320)),
        test=own_size,
        multi=vary(own_size, scales=MULTI_SCALES, flip=True),
        optim=Optim(lr=3e-4, lr_batch=16, min_lr=0, weight_decay=0.05, schedule="linear", clip=5.0),
        batch=16,
        steps=1500,
        warmup_steps=150,
        eval_every=22,
    )


def upernet_nano() -> Segmentation:
    """A narrow UperNet on our 2 M parameter model, for a CPU."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "width": 64, "auxiliary": 32},
        optim={"lr": 1e-3},
    )
