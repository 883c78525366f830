"""What a recipe can say."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, field_validator, model_validator

from ..data.instance_transforms import InstanceAugment
from ..data.mask_transforms import MaskAugment
from ..data.mixing import Mix
from ..data.transforms import Augment
from ..settings import Settings
from ..tasks import Task
from ..tasks.classification import ClassificationTask, Data, Model
from ..tasks.detection import DetectionModel, DetectionTask, InstanceData, Testing
from ..tasks.segmentation import MaskData, SegmentationModel, SegmentationTask
from ..tasks.segmentation.inference import MULTI_SCALES, Inference
from ..tasks.segmentation.loss import Loss
from ..tasks.token_labelling import TokenLabels

R = TypeVar("R", bound="Recipe")


class Optim(Settings):
    """AdamW and the learning rate. Not in the paper, from DeiT, Swin and CSWin: betas, clip, minimum, warm-up start."""

    # muon: matrices go by Muon, at AdamW's learning rates; ours, not the paper's.
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)  # at a batch of `lr_batch`
    lr_batch: int = Field(default=1024, ge=1)
    scale_lr: bool = True  # in proportion to the batch; false: `lr` as it stands
    min_lr: float = Field(default=1e-5, ge=0)  # scaled likewise
    warmup_lr: float = Field(default=1e-6, ge=0)  # scaled likewise
    weight_decay: float = Field(default=0.05, ge=0)  # not on norms, biases and APE
    layer_decay: float | None = Field(
        default=None, gt=0, le=1
    )  # factor from each block to the one before
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    # From the warm-up to the last step: cosine, a straight line, or steps down.
    schedule: Literal["cosine", "linear", "steps"] = "cosine"
    steps_at: tuple[float, ...] = (8, 11)  # steps: after these epochs
    step_factor: float = Field(default=0.1, gt=0, lt=1)  # steps: each multiplies the rate by this
    clip: float | None = Field(default=5.0, gt=0)  # bound of the gradient's norm


class Saving(Settings):
    """Checkpoints of a run."""

    every_minutes: float = Field(default=10.0, gt=0)
    every_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=2, ge=1)


class Reported(Settings):
    """The paper's figures."""

    top1: float | None = None
    miou: float | None = None
    miou_multi: float | None = None
    box_ap: float | None = None
    box_ap50: float | None = None
    box_ap75: float | None = None
    mask_ap: float | None = None
    mask_ap50: float | None = None
    mask_ap75: float | None = None
    params_m: float | None = None
    macs_g: float | None = None


# What the settings that a recipe requires are.
NEEDED = {"token_labels.store": ", a folder that pale token-labels make wrote"}


class Recipe(Settings):
    """What every task's recipe has; the loop reads this part.

    Attributes:
        batch: images a step, over all processes and accumulation.
        steps: how many, in place of `epochs`.
        warmup_steps: likewise, in place of `warmup_epochs`.
        accumulate: pieces in which a process computes its part of the batch.
        precision: auto is bf16 on CUDA and fp32 elsewhere.
        parallel: how several processes share the work: ddp holds the whole model on each, fsdp a shard of it, where it
            does not fit; a run can go on with the other.
        compile: torch.compile the model.
        cuda_graph: record a step's forward and backward pass and launch it as one (of a detector: those of backbone
            and pyramid); several processes average their gradients after it. auto: where that is known to work, which
            is with models of ours in one process, of detectors with `augment.crop`.
        ema: decay of the moving average of the weights, which is then what is evaluated and saved.
        on_nonfinite: stop at a loss or gradient that is no number, or skip the step.
        tensorboard: also write the log's figures for TensorBoard, into the run's folder.
        eval_every: epochs between evaluations; the last is always one.
        required: settings that must be given, by dotted name.
    """

    name: str = "unnamed"
    about: str = ""
    epochs: int = Field(default=300, ge=1)
    warmup_epochs: float = Field(default=20, ge=0)
    steps: int | None = Field(default=None, ge=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    batch: int = Field(default=1024, ge=1)
    accumulate: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    cuda_graph: bool | Literal["auto"] = "auto"
    ema: float | None = Field(default=None, gt=0, lt=1)
    on_nonfinite: Literal["stop", "skip"] = "stop"
    eval_every: int = Field(default=1, ge=1)
    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = False
    optim: Optim = Optim()
    saving: Saving = Saving()
    reported: Reported | None = None
    required: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _warmup_fits(self) -> Recipe:
        steps, warmup = self.steps, self.warmup_steps
        if steps is not None and warmup and warmup >= steps:
            raise ValueError(
                f"warmup_steps must be fewer than steps, got {warmup} and {steps}; set both"
            )
        if steps is None and warmup is None and 0 < self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs must be fewer than epochs, got {self.warmup_epochs:g} and {self.epochs}; "
                "set both"
            )
        return self

    @model_validator(mode="after")
    def _parallel_fits(self) -> Recipe:
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "parallel=fsdp works in bf16 and fp32, got precision=fp16; take bf16, which needs no scaler"
            )
        if self.parallel == "fsdp" and self.cuda_graph is True:
            raise ValueError(
                "cuda_graph=true records a step of a whole model, got parallel=fsdp; leave one out"
            )
        if self.parallel == "fsdp" and self.optim.name == "muon":
            raise ValueError(
                "optim.name=muon works on whole matrices, got parallel=fsdp; take adamw or parallel=ddp"
            )
        return self

    @field_validator("cuda_graph", mode="before")
    @classmethod
    def _graph(cls, value: object) -> object:
        word = str(value).lower()
        if word not in ("true", "false", "auto"):
            raise ValueError(f"true, false or auto, got {value!r}")
        return word

    @property
    def recordable(self) -> bool:
        """Whether such steps have been recorded on a GPU."""
        return True

    def graphs(self, cuda: bool, processes: int) -> bool:
        """Whether steps are CUDA graphs, on such a device in so many processes."""
        if self.cuda_graph != "auto":
            return cuda and self.cuda_graph
        model: Model = self.model  # type: ignore[attr-defined]
        known = model.name.startswith("pale_") and self.recordable and not model.checkpointing
        known &= model.options.get("backend") != "reference"  # which waits for the device
        return cuda and known and processes == 1 and not self.compile

    @abstractmethod
    def task(self, classes: Sequence[str] | None = None) -> Task:
        """The task that the recipe describes; with `classes`, for evaluation alone."""

    def require_share(self, processes: int) -> None:
        """An error where so many processes cannot share out a step's images as the task asks."""

    def started_from(self, path: Path) -> Self:
        """The recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.weights": str(path), "model.new_head": True})

    def _require(self) -> None:
        for name in self.required:
            value: Any = self
            for part in name.split("."):
                value = getattr(value, part)
            if value is None:
                hint = NEEDED.get(name, "")
                raise ValueError(f"the recipe {self.name} needs {name}; give --{name} VALUE{hint}")

    @property
    @abstractmethod
    def workers(self) -> int:
        """Reading processes for each training process."""

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        return self.optim.lr * self.lr_factor

    @property
    def lr_factor(self) -> float:
        """What the batch makes of the learning rates."""
        return self.batch / self.optim.lr_batch if self.optim.scale_lr else 1.0


class Classification(Recipe):
    """A classifier. The defaults are the paper's ImageNet recipe."""

    kind: Literal["classification"] = "classification"
    model: Model = Model()
    data: Data = Data()
    augment: Augment = Augment()
    mix: Mix = Mix()
    token_labels: TokenLabels = TokenLabels()

    @model_validator(mode="after")
    def _fits(self) -> Classification:
        self.require_share(1)
        return self

    def require_share(self, processes: int) -> None:
        """Mixing pairs images of one process."""
        pieces = processes * self.accumulate
        mixed = self.mix.on or (self.mix.tokens and self.mix.probability)
        if mixed and self.batch % pieces == 0 and self.batch // pieces % 2:
            raise ValueError(
                f"mixing needs an even number of images at a time on each process, got batch {self.batch} in {pieces} "
                "pieces (processes x accumulate); change batch or accumulate, or set mix.mixup, mix.cutmix and "
                "mix.tokens to 0"
            )

    def task(self, classes: Sequence[str] | None = None) -> ClassificationTask:
        """Data are looked for here."""
        if classes is None:
            self._require()
        return ClassificationTask(
            self.model, self.data, self.augment, self.mix, self.seed, classes, self.token_labels
        )

    @property
    def workers(self) -> int:
        """Reading processes for each training process."""
        return self.data.workers


class Segmentation(Recipe):
    """A class for every pixel. The defaults are the paper's ADE20K recipe.

    Attributes:
        test: how validation images are segmented, in training and by `pale eval`.
        multi: the same with several scales, which `pale eval` adds.
    """

    kind: Literal["segmentation"] = "segmentation"
    steps: int | None = Field(default=160_000, ge=1)
    warmup_steps: int | None = Field(default=1500, ge=0)
    batch: int = Field(default=16, ge=1)
    eval_every: int = Field(default=13, ge=1)
    optim: Optim = Optim(
        lr=6e-5,
        lr_batch=16,
        min_lr=0,
        warmup_lr=6e-11,
        weight_decay=0.01,
        schedule="linear",
        clip=None,
    )
    model: SegmentationModel = SegmentationModel()
    data: MaskData = MaskData()
    augment: MaskAugment = MaskAugment()
    loss: Loss = Loss()
    test: Inference = Inference()
    multi: Inference = Inference(scales=MULTI_SCALES, flip=True)

    @model_validator(mode="after")
    def _fits(self) -> Segmentation:
        if self.batch // self.accumulate < 2:
            raise ValueError(
                f"batch norm needs at least two images at a time, got batch {self.batch} in "
                f"{self.accumulate} pieces; raise batch or lower accumulate"
            )
        return self

    def task(self, classes: Sequence[str] | None = None) -> SegmentationTask:
        """Data are looked for and looked at here."""
        if classes is None:
            self._require()
        return SegmentationTask(
            self.model, self.data, self.augment, self.test, self.loss, self.seed, classes
        )

    def started_from(self, path: Path) -> Self:
        """The recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.init": str(path)})

    @property
    def workers(self) -> int:
        """Reading processes for each training process."""
        return self.data.workers


class Detection(Recipe):
    """Objects: boxes, classes, shapes. The defaults are the paper's COCO recipe, mmdetection's 1x.

    Attributes:
        test: how objects are looked for, in training and by `pale eval`.
    """

    kind: Literal["detection"] = "detection"
    epochs: int = Field(default=12, ge=1)
    warmup_steps: int | None = Field(default=500, ge=0)
    batch: int = Field(default=16, ge=1)
    optim: Optim = Optim(
        lr=1e-4,
        lr_batch=16,
        min_lr=0,
        warmup_lr=1e-7,
        weight_decay=0.001,
        schedule="steps",
        clip=None,
    )
    model: DetectionModel = DetectionModel()
    data: InstanceData = InstanceData()
    augment: InstanceAugment = InstanceAugment()
    test: Testing = Testing()

    @model_validator(mode="after")
    def _fits(self) -> Detection:
        last = max(self.optim.steps_at, default=0)
        if self.optim.schedule == "steps" and self.steps is None and last >= self.epochs:
            raise ValueError(
                f"the rate's last step must come before the end, got optim.steps_at up to {last:g} and "
                f"{self.epochs} epochs; set both"
            )
        if self.cuda_graph is True:
            self._require_recordable()
        if self.parallel == "fsdp":
            raise ValueError("detection works with parallel=ddp alone, got fsdp")
        return self

    def _require_recordable(self) -> None:
        rule = "cuda_graph=true records a detector's backbone and pyramid, "
        if self.augment.crop is None:
            raise ValueError(f"{rule}which needs images of one size; set augment.crop")
        if self.accumulate > 1:
            raise ValueError(f"{rule}for a batch in one piece, got accumulate={self.accumulate}")
        if self.compile:
            raise ValueError(f"{rule}which compile=true compiles; leave one out")

    @property
    def recordable(self) -> bool:
        """Images must be of one size, and gradients of a recorded part are not to be accumulated."""
        return self.augment.crop is not None and self.accumulate == 1

    def task(self, classes: Sequence[str] | None = None) -> DetectionTask:
        """Data are looked for here."""
        if classes is None:
            self._require()
        return DetectionTask(self.model, self.data, self.augment, self.test, self.seed, classes)

    def started_from(self, path: Path) -> Self:
        """The recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.init": str(path)})

    @property
    def workers(self) -> int:
        """Reading processes for each training process."""
        return self.data.workers


KINDS: dict[str, type[Recipe]] = {
    "classification": Classification,
    "segmentation": Segmentation,
    "detection": Detection,
}


def parse(values: Any, source: str) -> Recipe:
    """A recipe from plain values."""
    if not isinstance(values, dict):
        raise ValueError(f"{source} holds no recipe: expected names and values")
    kind = values.get("kind", "classification")
    if kind not in KINDS:
        raise ValueError(f"{source}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return KINDS[kind].parse(values)


def read(path: Path) -> Recipe:
    """A recipe from the YAML file that a run has written."""
    if not path.is_file():
        raise ValueError(f"there is no recipe file {path}")
    try:
        return parse(yaml.safe_load(path.read_text()), str(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def text(recipe: Recipe) -> str:
    """A recipe as YAML."""
    return yaml.safe_dump(recipe.plain(), sort_keys=False, width=100)
