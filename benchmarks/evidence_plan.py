"""Which runs the evidence consists of: recipes, models, seeds, and the predictions made before the runs.

Parts a and b follow arXiv 2112.13492 as its code runs it; `evidence_protocol.md` has every value and its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pale.core.settings import vary
from pale.data.transforms.images import Augment
from pale.data.transforms.mixing import Mix
from pale.recipes.kinds import Classification
from pale.recipes.schema import Optim
from pale.recipes.small_data import pale_t as small_data
from pale.tasks.classification.data import Data
from pale.tasks.classification.model import Model

PADDED = 72  # 64 px and four on each side
SHARE = (64 / PADDED) ** 2  # of the area: a crop of exactly 64 px
MODES = ("parallel", "sequential", "vanilla", "cross", "axial")

# Written down before any of these runs; the commit that added a line froze it.
PREDICTIONS = {
    "protocol": "The 7.7 M Pale beats Swin (60.87) by at least 3 points and lands within 1 point of SL-Swin (64.95).",
    "modes": "Paper (ImageNet): parallel 83.4 = vanilla 83.4 > sequential 82.9 > cross 82.8 > axial 82.4. Maps of "
    "32, 16, 8 and 4 are small for a pale of size 7, so we expect smaller differences: all five within 1.5 points, "
    "axial last, parallel and vanilla equal within the seeds, cross behind parallel.",
    "sizes": "Paper: 7 (83.4) > 9 (83.3) > 5 (83.1) > 3 (82.9) > 1 (82.4). We expect 1 to be last by at least 0.5 "
    "points, and 5, 7 and 9 to be too close to call.",
    "positions": "Paper: CPE 83.4 > APE 82.9 > none 82.5. We expect the same order, with none at least 1 point "
    "behind CPE.",
}


@dataclass(frozen=True)
class Run:
    """One training run of a part."""

    part: str
    label: str
    seed: int
    recipe: Classification = field(repr=False)

    @property
    def name(self) -> str:
        """Folder of the run and stem of its result file."""
        return f"{self.part}-{self.label}-{self.seed}"


def protocol(root: Path, model: dict[str, Any], seed: int, passes: int = 300) -> Classification:
    """Return the recipe of arXiv 2112.13492, see the table above."""
    return Classification(
        name="evidence.protocol",
        model=Model(drop_path=0.1, **model),
        data=Data(root=root, train="train_padded", size=64, crop=1.0, on_device="pictures"),
        augment=Augment(
            scale=(SHARE, SHARE), ratio=(1, 1), auto="original", erase=0.25, colour_jitter=0
        ),
        mix=Mix(mixup=1.0, cutmix=1.0, probability=0.5, switch=0.5, smoothing=0.1),
        optim=Optim(
            lr=1e-3, lr_batch=128, min_lr=1e-6, warmup_lr=1e-6, weight_decay=0.05, clip=None
        ),
        batch=128,
        epochs=passes,
        warmup_epochs=passes / 10,
        eval_every=passes // 20,
        log_every=100,
        seed=seed,
    )


def ours(root: Path, seed: int, **changes: Any) -> Classification:
    """Return `small_data.pale_t` at 64 px with a stem of stride 2, 25 epochs."""
    base = vary(
        small_data(),
        name="evidence.ours",
        model={"stem_stride": 2},
        data={"root": root, "size": 64, "on_device": "pictures"},
        epochs=25,
        warmup_epochs=2,
        eval_every=25,
        log_every=50,
        seed=seed,
    )
    return vary(base, **changes)


# The skeleton of their Swin, with the paper's blocks and merging in it; heads must be even.
PALE_7M = {
    "name": "pale_tiny",
    "options": {
        "channels": [96, 192, 384],
        "heads": [4, 6, 12],
        "depths": [2, 6, 4],
        "mlp_ratio": [2, 2, 2],
    },
}


def calibration(root: Path) -> list[Run]:
    """Return part a: their Swin by their recipe, and once with 100 passes to see what the 300 give."""
    swin = {"name": "swin_spt_lsa"}
    return [
        Run("calibration", "swin-300", 0, protocol(root, swin, 0)),
        Run("calibration", "swin-100", 0, protocol(root, swin, 0, passes=100)),
    ]


def published(root: Path) -> list[Run]:
    """Return part b: Pale under their protocol, the 7 M one also with 100 passes beside `swin-100`."""
    seeds = [Run("protocol", "pale-7m", seed, protocol(root, PALE_7M, seed)) for seed in range(3)]
    return [
        Run("protocol", "pale-7m-100", 0, protocol(root, PALE_7M, 0, passes=100)),
        seeds[0],
        Run("protocol", "pale-t", 0, protocol(root, {"name": "pale_tiny"}, 0)),
        *seeds[1:],
    ]


def modes(root: Path) -> list[Run]:
    """Return part c: the paper's attention modes by our recipe, paired by seed."""
    return [
        Run("modes", mode, seed, ours(root, seed, model={"attention": mode}))
        for seed in range(3)
        for mode in MODES
    ]


def sizes(root: Path) -> list[Run]:
    """Return part e: pale sizes; 7 is the parallel run of part c."""
    return [
        Run("sizes", f"pale-size-{size}", seed, ours(root, seed, model={"pale_size": size}))
        for seed in range(2)
        for size in (1, 3, 5, 9)
    ]


def positions(root: Path) -> list[Run]:
    """Return part e: position encodings; CPE is the parallel run of part c."""
    return [
        Run("positions", position, seed, ours(root, seed, model={"position": position}))
        for seed in range(2)
        for position in ("none", "ape")
    ]


PARTS = {
    "calibration": calibration,
    "protocol": published,
    "modes": modes,
    "sizes": sizes,
    "positions": positions,
}
