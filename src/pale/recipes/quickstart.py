"""Recipes without a dataset: generated scenes, a small model, a few minutes on two CPU cores."""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.images import NO_AUGMENT
from ..data.transforms.instances import InstanceAugment
from ..data.transforms.masks import MaskAugment
from ..data.transforms.mixing import Mix
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from ..tasks.detection.data import InstanceData
from ..tasks.detection.inference import Testing
from ..tasks.detection.model import DetectionModel, Heads
from ..tasks.segmentation.data import MaskData
from ..tasks.segmentation.model import SegmentationModel
from ..tasks.segmentation.segmenter import MULTI_SCALES, Inference
from .kinds import Classification, Detection, Segmentation
from .schema import Optim


def quickstart() -> Classification:
    """Eight shapes in generated scenes with our smallest model, about two minutes on two CPU cores."""
    return Classification(
        model=Model(name="pale_nano"),
        # Small images and small batches: many steps in little time.
        data=Data(kind="scenes", size=40, crop=1.0, samples=14336, val_samples=512, workers=0),
        augment=vary(NO_AUGMENT, flip=0.5, vertical_flip=0.5),
        mix=Mix(mixup=0, cutmix=0, smoothing=0),
        optim=Optim(lr=1e-3, lr_batch=32),
        batch=32,
        epochs=2,
        warmup_epochs=0.25,
    )


def segmentation() -> Segmentation:
    """Segmentation of shapes in generated scenes with a narrow UperNet, a few minutes on two CPU cores."""
    own_size = Inference(short=None, long=None)
    return Segmentation(
        model=SegmentationModel(name="pale_nano", width=48, auxiliary=24, dropout=0),
        # As above: small images, small batches, many steps.
        data=MaskData(
            kind="scenes", size=48, objects=(1, 1), samples=14400, val_samples=512, workers=0
        ),
        augment=MaskAugment(
            short=None,
            long=None,
            crop=48,
            scale=(1, 1),
            most_of_one_class=1,
            vertical_flip=0.5,
            distort=0,
        ),
        test=own_size,
        multi=vary(own_size, scales=MULTI_SCALES, flip=True),
        # A narrow model allows a high learning rate; a short run needs a smaller second beta.
        optim=Optim(lr=4e-3, lr_batch=16, min_lr=0, betas=(0.9, 0.98), schedule="linear"),
        batch=16,
        steps=1800,
        warmup_steps=120,
        eval_every=2,
    )


def detection() -> Detection:
    """Detection of three shapes in generated scenes with a narrow Mask R-CNN, two minutes on a CPU."""
    return Detection(
        model=DetectionModel(
            name="pale_nano",
            # Shallow, narrow, few regions: a step takes a fifth of a second.
            options={"depths": [1, 1, 1, 1], "channels": [32, 48, 64, 96], "heads": [2, 2, 2, 4]},
            heads=Heads(
                width=48,
                box_width=96,
                mask_width=16,
                mask_layers=1,
                anchor=6.0,
                rpn_samples=32,
                box_samples=16,
                proposals=24,
            ),
        ),
        # Eight shapes are detected too, but classified only after many more steps.
        data=InstanceData(
            kind="scenes",
            size=64,
            objects=(1, 1),
            shapes=("disc", "ring", "bar"),
            samples=8192,
            val_samples=128,
            workers=0,
        ),
        augment=InstanceAugment(short=None, long=None, vertical_flip=0.5),
        test=Testing(short=None, long=None),
        optim=Optim(lr=2e-3, lr_batch=16, min_lr=0, weight_decay=0.05, schedule="linear", clip=5.0),
        batch=16,
        epochs=1,
        warmup_steps=50,
    )
