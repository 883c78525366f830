"""Recipes of the three tasks: their settings, and rules for settings without effect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..data.transforms.images import Augment
from ..data.transforms.instances import InstanceAugment
from ..data.transforms.masks import MaskAugment
from ..data.transforms.mixing import Mix
from ..errors import SettingsError
from ..tasks.classification.data import Data
from ..tasks.classification.loss import TokenLabels
from ..tasks.classification.mixture import MixtureTask
from ..tasks.classification.model import Model
from ..tasks.classification.task import ClassificationTask
from ..tasks.detection.data import InstanceData
from ..tasks.detection.inference import Testing
from ..tasks.detection.model import DetectionModel
from ..tasks.detection.task import DetectionTask
from ..tasks.segmentation.data import MaskData
from ..tasks.segmentation.loss import Loss
from ..tasks.segmentation.model import SegmentationModel
from ..tasks.segmentation.segmenter import MULTI_SCALES, Inference
from ..tasks.segmentation.task import SegmentationTask
from .effects import (
    COMMON,
    HOLD_OUT,
    LABEL_FILES,
    NOT_SCENES,
    ONLY_SCENES,
    WHOLE,
    InactiveSettings,
)
from .schema import BatchSize, Epochs, EvalEvery, Optim, OptimSettings, Recipe, Steps, WarmupSteps


class Classification(Recipe):
    """Image classification. The defaults are the paper's ImageNet recipe."""

    inactive_rules: ClassVar[tuple[InactiveSettings, ...]] = (
        *COMMON,
        InactiveSettings(
            ("augment.colour_jitter",),
            lambda r: r.augment.auto is not None and not r.augment.force_colour_jitter,
            "while augment.auto is on (as in timm, DeiT and Swin); also set augment.force_colour_jitter=true or "
            "augment.auto=null",
        ),
        InactiveSettings(
            ("augment.force_colour_jitter",),
            lambda r: r.augment.auto is None or r.augment.colour_jitter == 0,
            "unless augment.auto is on and augment.colour_jitter is not 0; remove it",
        ),
        InactiveSettings(
            ("mix.mixup", "mix.cutmix", "mix.tokens"),
            lambda r: r.mix.probability == 0,
            "while mix.probability is 0; remove one of them",
        ),
        InactiveSettings(
            ("mix.switch",),
            lambda r: not (r.mix.on and r.mix.mixup and r.mix.cutmix),
            "unless mix.mixup and mix.cutmix are both on; remove it",
        ),
        InactiveSettings(
            ("mix.probability",),
            lambda r: not (r.mix.mixup or r.mix.cutmix or r.mix.tokens),
            "while mix.mixup, mix.cutmix and mix.tokens are 0; set one of them, or remove this",
        ),
        InactiveSettings(
            ("token_labels.weight",),
            lambda r: r.token_labels.store is None and "token_labels.store" not in r.required,
            "without token_labels.store; set it, or remove this",
        ),
        InactiveSettings(
            ("data.samples", "data.val_samples"), lambda r: r.data.kind != "scenes", ONLY_SCENES
        ),
        InactiveSettings(
            (
                *("data.root", "data.train", "data.val", "data.hold_out", "data.balanced"),
                *("data.check", "data.unreadable"),
            ),
            lambda r: r.data.kind == "scenes" and r.data.mix is None,
            NOT_SCENES,
        ),
        *HOLD_OUT,
        InactiveSettings(
            ("data.balanced", "data.check", "data.unreadable"),
            lambda r: r.data.is_mixture,
            "with tags or data.mix; remove this",
        ),
        InactiveSettings(
            ("data.kind", "data.train", "data.val", "data.hold_out", "data.labels"),
            lambda r: r.data.mix is not None,
            "while data.mix lists the sources, each with its own; set it there, or remove data.mix",
        ),
        InactiveSettings(
            ("data.epoch",),
            lambda r: r.data.mix is None,
            "without data.mix; set it, or remove this",
        ),
    )

    kind: Literal["classification"] = Field(default="classification", description="task")
    model: Model = Field(default=Model(), description="network and its first weights")
    data: Data = Field(default=Data(), description="dataset")
    augment: Augment = Field(default=Augment(), description="augmentation of training images")
    mix: Mix = Field(default=Mix(), description="Mixup, CutMix, MixToken and label smoothing")
    token_labels: TokenLabels = Field(
        default=TokenLabels(), description="dense labels of a teacher, as in LV-ViT"
    )

    @model_validator(mode="after")
    def _check_settings(self) -> Classification:
        self.check_batch_split(1)
        return self

    def check_batch_split(self, processes: int) -> None:
        """Raise if a part of the batch has an odd number of images, which mixing cannot pair."""
        parts = processes * self.accumulate
        mixed = self.mix.on or (self.mix.tokens and self.mix.probability)
        if mixed and self.batch % parts == 0 and self.batch // parts % 2:
            raise SettingsError(
                f"mixing needs an even number of images at a time on each process, got batch {self.batch} in {parts} "
                "parts (processes x accumulate); change batch or accumulate, or set mix.mixup, mix.cutmix and "
                "mix.tokens to 0"
            )

    @property
    def task_class(self) -> type[ClassificationTask]:
        """Class of the task; a different one for several datasets or tags."""
        return MixtureTask if self.data.is_mixture else ClassificationTask

    def task(self, classes: Sequence[str] | None = None) -> ClassificationTask:
        """Build the task; without `classes` the dataset must exist."""
        if classes is None:
            self.check_required()
        return self.task_class(
            self.model, self.data, self.augment, self.mix, self.seed, classes, self.token_labels
        )


class Segmentation(Recipe):
    """Semantic segmentation. The defaults are the paper's ADE20K recipe."""

    inactive_rules: ClassVar[tuple[InactiveSettings, ...]] = (
        *COMMON,
        InactiveSettings(
            ("loss.auxiliary",),
            lambda r: r.model.auxiliary == 0,
            "while model.auxiliary is 0, which removes the auxiliary head; remove one of them",
        ),
        InactiveSettings(
            ("loss.ohem_keep",),
            lambda r: r.loss.ohem is None,
            "without loss.ohem; set it, or remove this",
        ),
        InactiveSettings(
            ("test.window", "test.stride", "test.windows"),
            lambda r: r.test.mode == "whole",
            WHOLE.format("test"),
        ),
        InactiveSettings(
            ("multi.window", "multi.stride", "multi.windows"),
            lambda r: r.multi.mode == "whole",
            WHOLE.format("multi"),
        ),
        InactiveSettings(
            ("data.size",),
            lambda r: r.data.kind != "scenes",
            "unless data.kind is scenes; set augment.short, augment.crop, test.short and multi.short instead",
        ),
        InactiveSettings(
            ("data.objects", "data.samples", "data.val_samples"),
            lambda r: r.data.kind != "scenes",
            ONLY_SCENES,
        ),
        InactiveSettings(
            (
                *("data.root", "data.images", "data.masks", "data.train", "data.val", "data.lists"),
                *("data.hold_out", "data.classes", "data.ignore", "data.reduce_zero"),
                *("data.mask_kind", "data.unlisted", "data.unreadable"),
            ),
            lambda r: r.data.kind == "scenes",
            NOT_SCENES,
        ),
        InactiveSettings(
            ("data.images", "data.masks", "data.lists"),
            lambda r: r.data.kind in ("yolo", "voc"),
            LABEL_FILES,
        ),
        InactiveSettings(
            (
                *("data.classes", "data.ignore", "data.reduce_zero", "data.mask_kind"),
                "data.unlisted",
            ),
            lambda r: r.data.kind == "yolo",
            "while data.kind is yolo, whose masks are drawn from polygons; remove this",
        ),
        InactiveSettings(
            ("data.classes",),
            lambda r: r.data.kind == "voc" and r.data.classes is None,
            "while data.kind is voc, which has a class list; set it only for other classes",
        ),
        *HOLD_OUT,
    )

    kind: Literal["segmentation"] = Field(default="segmentation", description="task")
    steps: Steps = 160_000
    warmup_steps: WarmupSteps = 1500
    batch: BatchSize = 16
    eval_every: EvalEvery = 13
    optim: OptimSettings = Optim(
        lr=6e-5,
        lr_batch=16,
        min_lr=0,
        warmup_lr=6e-11,
        weight_decay=0.01,
        schedule="linear",
        clip=None,
    )
    model: SegmentationModel = Field(
        default=SegmentationModel(), description="network and its first weights"
    )
    data: MaskData = Field(default=MaskData(), description="dataset")
    augment: MaskAugment = Field(
        default=MaskAugment(), description="augmentation of training images and masks"
    )
    loss: Loss = Field(default=Loss(), description="loss")
    test: Inference = Field(
        default=Inference(),
        description="inference on validation images, in training and by pale eval",
    )
    multi: Inference = Field(
        default=Inference(scales=MULTI_SCALES, flip=True),
        description="inference at several scales, a second evaluation of pale eval",
    )

    @model_validator(mode="after")
    def _check_settings(self) -> Segmentation:
        if self.batch // self.accumulate < 2:
            raise ValueError(
                f"batch norm needs at least two images at a time, got batch {self.batch} in "
                f"{self.accumulate} parts; raise batch or lower accumulate"
            )
        return self

    def task(self, classes: Sequence[str] | None = None) -> SegmentationTask:
        """Build the task; without `classes` the dataset must exist, and its masks are checked."""
        if classes is None:
            self.check_required()
        return SegmentationTask(
            self.model,
            self.data,
            self.augment,
            self.test,
            self.loss,
            self.seed,
            classes,
            self.multi,
        )

    def started_from(self, path: Path) -> Self:
        """Return the recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.init": str(path)})


class Detection(Recipe):
    """Object detection and instance segmentation. The defaults are the paper's COCO recipe (mmdetection's 1x)."""

    inactive_rules: ClassVar[tuple[InactiveSettings, ...]] = (
        *COMMON,
        InactiveSettings(
            ("model.heads.mask_width", "model.heads.mask_layers"),
            lambda r: not r.model.heads.masks,
            "while model.heads.masks is false; remove one of them",
        ),
        InactiveSettings(
            ("data.size",),
            lambda r: r.data.kind != "scenes",
            "unless data.kind is scenes; set augment.short, augment.long, test.short and test.long instead",
        ),
        InactiveSettings(
            ("data.objects", "data.shapes", "data.samples", "data.val_samples"),
            lambda r: r.data.kind != "scenes",
            ONLY_SCENES,
        ),
        InactiveSettings(
            (
                *("data.root", "data.images", "data.annotations", "data.train", "data.val"),
                *("data.hold_out", "data.keep_empty", "data.limit", "data.unreadable"),
            ),
            lambda r: r.data.kind == "scenes",
            NOT_SCENES,
        ),
        InactiveSettings(
            ("data.images", "data.annotations"),
            lambda r: r.data.kind == "pets",
            "while data.kind is pets, which has a fixed layout; set only data.root",
        ),
        InactiveSettings(
            ("data.images", "data.annotations"),
            lambda r: r.data.kind in ("yolo", "voc"),
            LABEL_FILES,
        ),
        *HOLD_OUT,
    )

    kind: Literal["detection"] = Field(default="detection", description="task")
    epochs: Epochs = 12
    warmup_steps: WarmupSteps = 500
    batch: BatchSize = 16
    optim: OptimSettings = Optim(
        lr=1e-4,
        lr_batch=16,
        min_lr=0,
        warmup_lr=1e-7,
        weight_decay=0.001,
        schedule="steps",
        clip=None,
    )
    model: DetectionModel = Field(
        default=DetectionModel(), description="network and its first weights"
    )
    data: InstanceData = Field(default=InstanceData(), description="dataset")
    augment: InstanceAugment = Field(
        default=InstanceAugment(), description="augmentation of training images and objects"
    )
    test: Testing = Field(
        default=Testing(),
        description="inference on validation images, in training and by pale eval",
    )

    @model_validator(mode="after")
    def _check_settings(self) -> Detection:
        last = max(self.optim.steps_at, default=0)
        if self.optim.schedule == "steps" and self.steps is None and last >= self.epochs:
            raise ValueError(
                "the learning rate must change before the end of the run, got optim.steps_at up to "
                f"{last:g} and {self.epochs} epochs; set both"
            )
        if self.cuda_graph is True:
            self._check_cuda_graph()
        if self.parallel == "fsdp":
            raise ValueError("detection supports parallel=ddp only, got fsdp; use ddp")
        return self

    def _check_cuda_graph(self) -> None:
        rule = "cuda_graph=true records backbone and feature pyramid of a detector"
        if self.augment.crop is None:
            raise ValueError(f"{rule}, which needs images of one size; set augment.crop")
        if self.accumulate > 1:
            raise ValueError(
                f"{rule}, which needs the batch in one part, got accumulate={self.accumulate}; set it to 1"
            )
        if self.compile:
            raise ValueError(f"{rule}, and compile=true compiles them; remove one of them")

    @property
    def supports_cuda_graph(self) -> bool:
        """Whether images have one size and gradients are not accumulated, which a recorded backbone requires."""
        return self.augment.crop is not None and self.accumulate == 1

    def task(self, classes: Sequence[str] | None = None) -> DetectionTask:
        """Build the task; without `classes` the dataset must exist."""
        if classes is None:
            self.check_required()
        return DetectionTask(self.model, self.data, self.augment, self.test, self.seed, classes)

    def started_from(self, path: Path) -> Self:
        """Return the recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.init": str(path)})


KINDS: dict[str, type[Recipe]] = {
    "classification": Classification,
    "segmentation": Segmentation,
    "detection": Detection,
}
