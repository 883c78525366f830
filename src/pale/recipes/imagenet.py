"""ImageNet-1K, the paper's Table 2: 300 epochs from scratch at 224x224.

From the paper: epochs, batch, AdamW, learning rate, decay, warm-up, cosine, drop path. Every other value
is that of DeiT, Swin and CSWin, which it says it follows; a line of its source says: no EMA.
"""

from __future__ import annotations

from ..settings import vary
from ..tasks.classification import Model
from .schema import Classification, Reported


def pale_t() -> Classification:
    """Pale-T, 83.4 % in the paper."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.1),
        reported=Reported(top1=83.4, params_m=22, macs_g=4.2),
    )


def pale_s() -> Classification:
    """Pale-S, 84.3 % in the paper."""
    return vary(
        pale_t(),
        model={"name": "pale_small", "drop_path": 0.3},
        reported=Reported(top1=84.3, params_m=48, macs_g=9.0),
    )


def pale_b() -> Classification:
    """Pale-B, 84.9 % in the paper."""
    return vary(
        pale_t(),
        model={"name": "pale_base", "drop_path": 0.5},
        reported=Reported(top1=84.9, params_m=85, macs_g=15.6),
    )
