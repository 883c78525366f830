"""The runs of the evidence: recipes, models, seeds, and the predictions made before the runs.

Parts a and b follow arXiv 2112.13492 as its code runs it; `evidence_protocol.md` has every value and its source. Each
function below returns the runs of one part, from the folder of the data and the folder of the results so far.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planned_runs import Run

from pale.core.settings import vary
from pale.data.transforms.images import Augment
from pale.data.transforms.instances import InstanceAugment
from pale.data.transforms.masks import MaskAugment
from pale.data.transforms.mixing import Mix
from pale.recipes.camvid import upernet_pale_t as camvid
from pale.recipes.coco import mask_rcnn_pale_t as coco
from pale.recipes.kinds import Classification, Detection, Segmentation
from pale.recipes.schema import Optim, Reported
from pale.recipes.small_data import pale_t as small_data
from pale.tasks.classification.data import Data
from pale.tasks.classification.model import Model
from pale.tasks.detection.data import InstanceData
from pale.tasks.detection.inference import Testing
from pale.tasks.segmentation.data import MaskData

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
    "models": "Pale-T leads by at least 2 points over Swin-T and ConvNeXt-T; ResNet-50, strong at this size, is within "
    "2 points of Pale-T.",
    "cityscapes": "With UperNet, Pale-T leads Swin-T and ConvNeXt-T by 1 to 3 points of mIoU; with Mask R-CNN by 0.5 "
    "to 2 points of box AP.",
}


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


def calibration(root: Path, results: Path) -> list[Run]:
    """Return part a: their Swin by their recipe, and once with 100 passes to see what the 300 give."""
    swin = {"name": "swin_spt_lsa"}
    return [
        Run("calibration", "swin-300", 0, protocol(root, swin, 0)),
        Run("calibration", "swin-100", 0, protocol(root, swin, 0, passes=100)),
    ]


def published(root: Path, results: Path) -> list[Run]:
    """Return part b: Pale under their protocol, the 7 M one also with 100 passes beside `swin-100`."""
    seeds = [Run("protocol", "pale-7m", seed, protocol(root, PALE_7M, seed)) for seed in range(3)]
    return [
        Run("protocol", "pale-7m-100", 0, protocol(root, PALE_7M, 0, passes=100)),
        seeds[0],
        Run("protocol", "pale-t", 0, protocol(root, {"name": "pale_tiny"}, 0)),
        *seeds[1:],
    ]


def modes(root: Path, results: Path) -> list[Run]:
    """Return part c: the paper's attention modes by our recipe, paired by seed."""
    return [
        Run("modes", mode, seed, ours(root, seed, model={"attention": mode}))
        for seed in range(3)
        for mode in MODES
    ]


def sizes(root: Path, results: Path) -> list[Run]:
    """Return part e: pale sizes; 7 is the parallel run of part c."""
    return [
        Run("sizes", f"pale-size-{size}", seed, ours(root, seed, model={"pale_size": size}))
        for seed in range(2)
        for size in (1, 3, 5, 9)
    ]


def positions(root: Path, results: Path) -> list[Run]:
    """Return part e: position encodings; CPE is the parallel run of part c."""
    return [
        Run("positions", position, seed, ours(root, seed, model={"position": position}))
        for seed in range(2)
        for position in ("none", "ape")
    ]


# The four models of part d at 64 px, each with a first map of 32x32.
MODELS: dict[str, dict[str, Any]] = {
    "pale-t": {"name": "pale_tiny", "stem_stride": 2},
    "swin-t": {
        "name": "swin_tiny_patch4_window7_224",
        "options": {"img_size": 64, "patch_size": 2, "window_size": 8},
    },
    "convnext-t": {"name": "convnext_tiny", "options": {"patch_size": 2}},
    "resnet-50": {"name": "resnet50_without_pool"},
}
# Three settings for every model: ours, AdamW as Swin and ConvNeXt are usually trained, and ours with RandAugment.
TRIALS: dict[str, dict[str, Any]] = {
    "muon": {},
    "adamw": {"optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05}},
    "muon-randaug": {"augment": {"auto": "rand-m6-mstd0.5-inc1"}},
}
TRIAL_EPOCHS = 10  # of the runs that choose settings
HELD_OUT = 0.1  # of the training images, for choosing


def tuned(root: Path, model: str, trial: str, seed: int, **changes: Any) -> Classification:
    """Return our recipe for one of the four models with the settings of a trial."""
    given = MODELS[model]
    own = {"stem_stride": 4, "options": {}, "drop_path": 0.1} | given
    if model == "resnet-50":
        own["drop_path"] = 0.0  # as usual for this model
    return vary(vary(ours(root, seed, model=own), **TRIALS[trial]), **changes)


def trials(root: Path, results: Path) -> list[Run]:
    """Return part d, first half: every setting for every model, judged on held-out training images."""
    data = {"hold_out": HELD_OUT}
    short = {"epochs": TRIAL_EPOCHS, "warmup_epochs": 1, "eval_every": TRIAL_EPOCHS}
    return [
        Run("trials", f"{model}-{trial}", 0, tuned(root, model, trial, 0, data=data, **short))
        for model in MODELS
        for trial in TRIALS
    ]


def best_trial(results: Path, model: str) -> str:
    """Return the trial of a model with the highest accuracy on the held-out images."""
    found = {}
    for trial in TRIALS:
        path = results / f"trials-{model}-{trial}-0.json"
        if not path.exists():
            raise SystemExit(
                f"{path} is missing; run the part trials first, or copy its results there"
            )
        found[trial] = json.loads(path.read_text())["last"]
    return max(found, key=found.__getitem__)


def models(root: Path, results: Path) -> list[Run]:
    """Return part d, second half: each model with its best setting, on all training images."""
    chosen = {model: best_trial(results, model) for model in MODELS}
    return [
        Run("models", model, seed, tuned(root, model, chosen[model], seed))
        for seed in range(3)
        for model in MODELS
    ]


# Part f: standard stems (stride 4), so pre-training has 128 px, which gives the same maps as 64 px above.
DENSE = {
    "pale-t": "pale_tiny",
    "swin-t": "swin_tiny_patch4_window7_224",
    "convnext-t": "convnext_tiny",
}


def pretraining(root: Path, results: Path) -> list[Run]:
    """Return part f, first half: backbones trained on Tiny-ImageNet-200, enlarged to 128 px."""
    runs = []
    for label, name in DENSE.items():
        options = {"always_partition": True, "img_size": 128} if label == "swin-t" else {}
        model = {"name": name, "stem_stride": 4, "options": options}
        recipe = ours(root, 0, model=model, data={"size": 128})
        runs.append(Run("pretraining", label, 0, recipe))
    return runs


def upernet(root: Path, name: str, seed: int) -> Segmentation:
    """Return CamVid's recipe for 19 classes of Cityscapes at 512x256."""
    return vary(
        camvid(),
        name="evidence.upernet",
        model={"name": name},
        data=MaskData(
            root=root,
            images="images/{split}",
            masks="masks/{split}",
            classes="classes.txt",
            check=False,
        ),
        augment=MaskAugment(short=None, long=None, crop=(256, 512)),
        batch=16,
        steps=9000,
        warmup_steps=900,
        eval_every=20,
        seed=seed,
    )


def mask_rcnn(root: Path, name: str, seed: int) -> Detection:
    """Return the paper's Mask R-CNN recipe for 8 classes of Cityscapes at 512x256, with a cosine schedule."""
    return vary(
        coco(),
        name="evidence.mask_rcnn",
        model={"name": name},
        data=InstanceData(
            root=root,
            images="images/{split}",
            annotations="instances_{split}.json",
            train="train",
            val="val",
        ),
        augment=InstanceAugment(short=None, long=None, scale=(0.75, 1.5), crop=(256, 512)),
        test=Testing(short=256, long=512),
        optim={"lr": 2e-4, "schedule": "cosine", "clip": 5.0},
        batch=16,
        epochs=24,
        eval_every=24,
        reported=Reported(),
        required=(),
        seed=seed,
    )


def cityscapes(root: Path, results: Path) -> list[Run]:
    """Return part f, second half: UperNet and Mask R-CNN on each backbone, two seeds for Pale-T."""
    dense = root.parent / "cityscapes"
    return [
        Run(
            "cityscapes",
            f"{task}-{label}",
            seed,
            build(dense, name, seed),
            init=f"pretraining-{label}-0",
        )
        for seed in range(2)
        for task, build in (("upernet", upernet), ("mask-rcnn", mask_rcnn))
        for label, name in DENSE.items()
        if seed == 0 or label == "pale-t"
    ]


Plan = Callable[[Path, Path], list[Run]]
PARTS: dict[str, Plan] = {
    "calibration": calibration,
    "protocol": published,
    "modes": modes,
    "trials": trials,
    "models": models,
    "sizes": sizes,
    "positions": positions,
    "pretraining": pretraining,
    "cityscapes": cityscapes,
}
