"""ADE20K with UperNet, the paper's Table 4 and the ADE20K columns of its ablations.

From the paper: iterations, batch size, AdamW, learning rate, weight decay, warm-up, polynomial decay, drop path, crop,
scale, flip, photometric distortion, auxiliary loss. From mmsegmentation, which the paper used: power 1 and end 0 of the
decay, the base size 2048x512, crops in which one class fills at most 75 %, dropout 0.1 before the classifiers,
evaluation of the whole image at the size of its mask, no gradient clipping. The backbone must start from ImageNet
weights: --init FILE.
"""

from __future__ import annotations

from ..core.settings import vary
from ..tasks.segmentation.data import MaskData
from ..tasks.segmentation.model import SegmentationModel
from .kinds import Segmentation
from .schema import Reported

FILES = MaskData(
    images="images/{split}",
    masks="annotations/{split}",
    train="training",
    val="validation",
    classes="objectInfo150.txt",
    reduce_zero=True,
)


def upernet_pale_t() -> Segmentation:
    """UperNet on Pale-T, 50.4 mIoU in the paper, 51.2 with several scales."""
    return Segmentation(
        model=SegmentationModel(name="pale_tiny", drop_path=0.3),
        data=FILES,
        reported=Reported(miou=50.4, miou_multi=51.2, params_m=52, macs_g=996),
    )


def upernet_pale_s() -> Segmentation:
    """UperNet on Pale-S, 51.2 mIoU in the paper, 52.2 with several scales."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_small", "drop_path": 0.3},
        reported=Reported(miou=51.2, miou_multi=52.2, params_m=80, macs_g=1135),
    )


def upernet_pale_b() -> Segmentation:
    """UperNet on Pale-B, 52.2 mIoU in the paper, 53.0 with several scales."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_base", "drop_path": 0.5},
        reported=Reported(miou=52.2, miou_multi=53.0, params_m=119, macs_g=1311),
    )


def upernet_nano() -> Segmentation:
    """A narrow UperNet on our 2 M parameter model, for a CPU; not in the paper."""
    return vary(
        upernet_pale_t(),
        model={"name": "pale_nano", "drop_path": 0.05, "width": 64, "auxiliary": 32},
        reported=None,
    )


def pale_size_1() -> Segmentation:
    """Pale size 1 in every stage, 47.9 mIoU."""
    return vary(upernet_pale_t(), model={"pale_size": 1}, reported=_paper(47.9, 929))


def pale_size_3() -> Segmentation:
    """Pale size 3 in every stage, 49.4 mIoU."""
    return vary(upernet_pale_t(), model={"pale_size": 3}, reported=_paper(49.4, 950))


def pale_size_5() -> Segmentation:
    """Pale size 5 in every stage, 49.7 mIoU."""
    return vary(upernet_pale_t(), model={"pale_size": 5}, reported=_paper(49.7, 972))


def pale_size_7() -> Segmentation:
    """Pale size 7 in every stage, 50.4 mIoU; same as Pale-T."""
    return vary(upernet_pale_t(), model={"pale_size": 7}, reported=_paper(50.4, 996))


def pale_size_9() -> Segmentation:
    """Pale size 9 in every stage, 50.6 mIoU."""
    return vary(upernet_pale_t(), model={"pale_size": 9}, reported=_paper(50.6, 1021))


def attention_axial() -> Segmentation:
    """Axial attention, 47.9 mIoU."""
    return vary(upernet_pale_t(), model={"attention": "axial"}, reported=_paper(47.9, 929))


def attention_cross() -> Segmentation:
    """Cross-shaped attention, 49.0 mIoU."""
    return vary(upernet_pale_t(), model={"attention": "cross"}, reported=_paper(49.0, 996))


def attention_vanilla() -> Segmentation:
    """Attention inside the whole pale, 50.2 mIoU (table of the appendix; 50.3 in the main text)."""
    return vary(upernet_pale_t(), model={"attention": "vanilla"}, reported=_paper(50.2, 2677))


def attention_sequential() -> Segmentation:
    """Sequential row and column attention, 49.5 mIoU."""
    return vary(upernet_pale_t(), model={"attention": "sequential"}, reported=_paper(49.5, 996))


def attention_parallel() -> Segmentation:
    """Parallel row and column attention, 50.4 mIoU; same as Pale-T."""
    return vary(upernet_pale_t(), model={"attention": "parallel"}, reported=_paper(50.4, 996))


def position_none() -> Segmentation:
    """No position encoding, 48.3 mIoU."""
    return vary(upernet_pale_t(), model={"position": "none"}, reported=_paper(48.3, 996, 51))


def position_ape() -> Segmentation:
    """Absolute position encoding, 49.6 mIoU; with maps for 512x2048, which give the paper's 59 M parameters."""
    return vary(
        upernet_pale_t(),
        model={"position": "ape", "options": {"img_size": [512, 2048]}},
        reported=_paper(49.6, 996, 59),
    )


def position_cpe() -> Segmentation:
    """Conditional position encoding, 50.4 mIoU; same as Pale-T."""
    return vary(upernet_pale_t(), model={"position": "cpe"}, reported=_paper(50.4, 996))


def _paper(miou: float, macs_g: float, params_m: float = 52) -> Reported:
    return Reported(miou=miou, params_m=params_m, macs_g=macs_g)
