"""The runs of the transfer: models, starts, settings and seeds; the same recipe for every model.

Photos: for each start (from scratch, or from weights) there are three settings. Short runs on a part of the training
images choose one for each set, by the mean accuracy of the models on the held-out rest; the chosen setting then trains
every model on all training images. The test images are not read before that. From scratch has its own settings,
because those of fine-tuning would make it look worse than it is.

CamVid and COCO: the recipes of the package, unchanged for both starts, so nothing is chosen. CamVid is trained on its
training frames and tested on its test frames. Every figure is that after the last step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planned_runs import Run
from transfer_sets import SETS

from pale.core.settings import vary
from pale.data.transforms.images import Augment
from pale.data.transforms.mixing import Mix
from pale.recipes import camvid, small_boxes
from pale.recipes.kinds import Classification, Detection, Segmentation
from pale.recipes.schema import Optim, Recipe
from pale.tasks.classification.data import Data
from pale.tasks.classification.model import Model

Start = Literal["scratch", "weights"]
STARTS: tuple[Start, ...] = ("scratch", "weights")
PHOTO_SETS = tuple(each.name for each in SETS)
HELD_OUT = 0.2  # of the training images of each class, for choosing
TRIAL_LENGTH: dict[str, Any] = {"epochs": 20, "min_steps": 700}
BATCH = 64
AT_THE_END = 1_000_000  # epochs between evaluations: only one, at the end
SWIN = "swin_tiny_patch4_window7_224"
NARROW = ("pale_nano",)  # backbones with the narrow heads of the package's recipes for them
DROP_PATH = {"pale_nano": 0.05}  # others 0.1

MIXED = Mix(mixup=0.2, cutmix=1.0, probability=0.5)
UNMIXED = Mix(mixup=0, cutmix=0)


def _adamw(lr: float, **more: Any) -> Optim:
    return Optim(lr=lr, lr_batch=BATCH, min_lr=1e-6, weight_decay=0.05, **more)


def _muon(lr: float, weight_decay: float) -> Optim:
    return Optim(name="muon", lr=lr, lr_batch=BATCH, weight_decay=weight_decay)


# From scratch: `small_data.pale_t`, the same without mixing, and AdamW as Swin is usually trained.
SETTINGS: dict[Start, dict[str, dict[str, Any]]] = {
    "scratch": {
        "muon": {"optim": _muon(2e-3, 0.3), "mix": MIXED},
        "muon-unmixed": {"optim": _muon(2e-3, 0.3), "mix": UNMIXED},
        "adamw": {"optim": _adamw(1e-3), "mix": MIXED},
    },
    "weights": {
        "adamw": {"optim": _adamw(1e-3, layer_decay=0.8), "mix": UNMIXED},
        "adamw-low": {"optim": _adamw(3e-4, layer_decay=0.8), "mix": UNMIXED},
        "muon": {"optim": _muon(5e-4, 0.1), "mix": UNMIXED},
    },
}


@dataclass(frozen=True)
class Contender:
    """A model to compare.

    Attributes:
        label: in tables and file names.
        name: of the architecture, ours or timm's.
        weights: run folder or file to start from; None: from scratch only.
        digest: SHA-256 of the weights.
    """

    label: str
    name: str
    weights: Path | None = None
    digest: str | None = None

    @property
    def starts(self) -> tuple[Start, ...]:
        """From scratch, and from the weights if there are any."""
        return STARTS if self.weights is not None else ("scratch",)

    def about(self, part: str, start: Start, method: str, setting: str | None) -> dict[str, Any]:
        """Return the values by which tables group result files."""
        return {
            "set": part,
            "model": self.label,
            "architecture": self.name,
            "start": start,
            "method": method,
            "setting": setting,
            "weights": self.digest if start == "weights" else None,
        }

    def init(self, start: Start) -> str | None:
        """Return the path of the weights, if the start is from them."""
        return str(self.weights.absolute()) if start == "weights" and self.weights else None


def settings_of_model(name: str, size: int) -> dict[str, Any]:
    """Return the settings of a classifier at an image size."""
    # Windows of 7 in every stage, so that its tables have one shape at every size.
    options = {"img_size": size, "always_partition": True} if name == SWIN else {}
    return {"name": name, "drop_path": DROP_PATH.get(name, 0.1), "options": options}


def photos(
    data: Path, part: str, name: str, start: Start, setting: str, seed: int, size: int
) -> Classification:
    """Return the recipe of a classifier on a set of photos."""
    return Classification(
        name=f"transfer.{start}",
        model=Model(**settings_of_model(name, size)),
        data=Data(root=data / part, train="train", val="test", size=size, crop=0.95),
        augment=Augment(scale=(0.25, 1.0), auto=None, erase=0),
        batch=BATCH,
        epochs=60,
        min_steps=2000,
        warmup_steps=100,
        ema=0.995,
        eval_every=AT_THE_END,
        log_every=50,
        seed=seed,
        **SETTINGS[start][setting],
    )


def trials(data: Path, sets: Sequence[str], models: Sequence[Contender], size: int) -> list[Run]:
    """Return the runs that choose a setting, on held-out training images."""
    changes = {"data": {"hold_out": HELD_OUT, "hold_out_by": "name"}} | TRIAL_LENGTH
    return [
        Run(
            f"trials-{part}",
            f"{model.label}-{start}-{setting}",
            0,
            vary(photos(data, part, model.name, start, setting, 0, size), **changes),
            model.init(start),
            model.about(part, start, "trial", setting) | {"size": size},
        )
        for part in sets
        if part in PHOTO_SETS
        for model in models
        for start in model.starts
        for setting in SETTINGS[start]
    ]


def chosen_setting(results: Path, part: str, start: Start) -> str:
    """Return the setting with the highest mean on the held-out images, over the models that tried all of them.

    What has been chosen stays, so that every model has the same, even if trials of another model are added.
    """
    for path in sorted(results.glob(f"{part}-*-{start}-*.json")):
        row = json.loads(path.read_text())
        if (row["set"], row["start"], row["method"]) == (part, start, "fine-tuned"):
            return str(row["setting"])
    found: dict[str, dict[str, float]] = {}
    for path in sorted(results.glob(f"trials-{part}-*.json")):
        row = json.loads(path.read_text())
        if (row["set"], row["start"]) == (part, start):
            found.setdefault(row["model"], {})[row["setting"]] = row["last"]
    whole = [scores for scores in found.values() if scores.keys() == SETTINGS[start].keys()]
    if not whole:
        raise SystemExit(
            f"{results} has no model with all trials of {part} from {start}; run the step trials first, or copy its "
            "results there"
        )
    return max(SETTINGS[start], key=lambda name: statistics.mean(each[name] for each in whole))


def street_scenes(data: Path, name: str) -> Segmentation:
    """Return UperNet on CamVid, tested on its test frames."""
    base = camvid.upernet_nano() if name in NARROW else camvid.upernet_pale_t()
    return vary(
        base,
        model={"name": name},
        data={"root": data / "camvid", "val": "test"},
        eval_every=AT_THE_END,
    )


def objects(data: Path, name: str, part: str) -> Detection:
    """Return Mask R-CNN on COCO-mini, or without masks on the boxes of COCO."""
    base = small_boxes.mask_rcnn_nano() if name in NARROW else small_boxes.mask_rcnn_pale_t()
    layout = {"images": "{split}", "annotations": "annotations/instances_{split}.json"}
    splits = {"train": "train2017", "val": "val2017"}
    recipe = vary(
        base,
        model={"name": name},
        data={"root": data / part, **layout, **splits},
        optim={"schedule": "cosine"},
        eval_every=AT_THE_END,
        epochs=60,
    )
    if part == "coco-mini":
        return recipe
    sides = {"short": 256, "long": 448} if name in NARROW else {"short": 320, "long": 533}
    changes = {"augment": sides, "test": sides, "epochs": 12}
    return vary(recipe, model={"heads": {"masks": False}}, **changes)


def dense(data: Path, part: str, name: str) -> Recipe:
    """Return the recipe of a set with masks or boxes."""
    return street_scenes(data, name) if part == "camvid" else objects(data, name, part)


def runs(
    data: Path,
    results: Path,
    sets: Sequence[str],
    models: Sequence[Contender],
    seeds: int,
    size: int,
    fixed: Mapping[Start, str] | None = None,
) -> list[Run]:
    """Return the runs whose results count, by seeds, so that a first one of each is there early.

    Settings in `fixed` need no trials.
    """
    fixed = fixed or {}
    chosen = {
        (part, start): fixed.get(start) or chosen_setting(results, part, start)
        for part in sets
        if part in PHOTO_SETS
        for start in STARTS
        if any(start in model.starts for model in models)
    }
    found = []
    for seed in range(seeds):
        for part in sets:
            for model in models:
                for start in model.starts:
                    setting = chosen.get((part, start))
                    if setting is None:
                        recipe = vary(
                            dense(data, part, model.name), name=f"transfer.{part}", seed=seed
                        )
                    else:
                        recipe = photos(data, part, model.name, start, setting, seed, size)
                    about = model.about(part, start, "fine-tuned", setting)
                    if setting is not None:
                        about |= {"size": size, "fixed": start in fixed}
                    label = f"{model.label}-{start}"
                    found.append(Run(part, label, seed, recipe, model.init(start), about))
    return found
