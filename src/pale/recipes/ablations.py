"""The ablations of the paper on ImageNet-1K: pale size, attention mode and position encoding, all on Pale-T."""

from __future__ import annotations

from ..core.settings import vary
from . import imagenet
from .kinds import Classification
from .schema import Reported


def pale_size_1() -> Classification:
    """Pale size 1 in every stage, 82.4 %."""
    return vary(imagenet.pale_t(), model={"pale_size": 1}, reported=_paper(82.4, 3.8))


def pale_size_3() -> Classification:
    """Pale size 3 in every stage, 82.9 %."""
    return vary(imagenet.pale_t(), model={"pale_size": 3}, reported=_paper(82.9, 4.1))


def pale_size_5() -> Classification:
    """Pale size 5 in every stage, 83.1 %."""
    return vary(imagenet.pale_t(), model={"pale_size": 5}, reported=_paper(83.1, 4.4))


def pale_size_7() -> Classification:
    """Pale size 7 in every stage, 83.4 %; same as Pale-T."""
    return vary(imagenet.pale_t(), model={"pale_size": 7}, reported=_paper(83.4, 4.2))


def pale_size_9() -> Classification:
    """Pale size 9 in every stage, 83.3 %."""
    return vary(imagenet.pale_t(), model={"pale_size": 9}, reported=_paper(83.3, 5.4))


def attention_axial() -> Classification:
    """Axial attention, 82.4 %."""
    return vary(imagenet.pale_t(), model={"attention": "axial"}, reported=_paper(82.4, 3.8))


def attention_cross() -> Classification:
    """Cross-shaped attention, 82.8 %."""
    return vary(imagenet.pale_t(), model={"attention": "cross"}, reported=_paper(82.8, 4.2))


def attention_vanilla() -> Classification:
    """Attention inside the whole pale, 83.4 %."""
    return vary(imagenet.pale_t(), model={"attention": "vanilla"}, reported=_paper(83.4, 5.4))


def attention_sequential() -> Classification:
    """Sequential row and column attention, 82.9 %."""
    return vary(imagenet.pale_t(), model={"attention": "sequential"}, reported=_paper(82.9, 4.2))


def attention_parallel() -> Classification:
    """Parallel row and column attention, 83.4 %; same as Pale-T."""
    return vary(imagenet.pale_t(), model={"attention": "parallel"}, reported=_paper(83.4, 4.2))


def position_none() -> Classification:
    """No position encoding, 82.5 %."""
    return vary(imagenet.pale_t(), model={"position": "none"}, reported=_paper(82.5, 4.2))


def position_ape() -> Classification:
    """Absolute position encoding, 82.9 %."""
    return vary(imagenet.pale_t(), model={"position": "ape"}, reported=_paper(82.9, 4.2))


def position_cpe() -> Classification:
    """Conditional position encoding, 83.4 %; same as Pale-T."""
    return vary(imagenet.pale_t(), model={"position": "cpe"}, reported=_paper(83.4, 4.2))


def _paper(top1: float, macs_g: float) -> Reported:
    return Reported(top1=top1, params_m=22, macs_g=macs_g)
