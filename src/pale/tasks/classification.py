"""One class an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor, nn

from .. import weights as weight_files
from ..data import on_device
from ..data.augmenting import show
from ..data.images import Source, folder, hold_out, list_file, pets
from ..data.labelled import Labelled, SceneImages, collate
from ..data.mixing import Mix, Mixer, TokenMixer
from ..data.plans import Planner, Sketch
from ..data.scenes import Scenes
from ..data.shards import Shards
from ..data.token_labels import TokenLabelStore
from ..data.transforms import Augment, eval_transform, normalise, to_tensor, train_transform
from ..layers import TokenMix
from ..pale_transformer import VARIANTS, AttentionMode, PaleConfig, PaleTransformer, Position
from ..progress import bar
from ..settings import Settings
from .token_labelling import TokenLabels, blocks, dense_targets

VAL_SEED = 2**31  # scenes of validation: other ones than those of any training seed


class Model(Settings):
    """Which network, and what it starts from."""

    name: str = "pale_tiny"  # or any classifier of timm's
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    attention: AttentionMode = "parallel"
    position: Position = "cpe"
    pale_size: int | tuple[int, ...] | None = None
    stem_stride: Literal[4, 2, 1] = 4
    checkpointing: bool = False  # compute blocks again in the backward pass: less memory, more time
    weights: Path | None = None  # a run, a .safetensors file, or a foreign .pth
    new_head: bool = False  # take the backbone of `weights` and leave its classifier
    options: dict[str, Any] = Field(
        default_factory=dict
    )  # further arguments of the model, by timm's names

    @model_validator(mode="after")
    def _pale_alone(self) -> Model:
        given = [
            name
            for name in ("attention", "position", "pale_size", "stem_stride")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if given and not self.name.startswith("pale_"):
            raise ValueError(
                f"{', '.join(given)} belongs to {', '.join(VARIANTS)} alone, not to {self.name}; "
                "arguments of other models go into model.options"
            )
        return self

    @model_validator(mode="after")
    def _architecture(self) -> Model:
        if self.name in VARIANTS:
            own = ("attention", "position", "pale_size", "stem_stride")
            known = {field.name for field in fields(PaleConfig)} & self.options.keys()
            given = {name: getattr(self, name) for name in own}
            replace(
                VARIANTS[self.name], **given | {k: self.options[k] for k in known}
            )  # or an error
        return self

    def build(self, classes: int, size: int) -> nn.Module:
        """The model, with its weights loaded where some are named."""
        if self.name not in timm.list_models():
            near = timm.list_models(f"*{self.name[:8]}*")[:3]
            raise ValueError(
                f"model.name must be one of {', '.join(VARIANTS)} or a model of timm's, got {self.name!r}"
                + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        arguments: dict[str, Any] = {"num_classes": classes}
        if self.drop_path:
            arguments["drop_path_rate"] = self.drop_path
        if self.name in VARIANTS:
            arguments |= {
                "attention": self.attention,
                "position": self.position,
                "pale_size": self.pale_size,
                "stem_stride": self.stem_stride,
                "img_size": size,
            }
        try:
            model: nn.Module = timm.create_model(self.name, **(arguments | self.options))
        except TypeError as error:
            if not self.options:
                raise
            raise ValueError(
                f"model.options must be arguments of {self.name}, got {self.options} ({error}); correct or remove them"
            ) from None
        if self.checkpointing:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        if self.weights is not None:
            weight_files.put(model, weight_files.load(self.weights), self.weights, self.new_head)
        return model


class Data(Settings):
    """Which pictures, and how large."""

    kind: Literal["folder", "list", "shards", "pets", "scenes"] = "folder"
    root: Path | None = None  # but for scenes: where the pictures lie
    # folder: root/train/<class>/<picture>; list: the list file, under root; shards: root/train-*.tar; pets: the breeds
    # of Oxford-IIIT Pet, root/annotations/train.txt
    train: str = "train"
    val: str = "val"
    hold_out: float = Field(default=0.0, ge=0, lt=1)  # validate on this share of the training set
    size: int = Field(default=224, ge=16)
    crop: float = Field(
        default=0.875, gt=0, le=1
    )  # evaluation: short side size / crop, centre size
    samples: int = Field(default=4096, ge=1)  # scenes: how many to train on
    val_samples: int = Field(default=1024, ge=1)
    workers: int = Field(default=4, ge=0)  # processes that read pictures, for each training process
    # What the training device does beside training: decode JPEG files and augment them, or keep all pictures, decoded
    # once, and augment them. auto: decoding on a GPU that can, else nothing.
    on_device: Literal["auto", "nothing", "decoding", "pictures"] = "auto"

    def train_source(self, seed: int) -> Source:
        """Training pictures."""
        if self.kind == "scenes":
            return SceneImages(Scenes(self.samples, self.size, seed))
        train = self._source(self.train, None)
        return hold_out(train, self.hold_out, seed)[0] if self.hold_out else train

    def val_source(self, seed: int, classes: Sequence[str]) -> Source:
        """Validation pictures, numbered as the training set's classes."""
        if self.kind == "scenes":
            return SceneImages(Scenes(self.val_samples, self.size, VAL_SEED))
        if self.hold_out:
            return hold_out(self._source(self.train, classes), self.hold_out, seed)[1]
        return self._source(self.val, classes)

    def _source(self, name: str, classes: Sequence[str] | None) -> Source:
        if self.root is None:
            raise ValueError(
                f"data.root is not set; give the folder that holds {self.train} and {self.val}: "
                "--data.root DIR"
            )
        if self.kind == "folder":
            return folder(self.root / name, classes)
        if self.kind == "shards":
            return Shards(self.root, name, classes)
        if self.kind == "pets":
            return pets(self.root, name, classes)
        return list_file(self.root / name, self.root, classes)


class ClassificationTask:
    """The task of the recipes in `recipes.imagenet` and its like."""

    best = "top1"

    def __init__(
        self,
        model: Model,
        data: Data,
        augment: Augment,
        mix: Mix,
        seed: int,
        classes: Sequence[str] | None = None,
        token_labels: TokenLabels | None = None,
    ) -> None:
        """Find the data.

        Args:
            model: the network.
            data: the pictures.
            augment: what training does to them.
            mix: how training mixes them.
            seed: of every draw.
            classes: for evaluation alone: the classes that the weights know; no training set is read.
            token_labels: dense labels, and how much they count.
        """
        self.settings, self.data, self.augment, self.mix = model, data, augment, mix
        self.seed = seed
        self.train_source: Source | None = None
        if classes is None:
            self.train_source = data.train_source(seed)
            classes = self.train_source.classes
        self.classes = list(classes)
        self.val_source = data.val_source(seed, self.classes)
        self.mixer = Mixer(mix, len(self.classes), seed)
        self.token_mixer = TokenMixer(mix, len(self.classes), seed)
        self.token_labels = token_labels or TokenLabels()
        self.store: TokenLabelStore | None = None
        # What the model's first stage asks in training; none: it gives class logits alone.
        self.token_mix: TokenMix | None = None
        self.maps: list[tuple[int, int]] = []
        self.pictures: on_device.Pictures | None = None  # where data.on_device keeps them
        if self.train_source is not None and (mix.tokens or self.token_labels.store is not None):
            self._begin_tokens(self.train_source)

    def _begin_tokens(self, source: Source) -> None:
        """Open the store, and check what MixToken and token labels need."""
        self.token_mix = TokenMix()
        if self.settings.name not in VARIANTS:
            raise ValueError(
                f"MixToken and token labels need one of {', '.join(VARIANTS)}, got {self.settings.name}; "
                "set mix.tokens to 0 and token_labels.store to null for other models"
            )
        if self.token_labels.store is None:
            return
        if self.mix.on:
            raise ValueError(
                f"token labels go with MixToken alone, got mix.mixup={self.mix.mixup:g} and "
                f"mix.cutmix={self.mix.cutmix:g}; set both to 0, and mix.tokens to 1 for MixToken"
            )
        if (self.augment.auto or "").startswith("augmix"):
            raise ValueError(
                "token labels cannot follow AugMix, which lays several moved pictures over each other; "
                f"use RandAugment or AutoAugment, got augment.auto={self.augment.auto!r}"
            )
        self.store = TokenLabelStore(self.token_labels.store, source)

    def model(self) -> nn.Module:
        """The network."""
        model = self.settings.build(len(self.classes), self.data.size)
        if self.token_mix is not None:
            assert isinstance(model, PaleTransformer)
            model.token_mix = self.token_mix
            self.maps = model.config.maps(self.data.size, self.data.size)
        return model

    def train_data(self, device: torch.device) -> Labelled | on_device.Planned:
        """Training pictures, augmented, with their token labels where there is a store."""
        assert self.train_source is not None
        source, labels = self.train_source, self.store.labels if self.store is not None else None
        if (planner := self._planner(device)) is not None:
            if self.data.on_device == "pictures":
                self.pictures = on_device.Pictures(source, track=bar)
            sizes = None if self.pictures is None else self.pictures.sizes
            return on_device.Planned(source, planner, self.seed, sizes, labels)
        return Labelled(source, train_transform(self.data.size, self.augment), self.seed, labels)

    def _planner(self, device: torch.device) -> Planner | None:
        """What plans the pictures that the device makes; none: workers make them."""
        assert self.train_source is not None
        work = self.data.on_device
        if work == "nothing" or (
            work == "auto" and not on_device.decodes(self.train_source, device)
        ):
            return None
        try:
            return Planner(self.data.size, self.augment)
        except ValueError:  # an augmentation that workers alone do
            if work != "auto":
                raise
            return None

    def val_data(self) -> Labelled:
        """Validation pictures: resized, centre."""
        transform = eval_transform(self.data.size, self.data.crop, self.augment.interpolation)
        return Labelled(self.val_source, transform, self.seed)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Images (or plans for them), labels, keys."""
        planned = isinstance(samples[0][0], Sketch)
        return on_device.collate(samples) if planned else collate(samples)

    def fetched(self, batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """A batch with its files decoded, so that what is wrong with one is known before a step begins."""
        if "files" not in batch:
            return batch
        source, samples = self.train_source, batch["keys"][:, 1].tolist()
        assert source is not None
        files: on_device.Encoded = batch["files"]
        pixels = files.decode(device, lambda i: to_tensor(source.image(samples[i])))
        return {name: value for name, value in batch.items() if name != "files"} | {
            "pixels": pixels
        }

    def prepare(self, batch: dict[str, Any], step: int | None) -> dict[str, Any]:
        """Normalised images; in training mixed, with soft labels as "targets".

        With MixToken the images stay as they are, and the model is told what to mix. The labels of its
        tokens are mixed likewise, as "token_targets"; the reference puts the outputs back in place of that,
        which is the same sum.
        """
        if (plan := batch.pop("plan", None)) is not None:
            pixels = batch.pop("pixels", None) or self._kept(plan.ints.device)
            batch["images"] = show(pixels, plan, self.data.size)
        images = normalise(batch["images"])
        if step is None:
            return batch | {"images": images}
        if self.token_mix is not None:
            return batch | {"images": images} | self._prepare_tokens(batch, step)
        images, targets = self.mixer(images, batch["labels"], step)
        return batch | {"images": images, "targets": targets}

    def _kept(self, device: torch.device) -> on_device.Pixels:
        assert self.pictures is not None
        return self.pictures.on(device)

    def _prepare_tokens(self, batch: dict[str, Any], step: int) -> dict[str, Any]:
        assert self.token_mix is not None
        labels: Tensor = batch["labels"]
        first, last = self.maps[0], self.maps[-1]
        cells = self.token_mixer.cells(last, step)
        prepared = {"targets": self.token_mixer.targets(labels, cells)}
        cells = cells.to(labels.device)
        self.token_mix.set(blocks(cells, first, 2 ** (len(self.maps) - 1)))
        if self.store is not None:
            n, smoothing = len(self.classes), self.mix.smoothing
            dense = dense_targets(
                batch["token_scores"], batch["token_classes"], batch["places"], last, n
            )
            dense = (1 - smoothing) * dense + smoothing / n
            prepared["token_targets"] = torch.where(cells[..., None], dense.flip(0), dense)
        return prepared

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Cross-entropy with the soft labels; with token labels plus `weight` times that of the tokens."""
        if self.token_mix is None:
            return F.cross_entropy(model(batch["images"]).float(), batch["targets"])
        logits, dense = model(batch["images"])
        loss = F.cross_entropy(logits.float(), batch["targets"])
        if self.store is None:
            return loss
        tokens = F.cross_entropy(dense.float().flatten(0, 2), batch["token_targets"].flatten(0, 2))
        return loss + self.token_labels.weight * tokens

    def metric(self) -> TopK:
        """Top-1, top-5, loss."""
        return TopK(self.classes)

    def val_picture(self, index: int) -> Image.Image:
        """The picture as it was before any transform."""
        return self.val_source.image(index)

    def sample_name(self, index: int) -> str:
        """The file."""
        assert self.train_source is not None
        return self.train_source.name(index)


class TopK:
    """Top-1 and top-5 accuracy and the loss, with the confusion matrix and the confident mistakes for reports."""

    MISTAKES = 24

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.classes = names, len(names)
        self.sums: Tensor | None = None  # images, top-1, top-5, loss
        self.confusion: Tensor | None = None  # [label, guess]
        self.mistakes: list[tuple[float, int, int, int]] = []  # loss, sample, label, guess
        self.total_confusion: Tensor = torch.zeros(0)
        self.worst: list[tuple[float, int, int, int]] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Take in one batch."""
        labels: Tensor = batch["labels"]
        logits = model(batch["images"]).float()
        loss = F.cross_entropy(logits, labels, reduction="none")
        guesses = logits.topk(min(5, self.classes)).indices
        hits = guesses == labels[:, None]
        sums = torch.stack(
            [
                torch.ones_like(loss).sum(),
                hits[:, 0].float().sum(),
                hits.any(1).float().sum(),
                loss.sum(),
            ]
        ).double()
        cells = (labels * self.classes + guesses[:, 0]).bincount(minlength=self.classes**2)
        self.sums = sums if self.sums is None else self.sums + sums
        self.confusion = cells if self.confusion is None else self.confusion + cells
        wrong = (~hits[:, 0]).nonzero()[:, 0]
        rows = zip(
            loss[wrong].tolist(),
            batch["keys"][wrong.cpu(), 1].tolist(),
            labels[wrong].tolist(),
            guesses[wrong, 0].tolist(),
            strict=True,
        )
        self.mistakes = sorted([*self.mistakes, *rows], reverse=True)[: self.MISTAKES]

    def state(self) -> Any:
        """Sums, confusion, mistakes."""
        if self.sums is None or self.confusion is None:
            return torch.zeros(4).double(), torch.zeros(self.classes**2).long(), []
        return self.sums.cpu(), self.confusion.cpu(), self.mistakes

    def merge(self, states: Sequence[Any]) -> dict[str, float]:
        """Figures over all processes."""
        images, top1, top5, loss = sum(sums for sums, _, _ in states).tolist()
        confusion: Tensor = sum(cells for _, cells, _ in states)
        self.total_confusion = confusion.view(self.classes, self.classes)
        self.worst = sorted((m for _, _, ms in states for m in ms), reverse=True)[: self.MISTAKES]
        return {
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "loss": loss / images,
            "images": images,
        }

    def details(self) -> dict[str, Any]:
        """Class names, confusion [label][guess], mistakes (loss, sample, label, guess), worst first."""
        return {
            "classes": list(self.names),
            "confusion": self.total_confusion.tolist(),
            "mistakes": self.worst,
        }
