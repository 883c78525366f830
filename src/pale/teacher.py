"""Teachers of token labels: any classifier of timm's whose features are a map, or a run of our own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import resolve_data_config
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import weights as weight_files
from .data.images import Source
from .data.labelled import Labelled, batches, collate, cores
from .data.token_labels import Manifest, Writer, fingerprint, names_of, pack
from .data.transforms import resize, to_tensor
from .features import backbone
from .progress import Track, silent


@dataclass(frozen=True)
class Teacher:
    """A classifier and how it sees pictures.

    Attributes:
        name: what the manifest calls it.
        model: in evaluation mode.
        size: side of the square it is given.
        mean: of the pixels, 0 to 1, by channel.
        std: likewise.
        interpolation: of resizing.
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
        """Uint8 (b, 3, h, w) -> what the model takes."""
        mean, std = (
            torch.tensor(v, device=images.device).view(3, 1, 1) for v in (self.mean, self.std)
        )
        return (images.float() / 255 - mean) / std


def find(
    model: str, classes: Sequence[str], weights: Path | None = None, size: int | None = None
) -> Teacher:
    """The teacher of a name or a run, for these classes.

    Args:
        model: a run's folder, a .safetensors file of one, or a model of timm's.
        classes: of the pictures, which must be the teacher's.
        weights: for a model of timm's: a file; by default timm's own weights.
        size: other than the one it was trained at.
    """
    if Path(model).exists():
        if weights is not None:
            raise ValueError(f"{model} holds its own weights; leave --weights out")
        teacher = _run(Path(model), classes, size)
    else:
        teacher = _timm(model, classes, weights, size)
    with torch.no_grad():
        dense_logits(teacher.model, torch.zeros(1, 3, teacher.size, teacher.size))  # or an error
    return teacher


def _run(path: Path, classes: Sequence[str], size: int | None) -> Teacher:
    model, recipe = backbone(path)
    known = weight_files.load(path).about.get("classes")
    if list(known or ()) != list(classes):
        raise ValueError(
            f"{path} knows other classes ({len(known or ())}) than the data ({len(classes)}), or in another "
            "order; train the teacher on these classes"
        )
    cfg: dict[str, Any] = {
        "mean": timm.data.IMAGENET_DEFAULT_MEAN,
        "std": timm.data.IMAGENET_DEFAULT_STD,
    }
    interpolation = recipe.augment.interpolation
    if interpolation == "random":
        interpolation = "bicubic"
    return Teacher(str(path), model, size or recipe.data.size, **cfg, interpolation=interpolation)


def _timm(name: str, classes: Sequence[str], weights: Path | None, size: int | None) -> Teacher:
    if name.partition(".")[0] not in timm.list_models():
        near = timm.list_models(f"*{name[:8]}*")[:3]
        raise ValueError(
            f"--model must be a run, or a model of timm's, got {name!r}"
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
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"timm cannot give {name} here ({reason}); give --weights FILE, or take another model"
        ) from None
    if weights is not None:
        weight_files.put(model, weight_files.load(weights), weights, new_head=False)
    if (own := getattr(model, "num_classes", 0)) != len(classes):
        raise ValueError(
            f"{name} knows {own} classes, the data has {len(classes)}; take another teacher"
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
    """The classifier at each place of the last map, (b, classes, h, w).

    Each place is given to the head as if it were the whole map. Where the head is an average and a linear
    layer, the mean over the places is the model's own output.
    """
    features, head = (getattr(model, f"forward_{part}", None) for part in ("features", "head"))
    if features is None or head is None:
        raise ValueError(_cannot(model, "it does not tell features from head"))
    x = features(images)
    kind, prefix = layout(model, x)
    if kind == "NCHW":
        x = x.permute(0, 2, 3, 1)
    elif kind == "NLC":
        side = math.isqrt(x.shape[1] - prefix)
        x = x[:, prefix:].unflatten(1, (side, side))
    b, h, w, c = x.shape
    if h * w < 2:
        raise ValueError(_cannot(model, "its last map has one place alone"))
    places = x.reshape(b * h * w, c)
    if kind == "NLC":  # the token stands for all that the head may pick or average
        alone = places[:, None].expand(-1, prefix + 1, -1)
    else:
        alone = places[:, None, None] if kind == "NHWC" else places[:, :, None, None]
    logits = head(alone)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != (b * h * w,):
        raise ValueError(_cannot(model, "its head gives no class scores for a single place"))
    return logits.view(b, h, w, -1).permute(0, 3, 1, 2)


def layout(model: nn.Module, x: Any) -> tuple[str, int]:
    """NCHW, NHWC or NLC, and how many tokens stand before those of the map."""
    c = getattr(model, "num_features", None)
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        raise ValueError(_cannot(model, "its features are no map"))
    if x.ndim == 4 and getattr(model, "output_fmt", None) in ("NCHW", "NHWC"):
        return str(model.output_fmt), 0
    if x.ndim == 4 and c in (x.shape[1], x.shape[3]):
        return "NCHW" if x.shape[1] == c else "NHWC", 0
    if x.ndim == 4 or x.shape[2] != c:
        raise ValueError(
            _cannot(model, f"its features are {tuple(x.shape)}, expected {c} channels")
        )
    # Some models do not say that a class token comes first.
    for prefix in (int(getattr(model, "num_prefix_tokens", 0)), 1):
        if math.isqrt(n := x.shape[1] - prefix) ** 2 == n:
            return "NLC", prefix
    raise ValueError(_cannot(model, f"its {x.shape[1]} tokens are no square"))


def _cannot(model: nn.Module, reason: str) -> str:
    return (
        f"{type(model).__name__} cannot be a teacher of token labels: {reason}; take a convolutional network, "
        "a Swin, a ViT or one of ours"
    )


class Whole:
    """The whole picture on a square: a place of the map is a place of the picture, with no crop between."""

    def __init__(self, size: int, interpolation: str) -> None:
        self.size, self.interpolation = size, interpolation

    def __call__(self, image: Image.Image) -> Tensor:
        """(3, size, size), uint8."""
        return to_tensor(resize(image, self.size, self.interpolation))


def make(
    teacher: Teacher,
    source: Source,
    output: Path,
    *,
    k: int = 5,
    shard: int = 4096,
    batch: int = 64,
    workers: int = 0,
    device: str = "cpu",
    part: tuple[int, int] = (0, 1),
    tell: Callable[[str], None] = lambda line: None,
    track: Track = silent,
) -> Manifest:
    """Write the token labels of a source, or go on with a store that was begun.

    Args:
        teacher: whose labels.
        source: whose pictures.
        output: the store.
        k: classes to keep at each place.
        shard: pictures in a file.
        batch: pictures at a time.
        workers: processes that read them.
        device: where the teacher runs.
        part: (i, n): write every n-th shard from the i-th on, for n machines side by side.
        tell: takes a line about each shard.
        track: shows how far it is.
    """
    classes, names = tuple(source.classes), names_of(source)
    if not 1 <= k <= len(classes):
        raise ValueError(f"k must be from 1 to the {len(classes)} classes, got {k}")
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part must be I/N with I from 0 to N - 1, got {part[0]}/{part[1]}")
    model = teacher.model.to(device).eval()
    with torch.inference_mode():
        sample = dense_logits(model, torch.zeros(1, 3, teacher.size, teacher.size, device=device))
    manifest = Manifest(
        teacher.name,
        teacher.digest,
        teacher.size,
        (sample.shape[2], sample.shape[3]),
        k,
        classes,
        len(source),
        fingerprint(names),
        shard,
    )
    writer = Writer(output, manifest, names)
    todo = [n for n in writer.missing() if n % part[1] == part[0]]
    data = Labelled(source, Whole(teacher.size, teacher.interpolation), seed=0)
    for number, records in _shards(teacher, data, manifest, todo, batch, workers, device, track):
        writer.write(number, records)
        left = len(writer.missing())
        tell(f"shard {number + 1} of {manifest.shards} written, {left} to go")
    return manifest if writer.missing() else writer.finish(list(source.labels))


@torch.inference_mode()
def _shards(
    teacher: Teacher,
    data: Labelled,
    manifest: Manifest,
    todo: Sequence[int],
    batch: int,
    workers: int,
    device: str,
    track: Track,
) -> Iterator[tuple[int, Any]]:
    # Batches begin anew with each shard: going on after a kill sees the same ones, hence gives the same bits.
    pieces = [
        (n, [(0, i) for i in manifest.rows(n)[start : start + batch]])
        for n in todo
        for start in range(0, len(manifest.rows(n)), batch)
    ]
    loader = DataLoader(
        data,
        batch_sampler=[keys for _, keys in pieces],
        collate_fn=collate,
        num_workers=min(workers, cores()),
    )
    records: list[Any] = []
    done = 0
    reading = track(batches(loader), "labelling", len(pieces))
    for (number, keys), images in zip(pieces, reading, strict=True):
        logits = dense_logits(teacher.model, teacher.normalise(images["images"].to(device)))
        records.append(pack(logits.float().softmax(1), manifest.k))
        done += len(keys)
        if done == len(manifest.rows(number)):
            yield number, np.concatenate(records)
            records, done = [], 0
