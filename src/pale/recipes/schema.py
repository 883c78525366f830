"""Settings that the recipes of all tasks share.

The recipes of each task are in `kinds.py`; `files.py` reads and writes recipes as YAML.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..core.settings import Settings, dotted_names, find_value
from ..errors import SettingsError
from ..tasks import TASKS
from ..tasks.base import Task
from ..tasks.classification.model import Model
from .effects import COMMON, InactiveSettings, find_inactive, setting_names


class Optim(Settings):
    """Optimizer and learning rate.

    The paper does not give betas, clip, min_lr and warmup_lr; these are the values of DeiT, Swin and CSWin.
    """

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="optimizer; muon updates matrices with Muon and all other parameters with AdamW, at AdamW's "
        "learning rates (not in the paper)",
    )
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate at a batch of lr_batch")
    lr_batch: int = Field(default=1024, ge=1, description="batch size that lr refers to")
    scale_lr: bool = Field(
        default=True,
        description="scale the learning rates by batch / lr_batch; false: use them unchanged",
    )
    min_lr: float = Field(
        default=1e-5, ge=0, description="learning rate at the last step; scaled as lr is"
    )
    warmup_lr: float = Field(
        default=1e-6, ge=0, description="learning rate at the first warm-up step; scaled as lr is"
    )
    weight_decay: float = Field(
        default=0.05,
        ge=0,
        description="weight decay; norms, biases and absolute position embeddings are exempt",
    )
    layer_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="factor of the learning rate from each block to the block before it; null: 1",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="betas of AdamW")
    eps: float = Field(default=1e-8, gt=0, description="epsilon of AdamW")
    schedule: Literal["cosine", "linear", "steps"] = Field(
        default="cosine", description="learning rate schedule after the warm-up"
    )
    steps_at: tuple[float, ...] = Field(
        default=(8, 11), description="epochs after which schedule=steps lowers the learning rate"
    )
    step_factor: float = Field(
        default=0.1, gt=0, lt=1, description="factor of each change with schedule=steps"
    )
    clip: float | None = Field(
        default=5.0, gt=0, description="maximum gradient norm; null: no clipping"
    )


class Saving(Settings):
    """Checkpoints of a run."""

    every_minutes: float = Field(
        default=10.0, gt=0, description="maximum minutes between two checkpoints"
    )
    every_steps: int | None = Field(
        default=None, ge=1, description="maximum steps between two checkpoints; null: no limit"
    )
    keep: int = Field(default=2, ge=1, description="number of checkpoints to keep")
    background: bool = Field(
        default=True, description="write files while training continues, from a copy of the state"
    )
    patience_minutes: float = Field(
        default=10.0, ge=0, description="minutes for which writing may fail before the run stops"
    )


class Reported(Settings):
    """Results that the paper reports."""

    top1: float | None = Field(default=None, description="top-1 accuracy in percent")
    miou: float | None = Field(default=None, description="mIoU in percent at a single scale")
    miou_multi: float | None = Field(default=None, description="mIoU in percent at several scales")
    box_ap: float | None = Field(default=None, description="box AP in percent")
    box_ap50: float | None = Field(default=None, description="box AP at IoU 0.5")
    box_ap75: float | None = Field(default=None, description="box AP at IoU 0.75")
    mask_ap: float | None = Field(default=None, description="mask AP in percent")
    mask_ap50: float | None = Field(default=None, description="mask AP at IoU 0.5")
    mask_ap75: float | None = Field(default=None, description="mask AP at IoU 0.75")
    params_m: float | None = Field(default=None, description="parameters in millions")
    macs_g: float | None = Field(default=None, description="multiply-adds in billions")


EVALUATIONS = 12  # number of evaluations of a run that is fitted to its dataset
# How to obtain the value of a required setting.
REQUIRED_HINTS = {
    "token_labels.store": ", the output folder of pale token-labels make",
    "data.mix": ", a list of datasets or @FILE with one (docs/training.md)",
}


# Settings whose default depends on the task.
Epochs = Annotated[int, Field(ge=1, description="length of the run in epochs")]
Steps = Annotated[
    int | None, Field(ge=1, description="length of the run in steps; replaces epochs")
]
WarmupSteps = Annotated[
    int | None,
    Field(ge=0, description="length of the warm-up in steps; replaces warmup_epochs"),
]
BatchSize = Annotated[
    int, Field(ge=1, description="images per step, over all processes and accumulated parts")
]
EvalEvery = Annotated[
    int,
    Field(ge=1, description="epochs between evaluations; the end of the run is always one"),
]
OptimSettings = Annotated[Optim, Field(description="optimizer and learning rate")]


class Recipe(Settings):
    """Settings that all tasks share; the training loop reads only these."""

    if TYPE_CHECKING:  # each recipe class declares these, with its own types
        kind: str = ""  # the key in `TASKS`
        model: Model = Model()
        data: Any = None  # settings with `workers`
    # Settings that other settings switch off.
    inactive_rules: ClassVar[tuple[InactiveSettings, ...]] = COMMON

    name: str = Field(default="unnamed", description="name of the recipe")
    about: str = Field(default="", description="one-line description of the recipe")
    epochs: Epochs = 300
    warmup_epochs: float = Field(
        default=20, ge=0, description="length of the learning rate warm-up in epochs"
    )
    steps: Steps = None
    warmup_steps: WarmupSteps = None
    min_steps: int | None = Field(
        default=None,
        ge=1,
        description="fit the run to the dataset: add epochs up to this number of steps, use no batch larger than the "
        "dataset, and evaluate about 12 times; null: do not",
    )
    batch: BatchSize = 1024
    accumulate: int = Field(
        default=1,
        ge=1,
        description="number of parts in which each process computes its share of a batch, one after the other; more "
        "parts need less memory",
    )
    seed: int = Field(
        default=0, ge=0, description="seed of weights, sample order, augmentation and drop path"
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="compute type; auto: bf16 on CUDA, fp32 elsewhere"
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="ddp: each process holds the whole model; fsdp: each process holds a shard of it, for models that "
        "do not fit; a run can resume with the other one",
    )
    compile: bool = Field(default=False, description="compile the model with torch.compile")
    cuda_graph: bool | Literal["auto"] = Field(
        default="auto",
        description="record forward and backward pass as one CUDA graph (of a detector: backbone and feature pyramid); "
        "several processes then average their gradients after it; auto: with models of this package in one process, "
        "detectors only with augment.crop",
    )
    deterministic: bool = Field(
        default=False,
        description="use only deterministic algorithms, so that two runs on one machine are bit-equal, also on a GPU; "
        "slower; an operation without such an algorithm raises an error",
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of the moving average of the weights, which is then evaluated and saved; null: none",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="stop at a NaN or Inf loss or gradient, or skip the step"
    )
    eval_every: EvalEvery = 1
    log_every: int = Field(default=10, ge=1, description="steps between two log entries")
    tensorboard: bool = Field(
        default=False, description="also write the log for TensorBoard, in the run folder"
    )
    optim: OptimSettings = Optim()
    saving: Saving = Field(default=Saving(), description="checkpoints")
    reported: Reported | None = Field(default=None, description="results that the paper reports")
    required: tuple[str, ...] = Field(
        default=(), description="settings that must be given, by dotted name"
    )

    @model_validator(mode="after")
    def _check_warmup(self) -> Recipe:
        steps, warmup = self.steps, self.warmup_steps
        if steps is not None and warmup and warmup >= steps:
            raise ValueError(
                f"warmup_steps must be smaller than steps, got {warmup} and {steps}; set both"
            )
        if steps is None and warmup is None and 0 < self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs must be smaller than epochs, got {self.warmup_epochs:g} and {self.epochs}; "
                "set both"
            )
        return self

    @model_validator(mode="after")
    def _check_parallel(self) -> Recipe:
        if self.parallel == "fsdp" and self.precision == "fp16":
            raise ValueError(
                "parallel=fsdp supports bf16 and fp32, got precision=fp16; use bf16, which needs no loss scaling"
            )
        if self.parallel == "fsdp" and self.cuda_graph is True:
            raise ValueError(
                "cuda_graph=true needs the whole model in each process, got parallel=fsdp; remove one of them"
            )
        if self.parallel == "fsdp" and self.optim.name == "muon":
            raise ValueError(
                "optim.name=muon needs whole matrices, got parallel=fsdp; use adamw or parallel=ddp"
            )
        return self

    @model_validator(mode="after")
    def _check_deterministic(self) -> Recipe:
        if self.deterministic and self.compile:
            raise ValueError(
                "deterministic=true needs the same kernels in every run, got compile=true, whose compiler selects "
                "kernels by timing them; remove one of them"
            )
        return self

    @field_validator("cuda_graph", mode="before")
    @classmethod
    def _parse_cuda_graph(cls, value: object) -> object:
        word = str(value).lower()
        if word not in ("true", "false", "auto"):
            raise ValueError(f"true, false or auto, got {value!r}")
        return word

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Return `override(changes)` for changes by a user: one that would have no effect is an error."""
        recipe = self.override(changes)
        if found := find_inactive(recipe, setting_names(changes)):
            raise SettingsError("; ".join(found))
        return recipe

    def fitted(self, samples: int, parts: int) -> tuple[Self, list[str]]:
        """Return the recipe for a training set, with lines about what was changed; see `min_steps`.

        Args:
            samples: number of training samples.
            parts: number of equal parts of a batch.
        """
        if self.min_steps is None:
            return self, []
        changes: dict[str, int] = {}
        notes = []
        if self.batch > samples:
            changes["batch"] = max(samples // parts, 1) * parts
            notes.append(
                f"batch {changes['batch']} instead of {self.batch}: there are {samples} training images"
            )
        batch = changes.get("batch", self.batch)
        epochs = self.epochs if self.steps is None else -(-self.steps * batch // samples)
        needed = -(-self.min_steps * batch // samples)
        if self.steps is None and epochs < needed:
            changes["epochs"] = epochs = needed
            notes.append(
                f"{needed} epochs instead of {self.epochs}, for at least {self.min_steps} steps (min_steps)"
            )
        changes["eval_every"] = max(self.eval_every, -(-epochs // EVALUATIONS))
        return self.override(changes), notes

    @property
    def workers(self) -> int:
        """Data loading processes per training process."""
        return int(self.data.workers)

    @property
    def supports_cuda_graph(self) -> bool:
        """Whether CUDA graphs of such steps have been tested."""
        return True

    def uses_cuda_graph(self, cuda: bool, processes: int) -> bool:
        """Return whether steps run as CUDA graphs.

        Args:
            cuda: whether the run computes on a CUDA device.
            processes: number of processes.
        """
        if self.cuda_graph != "auto":
            return cuda and self.cuda_graph
        model = self.model
        known = (
            model.name.startswith("pale_") and self.supports_cuda_graph and not model.checkpointing
        )
        known &= model.options.get("backend") != "reference"  # which waits for the device
        return cuda and known and processes == 1 and not self.compile

    @property
    def task_class(self) -> type[Task]:
        """Class of the task, for facts that need no data."""
        return TASKS[self.kind]

    @abstractmethod
    def task(self, classes: Sequence[str] | None = None) -> Task:
        """Build the task; with `classes`, for evaluation only."""

    def check_batch_split(self, processes: int) -> None:
        """Raise if this number of processes cannot split a batch as the task requires."""

    def started_from(self, path: Path) -> Self:
        """Return the recipe with a backbone that starts from a classifier's weights."""
        return self.override({"model.weights": str(path), "model.new_head": True})

    def check_required(self) -> None:
        """Raise if a required setting is missing, unless another setting makes it unnecessary."""
        known = set(dotted_names(type(self)))
        for name in self.required:
            if name not in known:
                raise SettingsError(
                    f"required must list settings, got {name!r}; correct or remove it"
                )
            pointless = any(name in r.names and r.when(self) for r in self.inactive_rules)
            if find_value(self, name) is None and not pointless:
                hint = REQUIRED_HINTS.get(name, "")
                raise SettingsError(
                    f"the recipe {self.name} needs {name}; give --{name} VALUE{hint}"
                )

    @property
    def peak_lr(self) -> float:
        """Learning rate after the warm-up."""
        return self.optim.lr * self.lr_factor

    @property
    def lr_factor(self) -> float:
        """Factor by which the batch size scales all learning rates."""
        return self.batch / self.optim.lr_batch if self.optim.scale_lr else 1.0
