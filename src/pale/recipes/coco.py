"""COCO with Mask R-CNN, the paper's COCO table and the COCO columns of its ablations.

From the paper: 12 epochs, batch size 16, AdamW, learning rate and its steps, weight decay, drop path, short side 800
and long side at most 1333. From mmdetection, which the paper used: warm-up of 500 steps from a thousandth, flip, the
heads and their losses, no images without objects, no gradient clipping. The backbone must start from ImageNet weights:
--init FILE.
"""

from __future__ import annotations

from ..core.settings import vary
from ..tasks.detection.data import InstanceData
from ..tasks.detection.model import DetectionModel, Heads
from .kinds import Detection
from .schema import Optim, Reported

# The box head of the paper alone has 13.9 M parameters.
NANO = Heads(
    width=64,
    box_width=128,
    mask_width=64,
    mask_layers=2,
    rpn_samples=64,
    box_samples=64,
    proposals=200,
)


def mask_rcnn_pale_t() -> Detection:
    """Mask R-CNN on Pale-T, 47.4 box AP and 42.7 mask AP in the paper."""
    return Detection(
        model=DetectionModel(name="pale_tiny", drop_path=0.2),
        reported=_table(47.4, 69.2, 52.3, 42.7, 66.3, 46.2, 41, 306),
    )


def mask_rcnn_pale_s() -> Detection:
    """Mask R-CNN on Pale-S, 48.4 box AP and 43.7 mask AP in the paper."""
    return vary(
        mask_rcnn_pale_t(),
        model={"name": "pale_small", "drop_path": 0.3},
        reported=_table(48.4, 70.4, 53.2, 43.7, 67.7, 47.1, 68, 432),
    )


def mask_rcnn_pale_b() -> Detection:
    """Mask R-CNN on Pale-B, 49.3 box AP (49.2 in the paper's text) and 44.2 mask AP."""
    return vary(
        mask_rcnn_pale_t(),
        model={"name": "pale_base", "drop_path": 0.5},
        optim={"weight_decay": 0.05},
        reported=_table(49.3, 71.2, 54.1, 44.2, 68.1, 47.8, 105, 595),
    )


def mask_rcnn_nano() -> Detection:
    """A narrow Mask R-CNN on our 2 M parameter model, for a CPU; not in the paper."""
    return vary(
        mask_rcnn_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "heads": NANO},
        augment={"short": 256, "long": 448},
        test={"short": 256, "long": 448},
        reported=None,
    )


def overfit() -> Detection:
    """Mask R-CNN on Pale-T overfitted to 64 images, as a test of data, losses and metric."""
    return vary(
        mask_rcnn_pale_t(),
        model={"drop_path": 0.0},
        data=InstanceData(val="train2017", limit=64, workers=8),
        augment={"short": 512, "long": 864, "flip": 0.0},
        test={"short": 512, "long": 864},
        optim=Optim(
            lr=2e-4,
            lr_batch=16,
            min_lr=0,
            warmup_lr=2e-7,
            schedule="steps",
            steps_at=(110, 140),
            clip=5.0,
        ),
        epochs=150,
        warmup_steps=100,
        eval_every=75,
        reported=None,
    )


def pale_size_1() -> Detection:
    """Pale size 1 in every stage, 46.1 box AP and 41.5 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"pale_size": 1}, reported=_row(46.1, 41.5, 253))


def pale_size_3() -> Detection:
    """Pale size 3 in every stage, 46.7 box AP and 42.3 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"pale_size": 3}, reported=_row(46.7, 42.3, 269))


def pale_size_5() -> Detection:
    """Pale size 5 in every stage, 46.8 box AP and 42.4 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"pale_size": 5}, reported=_row(46.8, 42.4, 283))


def pale_size_7() -> Detection:
    """Pale size 7 in every stage, 47.4 box AP and 42.7 mask AP; same as Pale-T."""
    return vary(mask_rcnn_pale_t(), model={"pale_size": 7}, reported=_row(47.4, 42.7, 306))


def pale_size_9() -> Detection:
    """Pale size 9 in every stage, 47.4 box AP and 42.6 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"pale_size": 9}, reported=_row(47.4, 42.6, 322))


def attention_axial() -> Detection:
    """Axial attention, 46.1 box AP and 41.5 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"attention": "axial"}, reported=_row(46.1, 41.5, 253))


def attention_cross() -> Detection:
    """Cross-shaped attention, 46.6 box AP and 42.2 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"attention": "cross"}, reported=_row(46.6, 42.2, 306))


def attention_vanilla() -> Detection:
    """Attention inside the whole pale, 47.1 box AP and 42.3 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"attention": "vanilla"}, reported=_row(47.1, 42.3, 668))


def attention_sequential() -> Detection:
    """Sequential row and column attention, 46.9 box AP and 42.2 mask AP."""
    model = {"attention": "sequential"}
    return vary(mask_rcnn_pale_t(), model=model, reported=_row(46.9, 42.2, 306))


def attention_parallel() -> Detection:
    """Parallel row and column attention, 47.4 box AP and 42.7 mask AP; same as Pale-T."""
    model = {"attention": "parallel"}
    return vary(mask_rcnn_pale_t(), model=model, reported=_row(47.4, 42.7, 306))


def position_none() -> Detection:
    """No position encoding, 46.2 box AP and 41.5 mask AP."""
    return vary(mask_rcnn_pale_t(), model={"position": "none"}, reported=_row(46.2, 41.5, 306))


def position_ape() -> Detection:
    """Absolute position encoding, 46.8 box AP, 42.2 mask AP; maps for 800x1280 give the paper's 49 M parameters."""
    return vary(
        mask_rcnn_pale_t(),
        model={"position": "ape", "options": {"img_size": [800, 1280]}},
        reported=_row(46.8, 42.2, 306, 49),
    )


def position_cpe() -> Detection:
    """Conditional position encoding, 47.4 box AP and 42.7 mask AP; same as Pale-T."""
    return vary(mask_rcnn_pale_t(), model={"position": "cpe"}, reported=_row(47.4, 42.7, 306))


def _table(
    box: float,
    box_50: float,
    box_75: float,
    mask: float,
    mask_50: float,
    mask_75: float,
    params_m: float,
    macs_g: float,
) -> Reported:
    return Reported(
        box_ap=box,
        box_ap50=box_50,
        box_ap75=box_75,
        mask_ap=mask,
        mask_ap50=mask_50,
        mask_ap75=mask_75,
        params_m=params_m,
        macs_g=macs_g,
    )


def _row(box: float, mask: float, macs_g: float, params_m: float = 41) -> Reported:
    return Reported(box_ap=box, mask_ap=mask, params_m=params_m, macs_g=macs_g)
