"""ImageNet-1K, the paper's Table 2: 300 epochs from scratch at 224x224.

From the paper: epochs, batch, AdamW, learning rate, decay, warm-up, cosine, drop path. Every other value
is that of DeiT, Swin and CSWin, which it says it follows; a line of its source says: no EMA.

The starred rows add MixToken and the token labels of LV-ViT, with the dense loss at 0.5. As there, MixToken
takes the place of Mixup and CutMix. The paper changes nothing else, and does not say which teacher it had;
LV-ViT had NFNet-F6.
"""

from __future__ import annotations

from ..settings import vary
from ..tasks.classification import Data, Model
from .schema import Classification, Reported


def pale_t() -> Classification:
    """Pale-T, 83.4 % in the paper."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.1),
        data=Data(workers=14),  # at most: never more than cores
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


def pale_t_star() -> Classification:
    """Pale-T with MixToken and token labels, 84.2 % in the paper."""
    return vary(
        pale_t(),
        mix={"mixup": 0, "cutmix": 0, "tokens": 1.0},
        required=("token_labels.store",),
        reported=Reported(top1=84.2, params_m=22, macs_g=4.2),
    )


def pale_s_star() -> Classification:
    """Pale-S with MixToken and token labels, 85.0 % in the paper."""
    return vary(
        pale_t_star(),
        model={"name": "pale_small", "drop_path": 0.3},
        reported=Reported(top1=85.0, params_m=48, macs_g=9.0),
    )


def pale_b_star() -> Classification:
    """Pale-B with MixToken and token labels, 85.8 % in the paper."""
    return vary(
        pale_t_star(),
        model={"name": "pale_base", "drop_path": 0.5},
        reported=Reported(top1=85.8, params_m=85, macs_g=15.6),
    )
