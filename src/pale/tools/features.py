"""Embeddings of images by a frozen backbone, and a linear classifier fitted on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..core.devices import choose_device
from ..core.plain_json import parse_json
from ..core.progress import Track, no_progress
from ..data.loader import ImageDataset, collate, iterate_batches
from ..data.sources.images import ImageSource, read_folder
from ..data.transforms.images import eval_transform, normalise
from ..errors import DataError, WeightsError
from ..recipes.stored import stored_recipe, without_start
from ..tasks.building import build_for
from ..tasks.square_pipeline import SquarePipeline
from ..train.checkpoint import write_file
from ..weights.compare import load_into
from ..weights.read import load_header, load_rest
from ..weights.write import save_weights


@dataclass(frozen=True)
class Features:
    """Embeddings of images.

    Attributes:
        vectors: (n, c), float32: the pooled features before the classifier.
        labels: (n,).
        names: names of the files.
        classes: names of the classes.
    """

    vectors: Tensor
    labels: Tensor
    names: Sequence[str]
    classes: Sequence[str]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"names": json.dumps(list(self.names)), "classes": json.dumps(list(self.classes))}
        tensors = {"vectors": self.vectors, "labels": self.labels}
        write_file(path, lambda temporary: save_file(tensors, temporary, metadata=about))

    @classmethod
    def load(cls, path: Path) -> Features:
        """Read a file of `save`."""
        if not path.is_file():
            raise DataError(f"there is no file {path}; pale features writes one")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                vectors, labels = file.get_tensor("vectors"), file.get_tensor("labels")
            names, classes = (parse_json(about[each]) for each in ("names", "classes"))
            _require_complete(vectors, labels, names, classes)
            return cls(vectors, labels, names, classes)
        except (SafetensorError, KeyError, ValueError) as error:
            raise DataError(
                f"{path} holds no features ({error}); pale features writes them"
            ) from None


def _require_complete(vectors: Tensor, labels: Tensor, names: object, classes: object) -> None:
    """Raise `ValueError` unless there is a label and a name for each vector, and a class for each label."""
    for given, what in ((names, "names"), (classes, "classes")):
        if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
            raise ValueError(f"its {what} are not a list of strings")
    if vectors.ndim != 2 or not vectors.is_floating_point() or labels.dtype != torch.int64:
        raise ValueError("its vectors or labels have a wrong type or shape")
    assert isinstance(names, list)
    assert isinstance(classes, list)
    if labels.shape != (len(vectors),) or len(names) != len(vectors):
        raise ValueError(f"{len(vectors)} vectors, {len(labels)} labels, {len(names)} names")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise ValueError(f"some labels are outside its {len(classes)} classes")


def load_backbone(path: Path, recipe: str | None = None) -> tuple[nn.Module, SquarePipeline]:
    """Load the model of a run or of weights, and return it with its preprocessing."""
    weights = load_header(path)
    chosen = stored_recipe(weights.about, path, recipe)
    pipeline = chosen.task_class.pipeline
    if not pipeline.has_embedding or not issubclass(pipeline, SquarePipeline):
        raise WeightsError(
            f"features need weights of a classifier, {path} is for {chosen.kind}; give other weights"
        )
    made = pipeline.from_recipe(chosen, weights.about, str(path), trusted=recipe is not None)
    model = build_for(weights, lambda: made.build(chosen), path)
    load_into(model, load_rest(weights, path), path, new_head=False)
    return model.eval(), made


def extract_folder(
    weights: Path,
    recipe: str | None,
    root: Path,
    output: Path,
    workers: int,
    device: str,
    track: Track,
) -> Features:
    """Write the embeddings of a folder of images to `output`, and return them."""
    model, pipeline = load_backbone(weights, recipe)
    images, size, crop = read_folder(root), pipeline.size, pipeline.crop
    found = extract(model, images, size, crop, workers=workers, device=device, track=track)
    found.save(output)
    return found


@torch.no_grad()
def extract(
    model: nn.Module,
    source: ImageSource,
    size: int,
    crop: float,
    *,
    batch: int = 64,
    workers: int = 0,
    device: str = "cpu",
    track: Track = no_progress,
) -> Features:
    """Return the embeddings of all images of a source, in its order."""
    data = ImageDataset(source, eval_transform(size, crop), seed=0)
    keys = [(0, index) for index in range(len(source))]
    loader = DataLoader(
        data,
        batch_sampler=[keys[i : i + batch] for i in range(0, len(keys), batch)],
        collate_fn=collate,
        num_workers=workers,
    )
    model = model.to(choose_device(device)).eval()
    vectors = []
    for images in track(iterate_batches(loader), "computing features", len(loader)):
        maps = model.forward_features(normalise(images["images"].to(device)))  # type: ignore[operator]
        vectors.append(model.forward_head(maps, pre_logits=True).float().cpu())  # type: ignore[operator]
    names = [source.name(index) for index in range(len(source))]
    return Features(torch.cat(vectors), torch.tensor(source.labels), names, list(source.classes))


@dataclass(frozen=True)
class Probe:
    """Accuracy of a linear classifier on frozen features.

    Attributes:
        train: accuracy on the training set in per cent.
        val: accuracy on the validation set in per cent.
        strength: strength of the penalty on the weights, chosen on a tenth of the training set.
    """

    train: float
    val: float
    strength: float


def require_same_classes(train: Features, val: Features) -> None:
    """Raise `DataError` unless the labels of both sets mean the same."""
    if list(train.classes) != list(val.classes):
        raise DataError(
            f"both sets need the same classes, got {len(train.classes)} and {len(val.classes)} others; "
            "compute the features of both from one dataset"
        )


STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)


def probe(train: Features, val: Features, seed: int = 0) -> Probe:
    """Return the accuracy of a linear classifier; see `fit_probe`."""
    return fit_probe(train, val, seed)[0]


def fit_probe(train: Features, val: Features, seed: int = 0) -> tuple[Probe, nn.Linear]:
    """Fit a linear classifier by L-BFGS on standardised features; return its accuracy and the layer for plain features.

    The penalty is chosen on a tenth of the training set, not on `val`; then the whole training set is used.
    """
    require_same_classes(train, val)
    mean, std = train.vectors.mean(0), train.vectors.std(0) + 1e-6
    x, y = (train.vectors - mean) / std, train.labels
    x_val, y_val = (val.vectors - mean) / std, val.labels
    order: NDArray[np.int64] = np.random.default_rng(seed).permutation(len(y))
    held = max(1, len(y) // 10)
    a, b = torch.from_numpy(order[held:]), torch.from_numpy(order[:held])
    n = len(train.classes)
    scores = {s: _accuracy(fit(x[a], y[a], n, s), x[b], y[b]) for s in STRENGTHS}
    best = max(STRENGTHS, key=lambda strength: (scores[strength], strength))
    layer = fit(x, y, n, best)
    found = Probe(_accuracy(layer, x, y), _accuracy(layer, x_val, y_val), best)
    with torch.no_grad():  # standardising becomes a part of the layer
        layer.weight.div_(std)
        layer.bias.sub_(layer.weight @ mean)
    return found, layer


def save_probe(
    layer: nn.Linear, classes: Sequence[str], weights: Path, recipe: str | None, path: Path
) -> None:
    """Write the model of weights with another classifier, for `pale predict`, `serve` and `export`.

    Args:
        layer: result of `fit_probe`.
        classes: names of its outputs.
        weights: run or file that the features were computed with.
        recipe: name of the recipe, for weights without one.
        path: the file to write.
    """
    model, _ = load_backbone(weights, recipe)
    head: Any = model.get_classifier()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or head.in_features != layer.in_features:
        width = getattr(head, "in_features", "another kind of layer")
        raise WeightsError(
            f"the features have {layer.in_features} values, the classifier of {weights} takes {width}; give the "
            "weights that computed the features"
        )
    head.weight, head.bias = layer.weight, layer.bias
    about = load_header(weights).about
    chosen = without_start(stored_recipe(about, weights, recipe))
    path.parent.mkdir(parents=True, exist_ok=True)
    stated = {"recipe": chosen.plain(), "classes": list(classes)}
    write_file(path, lambda temporary: save_weights(temporary, model.state_dict(), stated))


def fit(x: Tensor, y: Tensor, classes: int, strength: float) -> nn.Linear:
    """Fit multinomial logistic regression with a squared penalty; the loss is convex, so the start does not matter."""
    layer = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=100, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x), y) + strength / 2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return layer


@torch.no_grad()
def _accuracy(layer: nn.Linear, x: Tensor, y: Tensor) -> float:
    return 100 * float((layer(x).argmax(1) == y).float().mean())
