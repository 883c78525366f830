"""Teachers of token labels: any timm classifier whose features are a map, or a run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from PIL import Image
from timm.data import resolve_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.devices import choose_device
from ..core.progress import Track, no_progress
from ..data.loader import ImageDataset, collate, iterate_batches, usable_cores
from ..data.sources.images import ImageSource
from ..data.sources.token_labels import (
    TokenLabelManifest,
    TokenLabelWriter,
    hash_names,
    pack_labels,
    sample_names,
)
from ..data.transforms.images import channel_statistics, normalise, resize, to_tensor
from ..errors import SettingsError, WeightsError
from ..recipes.kinds import Classification
from ..weights.compare import load_into
from ..weights.read import load_header, load_weights
from .features import load_backbone
from .token_labels import TokenLabelSettings

TOP = 5  # classes kept at each position


@dataclass(frozen=True)
class Teacher:
    """A classifier with its preprocessing.

    Attributes:
        name: in the manifest.
        model: in evaluation mode.
        size: side of its square input.
        mean: mean of the pixels, 0 to 1, by channel.
        std: likewise.
        interpolation: interpolation for resizing.
    """

    name: str
    model: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    @property
    def digest(self) -> str:
        """SHA-256 of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images, uint8 (b, 3, h, w)."""
        return normalise(images, channel_statistics(self.mean, self.std, images.device))


def load_teacher(
    model: str, classes: Sequence[str], weights: Path | None = None, size: int | None = None
) -> Teacher:
    """Load a teacher for these classes.

    Args:
        model: a run's folder, a .safetensors file of a run, or the name of a timm model.
        classes: classes of the images; the teacher must have the same.
        weights: for a timm model: a weights file; by default timm's pretrained weights.
        size: size of its input, if it differs from that of its training.
    """
    if Path(model).exists():
        if weights is not None:
            raise SettingsError(f"{model} holds its own weights; leave --weights out")
        teacher = _from_run(Path(model), classes, size)
    else:
        teacher = _from_timm(model, classes, weights, size)
    with torch.no_grad():
        dense_logits(
            teacher.model, torch.zeros(1, 3, teacher.size, teacher.size)
        )  # raises if unsuitable
    return teacher


def _from_run(path: Path, classes: Sequence[str], size: int | None) -> Teacher:
    model, pipeline = load_backbone(path)
    known = load_header(path).about.get("classes")
    if list(known or ()) != list(classes):
        raise WeightsError(
            f"{path} has other classes ({len(known or ())}) than the data ({len(classes)}), or in another "
            "order; train the teacher on these classes"
        )
    return Teacher(
        str(path),
        model,
        size or pipeline.size,
        pipeline.mean,
        pipeline.std,
        pipeline.interpolation,
    )


def _from_timm(
    name: str, classes: Sequence[str], weights: Path | None, size: int | None
) -> Teacher:
    if name.partition(".")[0] not in timm.list_models():
        near = timm.list_models(f"*{name[:8]}*")[:3]
        raise SettingsError(
            f"--model must be a run or a timm model, got {name!r}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    try:
        cfg = timm.get_pretrained_cfg(name)
        fixed = cfg is not None and bool(cfg.fixed_input_size)
        arguments: dict[str, Any] = {"img_size": size} if size and fixed else {}
        if weights is not None:
            model = timm.create_model(name, num_classes=len(classes), **arguments)
        else:
            model = timm.create_model(name, pretrained=True, **arguments)
    except Exception as error:  # downloads fail in many ways, and timm checks little
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise WeightsError(
            f"timm cannot load {name} here ({reason}); give --weights FILE, or use another model"
        ) from error
    if weights is not None:
        load_into(model, load_weights(weights), weights, new_head=False)
    if (own := getattr(model, "num_classes", 0)) != len(classes):
        raise WeightsError(
            f"{name} has {own} classes, the data has {len(classes)}; use another teacher"
        )
    seen = resolve_data_config(model=model)
    return Teacher(
        name,
        model.eval(),
        size or seen["input_size"][-1],
        seen["mean"],
        seen["std"],
        seen["interpolation"],
    )


def dense_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of the classifier at each position of the last map, (b, classes, h, w).

    The head is applied to each position as if it were the whole map. If the head is an average and a linear layer, the
    mean over all positions is the output of the model.
    """
    features, head = (getattr(model, f"forward_{part}", None) for part in ("features", "head"))
    if features is None or head is None:
        raise WeightsError(
            _unsuitable_teacher(model, "it has no forward_features and forward_head")
        )
    x = features(images)
    kind, prefix = layout(model, x)
    if kind == "NCHW":
        x = x.permute(0, 2, 3, 1)
    elif kind == "NLC":
        side = math.isqrt(x.shape[1] - prefix)
        x = x[:, prefix:].unflatten(1, (side, side))
    b, h, w, c = x.shape
    if h * w < 2:
        raise WeightsError(_unsuitable_teacher(model, "its last map has a single position"))
    places = x.reshape(b * h * w, c)
    if kind == "NLC":  # repeated for all tokens that the head may select or average
        alone = places[:, None].expand(-1, prefix + 1, -1)
    else:
        alone = places[:, None, None] if kind == "NHWC" else places[:, :, None, None]
    logits = head(alone)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != (b * h * w,):
        raise WeightsError(
            _unsuitable_teacher(model, "its head returns no class scores for a single position")
        )
    return logits.view(b, h, w, -1).permute(0, 3, 1, 2)


def layout(model: nn.Module, x: object) -> tuple[str, int]:
    """Return NCHW, NHWC or NLC, and the number of tokens before those of the map."""
    c = getattr(model, "num_features", None)
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        raise WeightsError(_unsuitable_teacher(model, "its features are not a map"))
    if x.ndim == 4 and getattr(model, "output_fmt", None) in ("NCHW", "NHWC"):
        return str(model.output_fmt), 0
    if x.ndim == 4 and c in (x.shape[1], x.shape[3]):
        return "NCHW" if x.shape[1] == c else "NHWC", 0
    if x.ndim == 4 or x.shape[2] != c:
        raise WeightsError(
            _unsuitable_teacher(model, f"its features are {tuple(x.shape)}, expected {c} channels")
        )
    # Some models have a class token that they do not declare.
    for prefix in (int(getattr(model, "num_prefix_tokens", 0)), 1):
        if math.isqrt(n := x.shape[1] - prefix) ** 2 == n:
            return "NLC", prefix
    raise WeightsError(_unsuitable_teacher(model, f"its {x.shape[1]} tokens do not form a square"))


def _unsuitable_teacher(model: nn.Module, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot be a teacher of token labels: {reason}; use a convolutional network, "
        "a Swin, a ViT or a Pale Transformer"
    )


class SquareResize:
    """Resize the whole image to a square, without a crop: positions of the map are positions of the image."""

    def __init__(self, size: int, interpolation: str) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the image as uint8, (3, size, size)."""
        return to_tensor(resize(image, self.size, self.interpolation))


def make_token_labels(
    settings: TokenLabelSettings,
    data_settings: Mapping[str, object],
    report: Callable[[str], None] = lambda line: None,
    track: Track = no_progress,
) -> TokenLabelManifest:
    """Write the token labels of the training images.

    Args:
        settings: teacher and output.
        data_settings: data settings of a classification recipe by dotted name: {"data.root": DIR}.
        report: called with a line about each shard.
        track: shows the progress.
    """
    device = str(choose_device(settings.device))
    data = Classification().override(data_settings).data
    source = data.train_source(settings.seed)
    number, parts = settings.part.split("/")
    return write_token_labels(
        load_teacher(settings.model, source.classes, settings.weights, settings.size),
        source,
        settings.output,
        k=settings.k or min(TOP, len(source.classes)),
        shard=settings.shard,
        batch=settings.batch_size,
        workers=data.workers,
        device=device,
        part=(int(number), int(parts)),
        log=report,
        track=track,
    )


def write_token_labels(
    teacher: Teacher,
    source: ImageSource,
    output: Path,
    *,
    k: int = 5,
    shard: int = 4096,
    batch: int = 64,
    workers: int = 0,
    device: str = "cpu",
    part: tuple[int, int] = (0, 1),
    log: Callable[[str], None] = lambda line: None,
    track: Track = no_progress,
) -> TokenLabelManifest:
    """Write the token labels of a source, or resume an incomplete store.

    Args:
        teacher: computes the labels.
        source: the images.
        output: output folder.
        k: classes to keep at each position.
        shard: images per file.
        batch: images per batch.
        workers: reading processes.
        device: device of the teacher.
        part: (i, n): write every n-th shard from the i-th on, for n machines in parallel.
        log: called with a line about each shard.
        track: shows progress.
    """
    classes, names = tuple(source.classes), sample_names(source)
    if not 1 <= k <= len(classes):
        raise SettingsError(f"k must be from 1 to the {len(classes)} classes, got {k}")
    if not 0 <= part[0] < part[1]:
        raise SettingsError(f"part must be I/N with I from 0 to N - 1, got {part[0]}/{part[1]}")
    model = teacher.model.to(device).eval()
    with torch.inference_mode():
        sample = dense_logits(model, torch.zeros(1, 3, teacher.size, teacher.size, device=device))
    manifest = TokenLabelManifest(
        teacher.name,
        teacher.digest,
        teacher.size,
        (sample.shape[2], sample.shape[3]),
        k,
        classes,
        len(source),
        hash_names(names),
        shard,
    )
    writer = TokenLabelWriter(output, manifest, names)
    todo = [n for n in writer.missing() if n % part[1] == part[0]]
    data = ImageDataset(source, SquareResize(teacher.size, teacher.interpolation), seed=0)
    for number, records in _shards(teacher, data, manifest, todo, batch, workers, device, track):
        writer.write(number, records)
        left = len(writer.missing())
        log(f"shard {number + 1} of {manifest.shards} written, {left} to go")
    return manifest if writer.missing() else writer.finish(list(source.labels))


@torch.inference_mode()
def _shards(
    teacher: Teacher,
    data: ImageDataset,
    manifest: TokenLabelManifest,
    todo: Sequence[int],
    batch: int,
    workers: int,
    device: str,
    track: Track,
) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    # Batches do not cross shards: a resumed run computes the same batches, hence the same bits.
    pieces = [
        (n, [(0, i) for i in manifest.rows(n)[start : start + batch]])
        for n in todo
        for start in range(0, len(manifest.rows(n)), batch)
    ]
    loader = DataLoader(
        data,
        batch_sampler=[keys for _, keys in pieces],
        collate_fn=collate,
        num_workers=min(workers, usable_cores()),
    )
    records: list[NDArray[np.uint16]] = []
    done = 0
    reading = track(iterate_batches(loader), "labelling", len(pieces))
    for (number, keys), images in zip(pieces, reading, strict=True):
        logits = dense_logits(teacher.model, teacher.normalise(images["images"].to(device)))
        records.append(pack_labels(logits.float().softmax(1), manifest.k))
        done += len(keys)
        if done == len(manifest.rows(number)):
            yield number, np.concatenate(records)
            records, done = [], 0
