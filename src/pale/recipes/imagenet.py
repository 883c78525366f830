"""ImageNet-1K, the paper's Table 2: 300 epochs from scratch at 224x224.

From the paper: epochs, batch size, AdamW, learning rate, weight decay, warm-up, cosine schedule, drop path. The other
values are those of DeiT, Swin and CSWin, which the paper follows; its source states that no EMA is used.
docs/recipes.md explains where we deviate, for example in colour jitter.

The starred rows add MixToken and the token labels of LV-ViT. As there, MixToken replaces Mixup and CutMix. The paper
changes nothing else; it states neither the weight of the dense loss, which is 0.5 here as in LV-ViT's paper (its code
has 1.0), nor the teacher; LV-ViT used NFNet-F6.
"""

from __future__ import annotations

from ..core.settings import vary
from ..tasks.classification.data import Data
from ..tasks.classification.model import Model
from .kinds import Classification
from .schema import Reported


def pale_t() -> Classification:
    """Pale-T, 83.4 % in the paper."""
    return Classification(
        model=Model(name="pale_tiny", drop_path=0.1),
        data=Data(workers=14),  # limited by the number of cores
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
