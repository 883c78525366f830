"""Recipes of the included weights: three small models, and two larger ones; not in the paper.

data.root is Oxford-IIIT Pet, as for `pets.*`, with 3680 training images. The classifier trains from scratch, segmenter
and detector start from its backbone: --init classify_pets (docs/weights.md). Each takes a minute or two on one large
GPU: the classifiers keep their images in its memory, and small steps are recorded as CUDA graphs if all images have one
size. The weights of the last step are published; none are selected on the test images that the cards report.
"""

from __future__ import annotations

from ..core.settings import vary
from ..data.transforms.images import Augment
from ..data.transforms.mixing import Mix
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from ..tasks.detection.model import Heads
from . import pets, small_data
from .kinds import Classification, Detection, Segmentation
from .schema import Optim

PETS = Data(
    kind="pets", train="trainval", val="test", size=160, crop=1.0, workers=14, on_device="pictures"
)


def classify_pets() -> Classification:
    """37 breeds of cats and dogs with our 2 M parameter model from scratch, 160 px."""
    return Classification(
        model=Model(name="pale_nano", drop_path=0.05),
        data=PETS,
        # 100 images per breed, 300 epochs. Crops keep most of the animal; RandAugment and Mixup are weaker than on
        # ImageNet, because a small model underfits rather than overfits.
        augment=Augment(scale=(0.25, 1.0), auto="rand-m7-mstd0.5-inc1"),
        mix=Mix(mixup=0.2, cutmix=1.0, probability=0.5),
        optim=Optim(lr=1e-3, lr_batch=128, min_lr=1e-6, weight_decay=0.05),
        batch=128,
        epochs=300,
        warmup_epochs=10,
        eval_every=150,
        cuda_graph=True,
    )


def segment_pets() -> Segmentation:
    """Pet, background and border, with a narrow UperNet on our 2 M parameter model, 160 px."""
    return vary(
        pets.upernet_nano(),
        model={"drop_path": 0.05, "width": 96, "auxiliary": 48},
        data={"workers": 14},
        optim={"lr_batch": 64},
        batch=64,
        steps=3000,
        warmup_steps=300,
        eval_every=100,
        cuda_graph=True,
    )


def detect_pets() -> Detection:
    """Box, species and silhouette of a pet with a narrow Mask R-CNN on our 2 M parameter model, short side 160."""
    return vary(
        pets.mask_rcnn_nano(),
        model={
            "drop_path": 0.05,
            # An image has one or two animals, so few regions are enough.
            "heads": Heads(
                width=96,
                box_width=192,
                mask_width=64,
                mask_layers=2,
                rpn_samples=64,
                box_samples=32,
                proposals=100,
            ),
        },
        data={"workers": 14},
        epochs=8,
        warmup_steps=200,
        eval_every=8,
    )


def pale_t_pets() -> Classification:
    """37 breeds of cats and dogs with Pale-T from scratch, 160 px; for one large GPU."""
    return vary(
        small_data.pale_t(),
        data=PETS,
        batch=256,
        epochs=150,
        warmup_epochs=10,
        eval_every=20,
        cuda_graph=True,
    )


def pale_t_tiny_imagenet() -> Classification:
    """Pale-T from scratch on folders of 64 px images such as tiny-imagenet-50, resized to 128; for one large GPU."""
    return vary(
        small_data.pale_t(),
        data={"workers": 14, "on_device": "pictures"},
        eval_every=20,
        cuda_graph=True,
    )
